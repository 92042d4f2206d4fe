"""``train``: the one loop to read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from videotune.cache.batches import Prepared, stream
from videotune.commands.export import exactly, export_run
from videotune.commands.open_run import Opened, Resume, open_run, restore
from videotune.commands.plan import make_plan
from videotune.console import bar, clock, echo, guard_stderr, size, warn
from videotune.data.workers import close_default_workers
from videotune.errors import DONE, INTERRUPTED, VideotuneError
from videotune.export.verify import Exported
from videotune.planner.fit import peak
from videotune.planner.out_of_memory import DeviceFull, device_full_message, retry_settings
from videotune.report.thumbnails import keep_pictures
from videotune.train.checkpoint import Checkpoint, complete_checkpoints, pick
from videotune.train.deterministic import same_bits
from videotune.train.distributed import DistributedContext, join
from videotune.train.engine import run_steps
from videotune.train.logging.heartbeat import Heartbeat, heartbeat
from videotune.train.resolve_config import Overrides, without_captions_too
from videotune.train.run_dir import hangup_is_termination, look, only_process, signals
from videotune.train.run_spec import refuse_skips
from videotune.train.saving import (
    backup_due,
    flush_or_wait,
    refuse_small_disk,
    rescue_message,
    save,
    save_what_is_good,
    with_disk_retry,
)
from videotune.train.step import OutOfMemory, StepRecord, StepSettings, finite
from videotune.train.throughput import report_throughput, seconds_left
from videotune.train.trainer import Trainer, announce, prepare
from videotune.validation.callbacks import before_training, measure, preview
from videotune.validation.overhead import due
from videotune.validation.sample_metrics import measure_base_samples, probe
from videotune.validation.verdict import is_new_best, stops_early, take, write_verdict

MOST_SKIPPED = 5
"""So many non-finite steps in a row end the run."""


def train(
    words: Overrides,
    run: Path,
    *,
    resume: Resume | None = None,
    allow_skips: str | None = None,
    begun: float | None = None,
) -> int:
    """Train to the end, or until asked to stop; exit code 130 where it was interrupted and saved.

    A step that had no room is tried once more where the config allows it, with a setting that needs less and is the same.
    ``begun``: the ``time.perf_counter()`` at which the program began, where its time counts as the run's.
    """
    begun = time.perf_counter() if begun is None else begun
    guard_stderr()
    hangup_is_termination()
    try:
        return train_once(words, run, resume=resume, allow_skips=allow_skips, begun=begun)
    except DeviceFull as error:
        if not error.remedy:
            raise
        told, sets = str(error).splitlines()[0], error.remedy
    echo(f"{told} Trying once more with {' '.join(sets)}")  # here nothing holds the first try's tensors any more
    return train_once(Overrides(sets=sets), run, resume=Resume())


def train_once(
    words: Overrides,
    run: Path,
    *,
    resume: Resume | None = None,
    allow_skips: str | None = None,
    begun: float | None = None,
) -> int:
    """``train``, without another try."""
    with join() as dist:
        words = words if resume else without_captions_too(words, allow_skips)
        opened = dist.main_first(lambda: open_run(words, run, resume, dist.size))
        if resume is None and dist.is_main:
            keep_pictures(opened.job)
        close_default_workers()  # a training opens no more files for hours
        if resume is None:  # a resume trains on exactly what was allowed at the start
            refuse_skips(opened.job, allow_skips)
            refuse_small_disk(run, make_plan(opened.job)["disk"])
        with same_bits(opened.job.config.deterministic):
            if not dist.is_main:
                return work(opened, run, resume, dist, Heartbeat(run))
            with only_process(run), heartbeat(run, begun, goes_on=resume is not None) as pulse:
                return work(opened, run, resume, dist, pulse)


def work(opened: Opened, run: Path, resume: Resume | None, dist: DistributedContext, pulse: Heartbeat) -> int:
    """What each process of the run does, from loading to the report."""
    first = 1 + (opened.checkpoint.step if opened.checkpoint else 0)
    trainer = prepare(opened.job, run, resume is not None, dist, pulse, first, opened.history)
    try:
        if resume is not None:
            restore(trainer, opened, branch=resume.step is not None)
        if dist.is_main:
            announce(trainer, list(opened.changes) if resume is not None else None)
        with signals(several=dist.size > 1) as asked:
            trainer.asked = asked
            why = loop(trainer)
        if dist.is_main:
            finish(trainer, why)
        dist.barrier()
    finally:
        if trainer.board is not None:
            trainer.board.close()  # what it has to say stands in the journal
        trainer.journal.close()
    return DONE if why in ("done", "early") else INTERRUPTED


def loop(trainer: Trainer) -> str:
    """Steps to the end. Records are read one step late; what has to happen between two steps happens here."""
    job, config, dist, asked = trainer.job, trainer.job.config, trainer.dist, trainer.asked
    before_training(trainer)
    measure_base_samples(trainer)
    if dist.all_agree(asked.stop)[0]:
        return "interrupted"
    records, late, step = make_records(trainer), None, trainer.first - 1
    with bar("training", lambda: BETWEEN_STEPS.get(trainer.pulse.state, "")) as progress:
        trainer.pulse.tell("training", step)
        while True:
            try:
                record = next(records, None)
            except OutOfMemory as error:
                if late is not None:
                    write_step(trainer, late, progress)
                raise DeviceFull(device_full_message(trainer, error), retry_settings(trainer)) from error
            except NoBatch as error:
                if late is not None:
                    write_step(trainer, late, progress)
                kept = rescue_message(trainer.run) if dist.size > 1 else save_what_is_good(trainer, step)
                raise VideotuneError(f"{error} {kept}") from error
            if record is None:
                return "done"
            if late is not None:
                write_step(trainer, late, progress)
            late, step = record, record.step
            trainer.pulse.tell("training", step)
            control = look(trainer.run) if dist.is_main else set()
            stop, wanted, sampled, backup = dist.all_agree(
                asked.stop or "stop" in control, "save" in control, "sample" in control, backup_due(trainer, step)
            )
            saves, samples, rules = (
                due(step, every, job.steps) for every in (config.save_every, config.sample_after, config.ruler_after)
            )
            end, failing = step == job.steps, trainer.skipped_in_a_row >= MOST_SKIPPED - 1
            # the first step's line is written at once: a sign of life is worth one wait
            if (
                step == trainer.first
                or end
                or stop
                or saves
                or wanted
                or samples
                or sampled
                or rules
                or backup
                or failing
            ):
                write_step(trainer, late, progress)
                late = None
                give_up_if_nothing_is_finite(trainer, step)
            if end or stop or saves or wanted:
                save(trainer, step)
            elif backup:
                save(trainer, step, "backup")
            if stop and not end:
                return "interrupted" if asked.stop else "stopped"
            if rules and trainer.looks:
                measure(trainer, step)
                keep_if_best(trainer, step)
            if (samples or sampled) and trainer.looks:
                preview(trainer, step)
            if (end or saves) and trainer.looks:
                probe(trainer, step)
            if (rules or samples or sampled or (saves and config.probe_budget)) and not end:
                stop, early = dist.all_agree(asked.stop, rules and stops_early(trainer))
                if stop or early:
                    save(trainer, step)
                    return "interrupted" if stop else "early"
            trainer.pulse.tell("training", step)  # a step may take minutes, and nothing of the above is done any more


class NoBatch(VideotuneError):
    """The batch of a step cannot be read; the steps before it are whole."""


def batches(trainer: Trainer) -> Iterator[Prepared]:
    """The batches of the steps that are not done. Raises NoBatch."""
    config, dist = trainer.job.config, trainer.dist
    share = (dist.rank, dist.size)
    try:
        yield from stream(
            trainer.source, trainer.first, trainer.job.steps, config.dataloader_threads, share, trainer.together
        )
    except (VideotuneError, OSError) as error:
        raise NoBatch(str(error)) from error


def make_records(trainer: Trainer) -> Iterator[StepRecord]:
    """The engine over the stream of batches, from the first step that is not done."""
    job, config, dist = trainer.job, trainer.job.config, trainer.dist
    return run_steps(
        trainer.family,
        trainer.pool.turn,
        trainer.source.objective,
        batches(trainer),
        StepSettings(
            config.gradient_accumulation_steps * job.processes,
            config.max_grad_norm,
            config.seed if config.lora.dropout else None,
            config.micro_batch_size,
        ),
        next(trainer.net.parameters()).device,
        dist,
    )


def write_step(trainer: Trainer, record: StepRecord, progress: Any) -> None:
    """A step's line into the journal and the bar; of one that was not applied the clips are named."""
    line = record.read() | {"captions": caption_numbers(trainer, record)}
    trainer.journal.write(line)
    if line.get("skipped"):
        trainer.skipped_in_a_row += 1
        parts = trainer.job.config.optimizer.step_in_backward and finite(record.values[0].item())
        what = "but for the tensors whose gradient was finite " if parts else ""
        text = f"loss or gradient not finite, step not applied: {what}{clips_of(trainer, record.broken())}"
        trainer.journal.event("warning", step=record.step, text=text)
    else:
        trainer.skipped_in_a_row = 0
    if trainer.journal.waiting:
        flush_or_wait(trainer, record.step)
    report_throughput(trainer, record.step, line)
    if trainer.dist.is_main:  # the others may not see the run folder
        told, left = progress_parts(trainer, record.step, line), seconds_left(trainer, record.step)
        progress.update(record.step, trainer.job.steps, told, left)


