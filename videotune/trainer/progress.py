"""Write a run into the journal and the progress bar: its beginning, each step with its
clips, the time left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from videotune.adapters.adapter_types import parse_param_name
from videotune.console import echo
from videotune.data.dataset import totals
from videotune.files import digest
from videotune.job.job import Job
from videotune.latent_cache.sampler import bucket_of, bucket_steps_until
from videotune.memory.compiling import compiled_graphs
from videotune.runs.run_dir import read_run_config, versions
from videotune.runs.step_sums import is_loss_scale_overflow
from videotune.runs.trackers import TrackedRun, Trackers, without_paths
from videotune.text import counted, counted_are, counted_between
from videotune.trainer.expert_pool import shares
from videotune.trainer.loss_scale import GROWTH
from videotune.trainer.saving import flush_or_wait
from videotune.trainer.step_record import LOSS, StepRecord
from videotune.trainer.throughput import time_left
from videotune.trainer.trainer import Trainer

WAITS = "the steps wait for data"
"""Begin of a warning that comes once a process."""

STATUS = {
    "measuring": "measuring the loss",
    "sampling": "drawing previews",
    "probing": "measuring samples",
    "saving": "saving",
    "paused": "waiting for room on the disk",
}
"""What the bar shows in place of the time left, by state of the heartbeat."""


def current_work(trainer: Trainer) -> str:
    """Return what the bar shows in place of the time left, or ""."""
    compiled = trainer.pool.compiled
    if compiled is not None and compiled.clock.is_compiling:
        kinds = counted(len(compiled.kinds), "kind")
        return f"compiling {kinds} of blocks, {compiled.clock.seconds:.0f} s so far"
    return STATUS.get(trainer.heartbeat.state, "")


class CompileReport:
    """Reports after a step what was compiled in it, and a failure of the compiler once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._reported_graphs = compiled_graphs()
        self._has_warned = False

    def after(self, step: int) -> None:
        """Report what a step has compiled."""
        compiled = self._trainer.pool.compiled
        if compiled is None:
            return
        if compiled.failure is not None and not self._has_warned:
            self._has_warned = True
            self._trainer.journal.warn(
                step,
                f"compile: blocks cannot be compiled, and the run goes on without it: "
                f"{compiled.failure}",
            )

        graphs = compiled_graphs()
        if graphs > self._reported_graphs:
            kinds = ", ".join(sorted(compiled.kinds))
            echo(
                f"compiled {kinds}: {counted(graphs, 'graph')} by step {step}, "
                f"in {compiled.clock.seconds:.0f} s"
            )
        self._reported_graphs = graphs


@dataclass(frozen=True)
class Resumed:
    """How a run goes on."""

    changes: Sequence[str] = ()
    """What differs from before, in words."""
    restarted: bool = False
    """Whether a launcher gave the run's command again."""


def announce(trainer: Trainer, resumed: Resumed | None) -> None:
    """Write the first line of this process into the journal, open the trackers, and
    print the run in a sentence.

    Args:
        trainer: the run.
        resumed: how the run goes on. None: it begins.
    """
    job = trainer.job
    parameters = _count_parameters(trainer)
    if resumed is not None:
        _write_resume(trainer, resumed)
    if not trainer.journal.history.of_kind("start"):
        _write_start(trainer, parameters)
    track(trainer)

    expert_schedule = trainer.pool.expert_schedule
    if len(expert_schedule.names) > 1:
        steps_by_expert = ", ".join(
            f"{name} {share:.0%}" for name, share in shares(expert_schedule).items()
        )
        echo(
            f"experts: {steps_by_expert} of the steps, {expert_schedule.turn_length} in a row"
        )
    if trainer.first_step > job.steps:
        echo(f"{counted_are(job.steps, 'step')} done already: exporting again")
        return

    if job.config.deterministic:
        echo(
            "deterministic: kernels that give the same bits every time are used; the journal shows what a step takes "
            "with them"
        )
    trained = counted(parameters, "parameter")
    modules = counted(_count_modules(trainer), "module")
    echo(
        f"training {trained} in {modules} on {_describe_devices(trainer)}, "
        f"into {trainer.run}"
    )
    idle = trainer.plan["adapter"]["idle"] if trainer.plan["adapter"] else {}
    if idle:
        count = counted(sum(idle.values()), "module")
        echo(
            f"note: {count} that the config names have no effect in the steps (see generate): they "
            "stay as they are"
        )


