"""What a run writes into the journal and the progress bar: its beginning, each step with its clips, the time left."""

from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

from videotune.adapters.adapter_types import parse_param_name
from videotune.console import echo
from videotune.data.dataset import totals
from videotune.files import digest
from videotune.job.job import Job
from videotune.latent_cache.sampler import bucket_of, steps_per_bucket
from videotune.runs.run_dir import read_run_config, versions
from videotune.runs.trackers import TrackedRun, Trackers, without_paths
from videotune.trainer.expert_pool import shares
from videotune.trainer.saving import flush_or_wait
from videotune.trainer.step import StepRecord
from videotune.trainer.throughput import time_left
from videotune.trainer.trainer import Trainer

WAITS = "the steps wait for data"
"""How the warning of that begins; it comes once a process."""

STATUS = {
    "measuring": "measuring the loss", "sampling": "drawing previews", "probing": "measuring samples",
    "saving": "saving", "paused": "waiting for room on the disk",
}  # fmt: skip
"""What the bar says, in the place of the time left, of the heartbeat's states."""


def announce(trainer: Trainer, changes: list[str] | None) -> None:
    """Write the first line of this process into the journal and print the run in a sentence.

    ``changes``: what a resume changes; None: this is no resume.
    """
    job = trainer.job
    rows = trainer.rows
    count = sum(p.numel() for name, p in trainer.parameters.items() if name not in rows)
    count += sum(prod(own.whole) for own in rows.values())
    if changes is not None:
        more: dict[str, Any] = {"changes": changes} if changes else {}
        more |= {"processes": trainer.dist.size} if trainer.dist.size > 1 else {}
        trainer.journal.event(
            "resume", from_step=trainer.first - 1, versions=versions(), **more
        )
    if not trainer.journal.history.of_kind("start"):
        trainer.journal.event(
            "start",
            steps=job.steps,
            effective_batch=job.effective_batch,
            device=str(next(trainer.net.parameters()).device),
            versions=versions(),
            clips=totals(job.library),
            windows=len(job.library.windows),
            buckets=[
                {"shape": str(shape), "windows": len(bucket), "tokens": job.spec.tokens(shape)}
                for shape, bucket in zip(job.shapes, job.buckets, strict=True)
            ],
            trainable_parameters=count,
            notes=list(job.notes),
        )
    track(trainer)
    if len(trainer.pool.expert_schedule.names) > 1:
        dealt = ", ".join(
            f"{name} {share:.0%}"
            for name, share in shares(trainer.pool.expert_schedule).items()
        )
        echo(f"experts: {dealt} of the steps, {trainer.pool.expert_schedule.period} in a row")
    if trainer.first > job.steps:
        echo(f"all {job.steps} steps are done already: exporting again")
        return
    if job.config.deterministic:
        echo(
            "deterministic: kernels that give the same bits every time; the journal has what a step takes with them"
        )
    device = next(trainer.net.parameters()).device
    several = trainer.dist.size
    where = f"{device}" if several == 1 else f"{several} processes, this one on {device}"
    where += ", which share its weights out" if trainer.weights_sharded else ""
    modules = {
        (parse_param_name(name) or (name.rpartition(".")[0],))[0]
        for name in {*trainer.parameters, *rows}
    }
    echo(
        f"training {count:,} parameters in {len(modules)} modules on {where}, into {trainer.run}"
    )


def track(trainer: Trainer) -> None:
    """Open the trackers that the config names; they follow the journal."""
    config = trainer.job.config
    (start, *_) = trainer.journal.history.of_kind("start")
    if config.trackers:
        settings = without_paths(read_run_config(trainer.run)["settings"])
        run = TrackedRun(
            trainer.run.resolve(),
            digest(start)[:16],
            config.tracker_project,
            settings,
            trainer.first,
        )
        trainer.trackers = Trackers(
            config.trackers, run, lambda why: trainer.journal.warn(trainer.heartbeat.step, why)
        )
        trainer.journal.followers.append(trainer.trackers.line)


