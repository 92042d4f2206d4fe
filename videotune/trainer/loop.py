"""The training loop: optimizer steps, and between two of them the callbacks that are
due.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter

import torch

from videotune.config.graph_checks import cannot_capture
from videotune.console import Bar, bar
from videotune.diffusion.base_targets import BaseGuidance
from videotune.errors import VideotuneError
from videotune.latent_cache.read_ahead import stream
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.accelerator import has_streams
from videotune.process_watch import ProcessLost, is_lost_connection, lost_message
from videotune.runs.run_dir import poll_control
from videotune.trainer.attention import choose_attention
from videotune.trainer.captured_passes import CapturedPasses, no_cuda_graphs
from videotune.trainer.progress import CompileReport, current_work, write_step
from videotune.trainer.saving import (
    finish_pending_save,
    is_writing,
    rescue_message,
    save,
    settle_pending_save,
    wait_for_writer,
)
from videotune.trainer.step import OutOfMemory, train_step
from videotune.trainer.step_context import StepContext
from videotune.trainer.step_record import Clock, StepRecord
from videotune.trainer.trainer import Trainer

MAX_SKIPPED_STEPS = 5
"""This many non-finite steps in a row end the run."""


class NoBatch(VideotuneError):
    """The batch of a step cannot be read. The steps before it are done."""


class NotFinite(VideotuneError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class DelayedJournal:
    """Write each step's record one step late.

    To write step k - 1 the host waits for it while the device already runs step k, so
    the host is at most one step ahead. It waits for step k itself before callbacks run, at
    the end, and where ``_must_flush_now`` says so.
    """

    def __init__(self, trainer: Trainer, progress: Bar) -> None:
        self._trainer = trainer
        self._progress = progress
        self._pending: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Write the record before this one, and keep this one."""
        self.flush()
        self._pending = record

    def flush(self) -> None:
        """Write the record that is kept, and wait for its values."""
        if self._pending is not None:
            write_step(self._trainer, self._pending, self._progress)
            self._pending = None


def train_loop(trainer: Trainer) -> str:
    """Train to the last step and return why the loop ended.

    Returns:
        "done"; "early" after an early stop; "stopped" on a request in control.json;
        "interrupted" by a signal.

    Raises:
        OutOfMemory: if a step does not fit on the device.
        NoBatch: if the batch of a step cannot be read.
        NotFinite: after ``MAX_SKIPPED_STEPS`` non-finite steps in a row.
        ProcessLost: if another process of the run is gone.
    """
    if trainer.participates:
        for callback in trainer.callbacks:
            callback.before(trainer)

    if trainer.dist.any_process(trainer.signals.stop)[0]:
        return "interrupted"

    compiled = trainer.pool.compiled
    timing_compiler = nullcontext() if compiled is None else compiled.clock.running()
    with bar("training", lambda: current_work(trainer)) as progress, timing_compiler:
        trainer.heartbeat.set("training", trainer.first_step - 1)
        try:
            return _train_to_the_end(trainer, DelayedJournal(trainer, progress))
        except (RuntimeError, ProcessLost) as error:
            if not is_lost_connection(error):
                raise
            # The last record may wait for a sum that never arrives, so it is not
            # written; a checkpoint that one process writes is whole.
            settle_pending_save(trainer)
            raise ProcessLost(
                f"{lost_message(error)}. {rescue_message(trainer.run)}"
            ) from error
        finally:
            wait_for_writer(trainer)


def _train_to_the_end(trainer: Trainer, journal: DelayedJournal) -> str:
    """Run the remaining steps and return why they ended, as ``train_loop`` does."""
    compile_report = CompileReport(trainer)
    for record in _records_until_failure(trainer, journal):
        journal.add(record)
        compile_report.after(record.step)
        step = record.step
        is_last = step == trainer.job.steps
        trainer.heartbeat.set("training", step)

        stop_reason, still_writing, due = _agree_on_requests(trainer, step)
        stop_requested = stop_reason is not None
        runs_callbacks = is_last or stop_requested or any(due)
        if runs_callbacks or _must_flush_now(trainer, step):
            journal.flush()  # updates skipped_in_a_row, which the next line checks
            _refuse_skipped_steps(trainer)
        if not still_writing:
            # If processes write a checkpoint together, all finish it after the same step.
            finish_pending_save(trainer)

        ran_more_than_saving = run_callbacks(
            trainer, step, due, stop_requested=stop_requested, is_last=is_last
        )
        if stop_requested:
            # Does nothing if the callback ``Saving`` has just saved this step to stay. If only
            # another process was asked to stop, ``Saving`` has written a backup at most, which
            # is removed in time, and this saves the step to stay.
            save(trainer, step)
        if stop_requested or is_last:
            finish_pending_save(trainer)

        if stop_reason is not None and not is_last:
            return stop_reason
        if is_last and _was_cut_short(trainer, step):
            return "interrupted"

        # A callback may take minutes, and its result may end the run.
        if ran_more_than_saving and not is_last:
            ended_by = _ended_by_callback(trainer)
            if ended_by is not None:
                # No save was due, or only a backup.
                save(trainer, step)
                finish_pending_save(trainer)
                return ended_by

        trainer.heartbeat.set("training", step)  # callbacks set other states
    return "done"