def _count_parameters(trainer: Trainer) -> int:
    """Count what trains, of a sharded network all processes' rows."""
    replicated = [
        p for name, p in trainer.parameters.items() if name not in trainer.shard_rows
    ]
    count = sum(parameter.numel() for parameter in replicated)
    return count + sum(prod(shard.full_shape) for shard in trainer.shard_rows.values())


def _count_modules(trainer: Trainer) -> int:
    modules = set()
    for name in {*trainer.parameters, *trainer.shard_rows}:
        parsed = parse_param_name(name)
        modules.add(parsed[0] if parsed else name.rpartition(".")[0])
    return len(modules)


def _describe_devices(trainer: Trainer) -> str:
    device = trainer.device
    if trainer.dist.size == 1:
        return f"{device}"
    devices = f"{trainer.dist.size} processes, this one on {device}"
    if trainer.weights_sharded:
        devices += ", which share its weights"
    if trainer.dist.context_parallel > 1:
        devices += f", {trainer.dist.context_parallel} to a sample"
    return devices


def _write_resume(trainer: Trainer, resumed: Resumed) -> None:
    """Write the journal's line of a resume, with the number of processes before it and
    from now on.
    """
    details: dict[str, Any] = {}
    if resumed.changes:
        details["changes"] = list(resumed.changes)
    if resumed.restarted:
        details["restarted"] = True

    earlier = trainer.journal.history.of_kind("resume")
    begun_with = trainer.job.processes * trainer.dist.context_parallel
    before = earlier[-1].get("processes", 1) if earlier else begun_with
    now = trainer.dist.size
    if now > 1:
        details["processes"] = now
    if before != now:
        details["processes_before"] = before
        sizes = trainer.job.schedule.batch_sizes
        samples = counted_between(min(sizes), max(sizes), "sample")
        verb = "continues" if now == 1 else "continue"
        echo(
            f"{counted(now, 'process', 'processes')} {verb} the run of {before}: "
            f"its steps keep their {samples}"
        )
    trainer.journal.event(
        "resume", from_step=trainer.first_step - 1, versions=versions(), **details
    )


def _write_start(trainer: Trainer, parameters: int) -> None:
    job = trainer.job
    buckets = []
    for shape, bucket in zip(job.shapes, job.buckets, strict=True):
        row: dict[str, Any] = {
            "shape": str(shape),
            "windows": len(bucket),
            "tokens": job.spec.tokens(shape),
        }
        if shape.sound:
            row["sound"] = True
        buckets.append(row)
    trainer.journal.event(
        "start",
        steps=job.steps,
        effective_batch=job.effective_batch,
        device=str(trainer.device),
        versions=versions(),
        clips=totals(job.library),
        windows=len(job.library.windows),
        buckets=buckets,
        trainable_parameters=parameters,
        notes=list(job.notes),
    )


def track(trainer: Trainer) -> None:
    """Open the trackers that the config names. They follow the journal."""
    config = trainer.job.config
    start = trainer.journal.history.of_kind("start")[0]
    if not config.trackers:
        return

    settings = without_paths(read_run_config(trainer.run)["settings"])
    tracked_run = TrackedRun(
        trainer.run.resolve(),
        digest(start)[:16],
        config.tracker_project,
        settings,
        trainer.first_step,
    )
    trainer.trackers = Trackers(
        config.trackers,
        tracked_run,
        lambda reason: trainer.journal.warn(trainer.heartbeat.step, reason),
    )
    trainer.journal.followers.append(trainer.trackers.line)


def write_step(trainer: Trainer, record: StepRecord, progress: Any) -> None:
    """Write a step's line into the journal and update the bar.

    Warn of a step that was not applied, with its clips.
    """
    line = record.read() | {"captions": caption_numbers(trainer, record)}
    trainer.journal.write(line)
    trainer.last_step = record.step
    if is_loss_scale_overflow(line):
        _record_loss_scale_overflow(trainer, line)
    elif line.get("skipped"):
        trainer.skipped_in_a_row += 1
        _warn_of_skipped_step(trainer, record)
    else:
        trainer.skipped_in_a_row = 0
    if trainer.journal.waiting:
        flush_or_wait(trainer, record.step)

    bucket = bucket_of(trainer.job.schedule, record.step)
    share_waited = trainer.throughput.add(bucket, line["seconds"])
    if share_waited is not None:
        trainer.journal.warn(
            record.step,
            f"{WAITS}: {share_waited:.0%} of their time; a faster disk, or more dataloader_threads, would help",
        )

    if trainer.rank_meter is not None:
        _compare_processes(trainer, record, line["seconds"])
    if trainer.dist.is_main:  # the others may not see the run folder
        fields = progress_parts(trainer, record.step, line)
        remaining = seconds_left(trainer, record.step)
        progress.update(record.step, trainer.job.steps, fields, remaining)