BETWEEN_STEPS = {
    "measuring": "measuring the loss",
    "sampling": "drawing previews",
    "probing": "measuring samples",
    "saving": "saving",
    "paused": "waiting for room on the disk",
}
"""What the bar says, in the place of the time left, of the heartbeat's states."""


def progress_parts(trainer: Trainer, step: int, line: Mapping[str, Any]) -> list[str]:
    """What stands beside the bar, the most important first; of what does not fit the end is left out."""
    parts = [f"loss {line['loss']:.4f}", f"{trainer.throughput.seconds_a_step:.3g} s a step"]
    if waits := trainer.throughput.waiting():
        parts.append(f"waiting for data {waits:.0%}")
    if trainer.verdict is not None and trainer.verdict.word:
        parts.append(trainer.verdict.word)
    return [*parts, f"{trainer.job.views_at(step):.1f} views a window, {trainer.band_at(step)}"]


def clips_of(trainer: Trainer, window_ids: tuple[str, ...]) -> str:
    """The clips of windows by their paths, with the window of each."""
    paths = {window.id: trainer.source.clips[window.clip_id].path for window in trainer.job.library.windows}
    return ", ".join(f"{paths.get(name, '?')} ({name})" for name in window_ids)


def give_up_if_nothing_is_finite(trainer: Trainer, step: int) -> None:
    """Raise VideotuneError where too many steps in a row were not applied; the last good state is saved before."""
    count = trainer.skipped_in_a_row
    if count < MOST_SKIPPED:
        return
    kept = save_what_is_good(trainer, step - count)
    raise VideotuneError(
        f"{count} steps in a row had a loss or gradient that is not finite; the journal names their clips. {kept} "
        "A resume meets the same steps: add --set learning_rate=… --override, take the clips out, or start anew in FLOAT_32."
    )


