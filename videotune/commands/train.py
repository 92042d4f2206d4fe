"""``train``: open a run, train it, export the result and write the report."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from videotune.commands.publish import publish
from videotune.config.notify_addresses import masked_list
from videotune.console import doing, echo, guard_stderr
from videotune.data.workers import close_default_workers
from videotune.distributed import DistributedContext, join, must_run_together
from videotune.errors import DONE, INTERRUPTED, VideotuneError
from videotune.exporter.formats import Exported
from videotune.job.job import refuse_nothing_to_learn
from videotune.job.overrides import ConfigSource, Overrides, to_overrides, user_keys
from videotune.job.skips import refuse_skips
from videotune.memory import accelerator, compiling
from videotune.planner.out_of_memory import (
    DeviceFull,
    device_full_message,
    retry_settings,
    save_before_failed_step,
)
from videotune.planner.plan import make_plan
from videotune.planner.settings import chosen_for_run, peak
from videotune.process_watch import is_lost_connection
from videotune.reporter import build, contact_sheet
from videotune.reporter.outcome import FINISHED_STATES, status
from videotune.runs.checkpoint import complete_checkpoints, pick
from videotune.runs.checkpoint_pusher import CheckpointPusher, open_pusher
from videotune.runs.heartbeat import Heartbeat, keep_heartbeat
from videotune.runs.notifications import Notifier, keep_addresses, open_notifier
from videotune.runs.run_dir import BegunRun, only_process, write_begun
from videotune.runs.same_command import begun_by_this_command, launcher_restarts
from videotune.runs.stop_signals import end_process_on_requests, signals
from videotune.text import as_argument
from videotune.trainer import saving
from videotune.trainer.deterministic import deterministic_kernels
from videotune.trainer.export import export_run
from videotune.trainer.loop import NoBatch, NotFinite, train_loop
from videotune.trainer.progress import Resumed, announce
from videotune.trainer.rank_meter import RankMeter
from videotune.trainer.restoring import restore
from videotune.trainer.resume import OpenedRun, Resume, open_run
from videotune.trainer.setup import build_trainer
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import callbacks_of
from videotune.validation.recommended_checkpoint import recommend_checkpoint


@dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    All but ``run``, ``why`` and ``step`` are set only on the main process.
    """

    run: Path
    why: str
    """One of "done", "early", or what interrupted it."""
    step: int
    """The last step."""
    exports: Sequence[Exported] = ()
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """The recommended checkpoint: {"step", "why"}."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each state of the run."""
    memory: Mapping[str, int | None] | None = None
    """Bytes at the peak, of a device with memory of its own."""
    report: Path | None = None
    is_toy: bool = False
    """Whether the toy was trained, whose files no other program reads."""

    @property
    def saved(self) -> bool:
        """Whether the run has a checkpoint."""
        return bool(complete_checkpoints(self.run))

    def to_json(self) -> dict[str, Any]:
        """Return what ``train --json`` prints."""
        return {
            "exit_code": self.exit_code,
            "run": str(self.run),
            "why": self.why,
            "step": self.step,
            "exports": [exported.to_json(self.run) for exported in self.exports],
            "recommended": self.recommended,
            "seconds": self.seconds,
            "memory": self.memory,
            "report": self.report,
        }

    @property
    def exit_code(self) -> int:
        """0: trained to the end; 130: interrupted, and saved.

        Under a launcher that starts a command again until it ends with 0, a request to
        stop is an end as well.
        """
        is_end = self.why in FINISHED_STATES
        if launcher_restarts():
            is_end = is_end or self.why == "stopped"
        return DONE if is_end else INTERRUPTED