def _compare_processes(
    trainer: Trainer, record: StepRecord, seconds: Mapping[str, float]
) -> None:
    """Measure a step of this process; on the main one, warn of one that is slower."""
    meter = trainer.rank_meter
    assert meter is not None
    peak = trainer.peaks.get("reserved_bytes", 0)
    meter.add(record.step, seconds, len(record.window_ids), peak)
    if trainer.dist.is_main:
        for sentence in meter.newly_slow():
            trainer.journal.warn(record.step, sentence)


def _record_loss_scale_overflow(trainer: Trainer, line: Mapping[str, Any]) -> None:
    """Write an overflow into the journal. It is not printed: with a scale that is searched
    for, some are expected.
    """
    factor = line["loss_scale"]
    trainer.journal.event(
        "warning",
        step=line["step"],
        text=f"the gradient left float16's range, step not applied: loss scale {factor:g} -> {factor / GROWTH:g}",
    )


def _warn_of_skipped_step(trainer: Trainer, record: StepRecord) -> None:
    # With updates during backward, a finite loss means that some tensors were updated.
    applied_in_part = trainer.job.config.optimizer.step_in_backward and isfinite(
        record.values[LOSS].item()
    )
    exception = (
        "but for the tensors whose gradient was finite " if applied_in_part else ""
    )
    clips = clips_of(trainer, record.broken())
    trainer.journal.warn(
        record.step,
        f"loss or gradient not finite, step not applied: {exception}{clips}",
    )


def progress_parts(trainer: Trainer, step: int, line: Mapping[str, Any]) -> list[str]:
    """Return the fields of the progress bar, the most important first.

    What does not fit is left out from the end.
    """
    parts = [
        f"loss {line['loss']:.4f}",
        f"{trainer.throughput.seconds_a_step:.3g} s a step",
    ]
    share_waited = trainer.throughput.waiting()
    if share_waited:
        parts.append(f"waiting for data {share_waited:.0%}")
    # At the end the callbacks say their last word below the bar.
    if step < trainer.job.steps:
        parts += filter(None, (callback.status() for callback in trainer.callbacks))
    parts.append(trainer.views_counted.text_at(step, trainer.job))
    return parts


def clips_of(trainer: Trainer, window_ids: tuple[str, ...]) -> str:
    """Return the paths of the clips of windows, each with the window."""
    paths = {}
    for window in trainer.job.library.windows:
        paths[window.id] = trainer.source.clips[window.clip_id].path
    return ", ".join(
        f"{paths.get(window_id, '?')} ({window_id})" for window_id in window_ids
    )


def caption_numbers(trainer: Trainer, record: StepRecord) -> list[int | None]:
    """Return which of its clip's captions each sample had, in the order of check.json.

    None: the empty one, by dropout.
    """
    numbers: list[int | None] = []
    for window_id, caption in zip(record.window_ids, record.captions, strict=True):
        captions = trainer.job.captions[window_id]
        numbers.append(captions.index(caption) if caption in captions else None)
    return numbers


def seconds_left(trainer: Trainer, step: int) -> float | None:
    """Estimate the seconds to the end once ``step`` is done: the steps of each bucket
    and the callbacks to come.
    """
    job = trainer.job
    throughput = trainer.throughput
    seconds = time_left(
        throughput.by_bucket, steps_left(job, step), tokens_of_buckets(job)
    )
    if seconds is None:
        return None
    for callback in trainer.callbacks:
        took = throughput.took.get(callback, 0.0)
        # Those of this step are still to run.
        seconds += callback.seconds_left(trainer, step - 1, took)
    return seconds


def steps_left(job: Job, step: int) -> dict[int, int]:
    """Return how many steps of each bucket come after a step."""
    done = bucket_steps_until(job.schedule, step)
    total = bucket_steps_until(job.schedule, job.steps)
    return {bucket: total[bucket] - done[bucket] for bucket in range(len(job.buckets))}


def tokens_of_buckets(job: Job) -> list[float]:
    """Return the tokens of a step of each bucket."""
    return [
        float(batch * job.spec.tokens(shape))
        for shape, batch in zip(job.shapes, job.schedule.batch_sizes, strict=True)
    ]