def caption_numbers(trainer: Trainer, record: StepRecord) -> list[int | None]:
    """Which of its clip's captions each sample was fed, in the order of check.json; None: the empty one, by dropout."""
    texts = [trainer.captions[name] for name in record.window_ids]
    return [own.index(text) if text in own else None for own, text in zip(texts, record.captions, strict=True)]


def keep_if_best(trainer: Trainer, step: int) -> None:
    """With early_stopping: what read best so far is kept, so that it is there to be taken."""
    if trainer.job.config.early_stopping is None:
        return
    best = trainer.dist.is_main and is_new_best(trainer.journal.history.events, step)
    if trainer.dist.broadcast(best) if trainer.together else best:
        save(trainer, step, "backup")


def step_of(trainer: Trainer) -> int:
    """The last step that is done."""
    return trainer.journal.history.last


def export_of(trainer: Trainer, why: str) -> list[Exported]:
    """The run's result in its formats: of its last step, or with early_stopping of the checkpoint that is to be taken."""
    run, job, step = trainer.run, trainer.job, trainer.job.steps

    def write(state: Mapping[str, Any], at: int) -> list[Exported]:
        return export_run(
            run, trainer.family, state, at, job.resolved, tell=lambda text: warn(trainer.journal, at, text)
        )

    if job.config.early_stopping is not None:
        best = take(trainer, step)["step"]
        if best != step or why == "early":
            return write(result_of(pick(run, best)), best)
    if trainer.rows:  # gathered where all have written their parts
        return write(result_of(pick(run, step)), step)
    return write(trainer.result, step)


def result_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What is exported of a checkpoint."""
    return checkpoint.load("ema" if checkpoint.has_ema else "weights")


def finish(trainer: Trainer, why: str) -> None:
    """Export what was trained, write the report, and say where everything is."""
    from videotune.report.build import write_report

    run, job, history = trainer.run, trainer.job, trainer.journal.history
    flush_or_wait(trainer, job.steps if why == "done" else step_of(trainer))
    if job.config.ruler_after:
        write_verdict(trainer, step_of(trainer), at_the_end=True)
    if why in ("done", "early"):
        trainer.pulse.tell("exporting", step_of(trainer))
        for exported in with_disk_retry(trainer, job.steps, lambda: export_of(trainer, why)):
            echo(f"{exported.format}: {exported.path}  (read back by {exported.reader}: {exactly(exported.max_error)})")
    else:
        saved = "saved" if complete_checkpoints(run) else "nothing to save yet"
        echo(f"{why} and {saved}; continue with: videotune train --out {run} --resume")
    step, held = step_of(trainer), peak(job, next(trainer.net.parameters()).device)
    if held is not None:
        planned = f", planned {size(held['planned_bytes'])}" if held["planned_bytes"] else ""
        echo(f"memory at the peak: {size(held['allocated_bytes'] or 0)} allocated{planned}")
    spent, taken = trainer.pulse.seconds(), take(trainer, step)
    if taken["step"] != step:
        echo(f"take step {taken['step']}: {taken['why']}; videotune export {run} --step {taken['step']}")
    more = {"memory": held} if held else {}
    trainer.journal.event("end", step=step, why=why, take=taken, seconds=spent, **more)
    with_disk_retry(trainer, step, trainer.journal.sync)
    trainer.pulse.tell("reporting", step)
    trainer.pulse.beat()
    report = with_disk_retry(trainer, step, lambda: write_report(run, (history.events, history.steps)))
    echo(f"report: {report}  ({clock(spent.get('training', 0.0))} of training, {clock(sum(spent.values()))} in all)")