def write_step(trainer: Trainer, record: StepRecord, progress: Any) -> None:
    """A step's line into the journal and the bar; of a step that was not applied the clips are named."""
    line = record.read() | {"captions": caption_numbers(trainer, record)}
    trainer.journal.write(line)
    if line.get("skipped"):
        trainer.skipped_in_a_row += 1
        parts = trainer.job.config.optimizer.step_in_backward and isfinite(
            record.values[0].item()
        )
        what = "but for the tensors whose gradient was finite " if parts else ""
        text = f"loss or gradient not finite, step not applied: {what}{clips_of(trainer, record.broken())}"
        trainer.journal.event("warning", step=record.step, text=text)
    else:
        trainer.skipped_in_a_row = 0
    if trainer.journal.waiting:
        flush_or_wait(trainer, record.step)
    if (
        waits := trainer.throughput.add(
            bucket_of(trainer.job.schedule, record.step), line["seconds"]
        )
    ) is not None:
        text = f"{WAITS}: {waits:.0%} of their time; a faster disk, or more dataloader_threads, would help"
        trainer.journal.warn(record.step, text)
    if trainer.dist.is_main:  # the others may not see the run directory
        shown = progress_parts(trainer, record.step, line)
        progress.update(
            record.step, trainer.job.steps, shown, seconds_left(trainer, record.step)
        )


def progress_parts(trainer: Trainer, step: int, line: Mapping[str, Any]) -> list[str]:
    """What stands beside the bar, the most important first; what does not fit is left out from the end."""
    parts = [f"loss {line['loss']:.4f}", f"{trainer.throughput.seconds_a_step:.3g} s a step"]
    if waits := trainer.throughput.waiting():
        parts.append(f"waiting for data {waits:.0%}")
    parts += [status for one in trainer.callbacks if (status := one.status())]
    return [*parts, f"{trainer.job.views_at(step):.1f} views a window, {trainer.band_at(step)}"]


def clips_of(trainer: Trainer, window_ids: tuple[str, ...]) -> str:
    """The clips of windows by their paths, with the window of each."""
    paths = {
        window.id: trainer.source.clips[window.clip_id].path
        for window in trainer.job.library.windows
    }
    return ", ".join(f"{paths.get(name, '?')} ({name})" for name in window_ids)


def caption_numbers(trainer: Trainer, record: StepRecord) -> list[int | None]:
    """Which of its clip's captions each sample had, in the order of check.json; None: the empty one, by dropout."""
    texts = [trainer.job.captions[name] for name in record.window_ids]
    return [
        own.index(text) if text in own else None
        for own, text in zip(texts, record.captions, strict=True)
    ]


def seconds_left(trainer: Trainer, step: int) -> float | None:
    """Seconds to the end when ``step`` is done, by the steps of each bucket and the callbacks still to come."""
    job = trainer.job
    speed = trainer.throughput
    steps = time_left(speed.by_bucket, steps_left(job, step), tokens_of_buckets(job))
    if steps is None:
        return None
    own = ((one, speed.took.get(one, 0.0)) for one in trainer.callbacks)
    return steps + sum(one.seconds_left(trainer, step - 1, took) for one, took in own)


def steps_left(job: Job, step: int) -> dict[int, int]:
    """How many steps of each bucket come after a step, exactly."""
    done = steps_per_bucket(job.schedule, step)
    whole = steps_per_bucket(job.schedule, job.steps)
    return {bucket: whole[bucket] - done[bucket] for bucket in range(len(job.buckets))}


def tokens_of_buckets(job: Job) -> list[float]:
    """Tokens of a step of each bucket."""
    pairs = zip(job.shapes, job.schedule.batches, strict=True)
    return [float(batch * job.spec.tokens(shape)) for shape, batch in pairs]