def train(
    config: ConfigSource = None,
    out: Path | str = "run",
    *,
    resume: Resume | bool = False,
    auto_resume: bool = False,
    allow_skips: str | None = None,
    program_start: float | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train to the end, or until asked to stop; export and report the result.

    If a step runs out of memory and the config allows it, the run continues once with a
    setting that needs less memory and gives the same result.

    Args:
        config: the config.
        out: the run folder.
        resume: continue the run in ``out``.
        auto_resume: continue the run in ``out`` if the same config began it, and begin
            it if there is none. torchrun with --max-restarts sets it.
        allow_skips: how many clips may be skipped: a number, or "all".
        program_start: the ``time.perf_counter()`` at which the program began, if its time
            counts as the run's.
        overrides: fields of ``Overrides``.
    """
    program_start = time.perf_counter() if program_start is None else program_start
    run = Path(out)
    resume_options: Resume | None = None
    if resume:
        resume_options = Resume() if resume is True else resume
    # A resume trains on what was allowed at the start.
    skips_of_new_run = None if resume_options else allow_skips
    all_overrides = to_overrides(config, overrides, skips_of_new_run)

    guard_stderr()
    end_process_on_requests()
    try:
        return train_once(
            all_overrides,
            run,
            resume=resume_options,
            auto_resume=auto_resume or launcher_restarts(),
            allow_skips=allow_skips,
            program_start=program_start,
        )
    except DeviceFull as error:
        if not error.remedy:
            raise
        reason = str(error).splitlines()[0]
        sets = error.remedy

    # Outside of the handler, nothing holds the tensors of the first try.
    echo(f"{reason} Trying once more with {' '.join(sets)}")
    return train_once(Overrides(sets=sets), run, resume=Resume())


@dataclass(frozen=True)
class Followers:
    """Messages and uploads that follow the journal of a run."""

    notifier: Notifier
    pusher: CheckpointPusher

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Send how the block ended; then finish uploads, unless the process must end
        quickly.
        """
        finishes_uploads = True
        try:
            with self.notifier.watching(_tries_again):
                yield
        except BaseException as error:
            # A run that lost a connection goes on when this process has ended.
            finishes_uploads = not (
                isinstance(error, KeyboardInterrupt)
                or _tries_again(error)
                or is_lost_connection(error)
            )
            raise
        finally:
            if finishes_uploads:
                self.pusher.close()


def train_once(
    overrides: Overrides,
    run: Path,
    *,
    resume: Resume | None,
    auto_resume: bool = False,
    allow_skips: str | None = None,
    program_start: float | None = None,
) -> TrainResult:
    """Do what ``train`` does, without a second try."""
    with join() as dist:
        is_restart = (
            resume is None
            and auto_resume
            and begun_by_this_command(run, _begun_run(overrides, allow_skips), dist)
        )
        if is_restart:
            finished = _result_if_finished(run, dist)
            if finished is not None:
                return finished
            # The run's own config is what this command asked for.
            overrides = Overrides()
            resume = Resume(restarted=True)

        opened = dist.main_first(
            lambda: open_run(
                overrides, run, resume, fit=chosen_for_run, processes=dist.size
            )
        )
        config = opened.job.config
        # A resume trains on exactly what was allowed at the start.
        if resume is None:
            refuse_nothing_to_learn(config)
            refuse_skips(opened.job, allow_skips)

        dist = replace(dist, context_parallel=config.context_parallel)
        goes_on = resume is not None
        followers = Followers(
            open_notifier(run, config, goes_on=goes_on),
            open_pusher(run, config, goes_on=goes_on),
        )
        if resume is None and dist.is_main:
            contact_sheet.cache_pictures(opened.job)
        close_default_workers()  # the scan is done; encoding starts a pool of its own
        if dist.is_main:
            doing("preparing the training")
        plan = make_plan(opened.job)
        if resume is None:
            saving.refuse_small_disk(run, plan["disk"])

        with deterministic_kernels(config.deterministic):
            if not dist.is_main:
                return run_process(opened, run, resume, plan, dist, Heartbeat(run))
            with (
                only_process(run),
                followers.watching(),
                keep_heartbeat(run, program_start, goes_on=goes_on) as heartbeat,
            ):
                keep_addresses(run, config.notify)
                if resume is None:
                    write_begun(run, _begun_run(overrides, allow_skips))
                return run_process(
                    opened, run, resume, plan, dist, heartbeat, followers
                )


def _result_if_finished(run: Path, dist: DistributedContext) -> TrainResult | None:
    """Return the result of a run that has ended as it should; None: it has not."""
    now = dist.broadcast(status(run) if dist.is_main else {})
    if now["state"] not in FINISHED_STATES:
        return None
    if dist.is_main:
        echo(
            f"{run} is finished: {now['why']}, at step {now['step']}. Nothing is left to do"
        )
    return TrainResult(run, now["state"], now["step"])


def _tries_again(error: BaseException) -> bool:
    """Return whether ``train`` goes on by itself after an error."""
    return isinstance(error, DeviceFull) and bool(error.remedy)


def _begun_run(overrides: Overrides, allow_skips: str | None) -> BegunRun:
    """Return what the user asked for, by which ``begun_by_this_command`` recognises a
    restart; URLs with secrets are in a file of their own.
    """
    keys = user_keys(overrides)
    if "notify" in keys:
        keys["notify"] = masked_list(keys["notify"])
    return {"preset": overrides.preset, "keys": keys, "allow_skips": allow_skips}


def run_process(
    opened: OpenedRun,
    run: Path,
    resume: Resume | None,
    plan: Mapping[str, Any],
    dist: DistributedContext,
    heartbeat: Heartbeat,
    followers: Followers | None = None,
) -> TrainResult:
    """Do the work of one process of the run, from loading to the report."""
    if dist.watch is not None:
        dist.watch.activity = lambda: (heartbeat.state, heartbeat.step)
    callbacks = callbacks_of(opened.job)
    trainer = build_trainer(
        opened,
        run,
        plan,
        callbacks,
        resume=resume is not None,
        dist=dist,
        heartbeat=heartbeat,
    )
    if dist.watch is not None:
        in_lockstep = must_run_together(opened.job.config, dist)
        meter = RankMeter(dist, trainer.family.device, in_lockstep=in_lockstep)
        trainer.rank_meter = meter
        heartbeat.ranks = lambda: [ranks.to_json() for ranks in meter.all_ranks()]
    if dist.is_main:
        contact_sheet.copy_pictures(opened.job, run)
    try:
        if resume is not None:
            restore(trainer, opened, branch=resume.step is not None)
        if dist.is_main:
            announce(trainer, _resumed(opened, resume))
        if followers is not None:
            attach_followers(trainer, followers)

        with signals(is_distributed=dist.size > 1) as stop_signals:
            trainer.signals = stop_signals
            why = explained_loop(trainer)
        if dist.is_main:
            result = finish(trainer, why)
        else:
            result = TrainResult(run, why, trainer.last_step)
        dist.barrier()
    finally:
        if trainer.trackers is not None:
            trainer.trackers.close()  # still open if the run failed
        trainer.journal.close()
    return result


def _resumed(opened: OpenedRun, resume: Resume | None) -> Resumed | None:
    if resume is None:
        return None
    return Resumed(opened.changes, restarted=resume.restarted)


def attach_followers(trainer: Trainer, followers: Followers) -> None:
    """Let messages and uploads follow the journal; their failures are warnings in it."""
    journal = trainer.journal

    def warn(text: str) -> None:
        journal.warn(trainer.last_step, text)

    followers.notifier.begin(journal.history.events)
    followers.notifier.warn = warn
    followers.pusher.warn = warn
    journal.followers += [followers.notifier.line, followers.pusher.line]


def explained_loop(trainer: Trainer) -> str:
    """Run ``train_loop``. An error that ends it says what was saved and what to do.

    Raises:
        DeviceFull: for a step that does not fit on the device.
        VideotuneError: for a batch that cannot be read, and for losses that are not
            finite.
    """
    try:
        return train_loop(trainer)
    except OutOfMemory as error:
        free_failed_step(error)
        rescue = save_before_failed_step(trainer, error)
        message = device_full_message(trainer, error, rescue)
        raise DeviceFull(message, retry_settings(trainer)) from error
    except NoBatch as error:
        if trainer.dist.size > 1:
            rescue = saving.rescue_message(trainer.run)
        else:
            rescue = saving.save_before_error(trainer, trainer.last_step)
        raise VideotuneError(f"{error} {rescue}") from error
    except NotFinite as error:
        last_good_step = trainer.last_step - trainer.skipped_in_a_row
        if trainer.job.config.optimizer.step_in_backward:
            # Tensors whose own gradient was finite were updated in those steps.
            rescue = saving.rescue_message(trainer.run)
        else:
            rescue = saving.save_before_error(trainer, last_good_step)
        raise VideotuneError(
            f"{error}; the journal names their clips. A resume meets the same steps: add --set "
            f"learning_rate=… --override, take the clips out, or start a new run in FLOAT_32. {rescue}"
        ) from error


def free_failed_step(error: OutOfMemory) -> None:
    """Free what the frames of a failed step hold, so that the device has room for what
    saving needs.
    """
    for exception in (error, error.__cause__):
        if exception is not None:
            traceback.clear_frames(exception.__traceback__)
    accelerator.empty_cache()


def export_of(trainer: Trainer, why: str) -> list[Exported]:
    """Export the run in its formats: its last step, and the recommended checkpoint.

    With early_stopping it is the recommended checkpoint alone. A fine-tuned model is
    large, so only its last step is exported.
    """
    job = trainer.job
    last_step = trainer.last_step
    recommended = int(recommend_checkpoint(trainer, last_step)["step"])
    exports_last_only = job.config.training_method == "FINE_TUNE"

    steps = [last_step]
    if job.config.early_stopping is not None:
        steps = [recommended]
    elif recommended != last_step and not exports_last_only:
        steps.append(recommended)

    exports = []
    for step in steps:
        # Of sharded weights this process has its rows only: all are in the checkpoint.
        is_in_memory = step == last_step and why == "done" and not trainer.shard_rows
        run = trainer.run
        state = trainer.result if is_in_memory else pick(run, step).result()
        warn = partial(trainer.journal.warn, step)
        exports += export_run(run, trainer.family, state, step, job.resolved, tell=warn)
    return exports


def push(trainer: Trainer, repo: str) -> None:
    """Upload the result; if the Hub refuses it, a warning says how to try again."""
    destination = trainer.job.config.output_model_destination
    folders = [Path(destination).expanduser()] if destination else []
    try:
        result = publish(trainer.run, repo, folders=folders)
        echo(f"pushed to {result['url']}")
    except VideotuneError as error:
        trainer.journal.warn(
            trainer.last_step,
            f"{error} The run is done. Upload it again with: "
            f"videotune publish {as_argument(trainer.run)} --repo {repo}",
        )


def finish(trainer: Trainer, why: str) -> TrainResult:
    """Export what was trained, end the journal, and write the report."""
    run = trainer.run
    job = trainer.job
    step = trainer.last_step
    history = trainer.journal.history
    saving.flush_or_wait(trainer, step)
    for callback in trainer.callbacks:
        callback.on_end(trainer, step)

    exports: Sequence[Exported] = ()
    if why in ("done", "early"):
        trainer.heartbeat.set("exporting", step)
        exports = saving.with_disk_retry(trainer, step, lambda: export_of(trainer, why))

    memory = peak(job, trainer.peaks)
    seconds = trainer.heartbeat.seconds()
    recommendation = recommend_checkpoint(trainer, step)
    details: dict[str, Any] = {}
    if memory:
        details["memory"] = memory
    compiled = trainer.pool.compiled
    if compiled is not None:
        details["compiled"] = compiling.compiled_graphs()
        details["compile_seconds"] = round(compiled.clock.seconds, 3)
    trainer.journal.event(
        "end", step=step, why=why, take=recommendation, seconds=seconds, **details
    )
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
    return TrainResult(
        run=run,
        why=why,
        step=step,
        exports=exports,
        recommended=recommendation,
        seconds=seconds,
        memory=memory,
        report=report,
        is_toy=str(job.config.base_model_name).startswith("asset:"),
    )
