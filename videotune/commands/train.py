"""``train``: compose a run from its settings, train it, and export and report what it gave."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from videotune.commands.publish import publish
from videotune.console import echo, guard_stderr
from videotune.data.workers import close_default_workers
from videotune.distributed import DistributedContext, join
from videotune.errors import DONE, INTERRUPTED, VideotuneError
from videotune.exporter.formats import Exported
from videotune.job.job import refuse_nothing_to_learn, refuse_skips
from videotune.job.overrides import ConfigSource, Overrides, to_overrides
from videotune.memory import accelerator, compiling
from videotune.planner.fit import chosen_for_run, peak
from videotune.planner.out_of_memory import DeviceFull, device_full_message, retry_settings
from videotune.planner.plan import make_plan
from videotune.reporter import build, contact_sheet
from videotune.runs.checkpoint import complete_checkpoints, pick
from videotune.runs.heartbeat import Heartbeat, keep_heartbeat
from videotune.runs.run_dir import only_process
from videotune.runs.stop_signals import hangup_is_termination, signals
from videotune.trainer import saving
from videotune.trainer.deterministic import same_bits
from videotune.trainer.export import export_run
from videotune.trainer.loop import NoBatch, NotFinite, train_loop
from videotune.trainer.progress import announce
from videotune.trainer.resume import OpenedRun, Resume, open_run, restore
from videotune.trainer.setup import prepare
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import callbacks_of, recommended


@dataclass(frozen=True)
class TrainResult:
    """How a training ended: ``why`` is "done", "early", or what interrupted it; ``step``: the last one.

    ``exports``, ``recommended`` ({"step", "why"}), ``seconds`` by what took them, ``memory`` (bytes at the peak, of a
    device with memory of its own) and ``report`` are the main process's.
    """

    run: Path
    why: str
    step: int
    exports: Sequence[Exported] = ()
    recommended: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int | None] | None = None
    report: Path | None = None

    @property
    def saved(self) -> bool:
        """Whether the run has a checkpoint."""
        return bool(complete_checkpoints(self.run))

    def to_json(self) -> dict[str, Any]:
        """What ``train --json`` prints."""
        facts = {
            "exit_code": self.exit_code,
            "run": str(self.run),
            "why": self.why,
            "step": self.step,
        }
        facts |= {
            "exports": [one.to_json(self.run) for one in self.exports],
            "recommended": self.recommended,
        }
        return facts | {"seconds": self.seconds, "memory": self.memory, "report": self.report}

    @property
    def exit_code(self) -> int:
        """0: trained to the end; 130: interrupted, and saved."""
        return DONE if self.why in ("done", "early") else INTERRUPTED


def train(
    config: ConfigSource = None,
    out: Path | str = "run",
    *,
    resume: Resume | bool = False,
    allow_skips: str | None = None,
    begun: float | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train into the run folder ``out`` to the end, or until asked to stop; export and report the result.

    ``resume``: continue the run that lies in ``out``. A step that ran out of memory is tried once more where the config
    allows it, with a setting that needs less and gives the same. ``begun``: the ``time.perf_counter()`` at which the
    program began, where its time counts as the run's.
    """
    begun = time.perf_counter() if begun is None else begun
    run = Path(out)
    how = Resume() if resume is True else resume or None
    words = to_overrides(config, overrides, None if how else allow_skips)
    guard_stderr()
    hangup_is_termination()
    try:
        return train_once(words, run, resume=how, allow_skips=allow_skips, begun=begun)
    except DeviceFull as error:
        if not error.remedy:
            raise
        why = str(error).splitlines()[0]
        sets = error.remedy
    echo(
        f"{why} Trying once more with {' '.join(sets)}"
    )  # here nothing holds the first try's tensors any more
    return train_once(Overrides(sets=sets), run, resume=Resume())


def train_once(
    words: Overrides,
    run: Path,
    *,
    resume: Resume | None,
    allow_skips: str | None = None,
    begun: float | None = None,
) -> TrainResult:
    """``train``, without another try."""
    with join() as dist:
        opened = dist.main_first(
            lambda: open_run(words, run, resume, chosen_for_run, dist.size)
        )
        if resume is None and dist.is_main:
            contact_sheet.keep_pictures(opened.job)
        close_default_workers()  # a training opens no more files for hours
        plan = make_plan(opened.job)
        if resume is None:  # a resume trains on exactly what was allowed at the start
            refuse_nothing_to_learn(opened.job.config)
            refuse_skips(opened.job, allow_skips)
            saving.refuse_small_disk(run, plan["disk"])
        with same_bits(opened.job.config.deterministic):
            if not dist.is_main:
                return work(opened, run, resume, plan, dist, Heartbeat(run))
            with (
                only_process(run),
                keep_heartbeat(run, begun, goes_on=resume is not None) as heartbeat,
            ):
                return work(opened, run, resume, plan, dist, heartbeat)