def _records_until_failure(
    trainer: Trainer, journal: DelayedJournal
) -> Iterator[StepRecord]:
    """Yield the steps' records; if a step fails, write the record of the last good one
    first.
    """
    records = train_steps(trainer)
    while True:
        try:
            record = next(records, None)
        except (OutOfMemory, NoBatch):
            journal.flush()
            settle_pending_save(trainer)
            raise

        if record is None:
            return
        yield record


def _agree_on_requests(
    trainer: Trainer, step: int
) -> tuple[str | None, bool, list[bool]]:
    """Agree with the other processes on what each was asked for.

    Returns:
        "interrupted" if any has got a signal, "stopped" if control.json asks for it,
        else None; whether any still writes a checkpoint; and for each callback whether
        it is due.
    """
    requests = poll_control(trainer.run) if trainer.dist.is_main else set()
    due = [callback.due(trainer, step, requests) for callback in trainer.callbacks]

    is_interrupted, is_stopped, still_writing, *agreed_due = trainer.dist.any_process(
        trainer.signals.stop, "stop" in requests, is_writing(trainer), *due
    )
    stop_reason = "stopped" if is_stopped else None
    if is_interrupted:
        stop_reason = "interrupted"
    return stop_reason, still_writing, agreed_due


def _must_flush_now(trainer: Trainer, step: int) -> bool:
    """Whether a step's record must be written now although no callback is due: that of
    the first step, and of one that may be the last of ``MAX_SKIPPED_STEPS`` skipped ones.
    """
    is_first = step == trainer.first_step  # a sign of life is worth one wait
    # Only written records are counted, so this step is not.
    may_fail = trainer.skipped_in_a_row >= MAX_SKIPPED_STEPS - 1
    return is_first or may_fail


def _refuse_skipped_steps(trainer: Trainer) -> None:
    """Raise NotFinite if too many steps in a row were not finite."""
    if trainer.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise NotFinite(
            f"{trainer.skipped_in_a_row} steps in a row had no finite loss or gradient"
        )


def _was_cut_short(trainer: Trainer, step: int) -> bool:
    """Whether the user has interrupted a callback of the last step, whose work a resume
    then does.
    """
    is_cut_short = (
        trainer.dist.is_main
        and bool(trainer.signals.stop)
        and any(callback.is_lacking(trainer, step) for callback in trainer.callbacks)
    )
    return trainer.dist.any_process(is_cut_short)[0]


def _ended_by_callback(trainer: Trainer) -> str | None:
    """Return "interrupted" or "early" if the run should end after callbacks have run,
    else None.
    """
    wants_early_stop = any(callback.stops(trainer) for callback in trainer.callbacks)
    interrupted, early = trainer.dist.any_process(
        trainer.signals.stop, wants_early_stop
    )
    if interrupted:
        return "interrupted"
    return "early" if early else None


def run_callbacks(
    trainer: Trainer, step: int, due: list[bool], *, stop_requested: bool, is_last: bool
) -> bool:
    """Run the callbacks that are due, and those that save on a stop and at the end.

    On a stop, no others run, unless it comes in the last step.

    Returns:
        Whether a callback ran that does more than save.
    """
    ran_more_than_saving = False
    for callback, is_due in zip(trainer.callbacks, due, strict=True):
        if callback.saves:
            should_run = is_due or stop_requested or is_last
        else:
            should_run = is_due and (is_last or not stop_requested)
        if not should_run:
            continue

        if not callback.saves:
            trainer.pool.free_graphs()  # previews and validation need their memory
        begun = perf_counter()
        if trainer.participates or callback.saves:
            callback.run(trainer, step)
        trainer.throughput.took[callback] = perf_counter() - begun
        ran_more_than_saving = ran_more_than_saving or not callback.saves
    return ran_more_than_saving


def train_steps(trainer: Trainer) -> Iterator[StepRecord]:
    """Run the steps that are left, and yield the record of each once its work is queued
    on the device, which may still compute it.

    Raises:
        OutOfMemory: if a step does not fit on the device.
        NoBatch: if the batch of a step cannot be read.
    """
    pool = trainer.pool
    context = step_context(trainer)
    choose_attention(trainer, context)
    # After attention is chosen: that times passes with each kernel, and a graph would
    # replay the first one.
    pool.captured = new_graph_cache(trainer)
    context = replace(context, captured=pool.captured)
    device = trainer.device
    previous_expert = None

    step_batches = remaining_batches(trainer)
    while True:
        clock = Clock(device)
        batch = next(step_batches, None)
        if batch is None:
            return
        clock.end_phase("data")

        active = pool.activate(batch.step)
        if active.trainable.expert and active.trainable.expert != previous_expert:
            clock.end_phase("experts")  # it may have had to be loaded
            previous_expert = active.trainable.expert

        # A callback may have called eval(); train() walks every module, so only then.
        if not active.net.training:
            active.net.train()

        with track_peak_memory(device, trainer.peaks):
            record = train_step(
                context, active.net, active.trainable, batch, clock, active.expert_step
            )

        # A suspended generator would keep this expert in memory beside the next one.
        del active
        yield record


@contextmanager
def track_peak_memory(device: torch.device, peaks: dict[str, int]) -> Iterator[None]:
    """Update ``peaks``, by torch's names, with the most bytes that the device holds
    within the block.
    """
    if not has_streams(device):
        yield
        return

    torch.accelerator.reset_peak_memory_stats(device)  # leaves out what callbacks held
    yield
    stats = torch.accelerator.memory_stats(device)
    for name in ("allocated_bytes", "reserved_bytes"):
        peaks[name] = max(peaks.get(name, 0), stats[f"{name}.all.peak"])


def step_context(trainer: Trainer) -> StepContext:
    """Return what all steps of a run share."""
    config = trainer.job.config
    return StepContext(
        family=trainer.family,
        objective=trainer.source.objective,
        # ``job.processes``: how many data-parallel processes the run began with. A resume
        # with another number splits the same samples anew, so its steps are the same.
        micro_batch_count=config.gradient_accumulation_steps * trainer.job.processes,
        # The limit of memory: a step has more micro-batches if they would be larger.
        micro_batch_size=config.micro_batch_size,
        max_grad_norm=config.max_grad_norm,
        # The adapter's dropout is all that draws inside the network.
        network_seed=config.seed if config.lora.dropout else None,
        dist=trainer.dist,
        gradient_norms=trainer.gradient_norms,
        base_guidance=base_guidance(trainer),
        compiled=trainer.pool.compiled,
    )


def new_graph_cache(trainer: Trainer) -> CapturedPasses | None:
    """Return an empty cache of CUDA graphs, which runs the passes and captures them; None
    if the run uses no graphs.

    Raises:
        VideotuneError: if the config asks for graphs, and the model or the device has
            none.
    """
    config = trainer.job.config
    # "auto": wherever they are possible, so in most LoRA runs on one CUDA GPU.
    if config.cuda_graphs is False:
        return None
    device = trainer.device
    reason = no_cuda_graphs(device) or trainer.family.no_cuda_graphs
    if trainer.dist.size > 1:
        reason = reason or "they were not tried with several processes"
    if config.cuda_graphs is True and reason:
        raise VideotuneError(f"cuda_graphs: {reason}. Set it to false.")
    # With cuda_graphs true, graph_checks has refused what cannot_capture names.
    if reason or cannot_capture(config):
        return None
    return CapturedPasses()


def base_guidance(trainer: Trainer) -> BaseGuidance | None:
    """Return the guidance that targets must keep because it was distilled into the base
    model: its scale, and the empty caption. None: targets are v of the data.
    """
    scale = trainer.job.config.distilled_guidance
    if scale is None:
        return None
    empty = trainer.family.collate_states([trainer.source.text_states("")])
    return BaseGuidance(scale, empty.map(lambda x: x.to(trainer.family.device)))


def remaining_batches(trainer: Trainer) -> Iterator[StepBatch]:
    """Yield the batches of the steps that are left. Raises NoBatch."""
    try:
        yield from stream(
            trainer.source,
            first=trainer.first_step,
            last=trainer.job.steps,
            threads=trainer.job.config.dataloader_threads,
            rank_and_size=(trainer.dist.data_rank, trainer.dist.data_size),
            # All processes gather sharded weights together, also those without a sample.
            pad_empty_share=trainer.weights_sharded,
        )
    except (VideotuneError, OSError) as error:
        raise NoBatch(str(error)) from error