def work(
    opened: OpenedRun,
    run: Path,
    resume: Resume | None,
    plan: Mapping[str, Any],
    dist: DistributedContext,
    beat: Heartbeat,
) -> TrainResult:
    """What each process of the run does, from loading to the report."""
    trainer = prepare(
        opened, run, plan, callbacks_of(opened.job), resume is not None, dist, beat
    )
    if dist.is_main:
        contact_sheet.copy_pictures(opened.job, run)
    try:
        if resume is not None:
            restore(trainer, opened, branch=resume.step is not None)
        if dist.is_main:
            announce(trainer, list(opened.changes) if resume is not None else None)
        with signals(is_distributed=dist.size > 1) as trainer.signals:
            why = explained_loop(trainer)
        result = (
            finish(trainer, why)
            if dist.is_main
            else TrainResult(run, why, trainer.journal.history.last)
        )
        dist.barrier()
    finally:
        if trainer.trackers is not None:
            trainer.trackers.close()  # of a run that ended early
        trainer.journal.close()
    return result


def explained_loop(trainer: Trainer) -> str:
    """``train_loop``; an error that ends it names what was saved and what to do.

    Raises DeviceFull for a step without room, VideotuneError for an unreadable batch and for losses that are not finite.
    """
    try:
        return train_loop(trainer)
    except OutOfMemory as error:
        free_failed_step(error)
        raise DeviceFull(
            device_full_message(trainer, error), retry_settings(trainer)
        ) from error
    except NoBatch as error:
        several = trainer.dist.size > 1
        done = trainer.journal.history.last
        kept = (
            saving.rescue_message(trainer.run)
            if several
            else saving.save_what_is_good(trainer, done)
        )
        raise VideotuneError(f"{error} {kept}") from error
    except NotFinite as error:
        kept = saving.save_what_is_good(
            trainer, trainer.journal.history.last - trainer.skipped_in_a_row
        )
        remedy = "add --set learning_rate=… --override, take the clips out, or start a new run in FLOAT_32."
        fault = f"{error}; the journal names their clips. {kept}"
        raise VideotuneError(f"{fault} A resume meets the same steps: {remedy}") from error


def free_failed_step(error: OutOfMemory) -> None:
    """Free what the frames of a failed step hold, so that the device has room for what saving needs."""
    for one in (error, error.__cause__):
        if one is not None:
            traceback.clear_frames(one.__traceback__)
    accelerator.empty_cache()


def export_of(trainer: Trainer, why: str) -> list[Exported]:
    """The run's result in its formats: of its last step, or with early_stopping of the recommended checkpoint."""
    run = trainer.run
    job = trainer.job
    step = trainer.job.steps
    best = step if job.config.early_stopping is None else recommended(trainer, step)["step"]
    saved = (
        best != step or why == "early" or trainer.rows
    )  # rows are gathered where all have written their parts
    state = pick(run, best).result() if saved else trainer.result
    return export_run(
        run, trainer.family, state, best, job.resolved, tell=partial(trainer.journal.warn, best)
    )


def push(trainer: Trainer, repo: str) -> None:
    """Upload the result; where the Hub does not take it, a warning says how to try again."""
    try:
        echo(f"pushed to {publish(trainer.run, repo)['url']}")
    except VideotuneError as error:
        text = (
            f"{error} The run is done; once more: videotune publish {trainer.run} --repo {repo}"
        )
        trainer.journal.warn(trainer.journal.history.last, text)


def finish(trainer: Trainer, why: str) -> TrainResult:
    """Export what was trained, end the journal, and write the report."""
    run = trainer.run
    job = trainer.job
    history = trainer.journal.history
    saving.flush_or_wait(trainer, job.steps if why == "done" else history.last)
    for callback in trainer.callbacks:
        callback.on_end(trainer, history.last)
    exports: Sequence[Exported] = ()
    if why in ("done", "early"):
        trainer.heartbeat.set("exporting", history.last)
        exports = saving.with_disk_retry(trainer, job.steps, lambda: export_of(trainer, why))
    step = history.last
    memory = peak(job, trainer.peaks)
    seconds = trainer.heartbeat.seconds()
    best = recommended(trainer, step)
    more: dict[str, Any] = {"memory": memory} if memory else {}
    more |= {"compiled": compiling.compiled_graphs()} if job.config.compile is True else {}
    trainer.journal.event("end", step=step, why=why, take=best, seconds=seconds, **more)
    if trainer.trackers is not None:
        trainer.trackers.close()
    saving.with_disk_retry(trainer, step, trainer.journal.sync)
    if job.config.push_to and exports:
        push(trainer, job.config.push_to)
    trainer.heartbeat.set("reporting", step)
    trainer.heartbeat.beat()
    report = saving.with_disk_retry(
        trainer, step, lambda: build.write_report(run, (history.events, history.steps))
    )
    return TrainResult(run, why, step, exports, best, seconds, memory, report)
