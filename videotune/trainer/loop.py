"""The training loop: one step after the other, and between two steps the callbacks that are due."""

from collections.abc import Iterator
from time import perf_counter

import torch

from videotune.console import bar
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import StepBatch, stream
from videotune.memory.accelerator import OVERLAPPING
from videotune.runs.run_dir import poll_control
from videotune.trainer.attention import choose_attention
from videotune.trainer.progress import STATUS, write_step
from videotune.trainer.saving import save, settle
from videotune.trainer.step import Clock, OutOfMemory, StepRecord, StepSettings, train_step
from videotune.trainer.trainer import Trainer

MOST_SKIPPED = 5
"""So many non-finite steps in a row end the run."""


class NoBatch(VideotuneError):
    """The batch of a step cannot be read; the steps before it are done."""


class NotFinite(VideotuneError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def train_loop(trainer: Trainer) -> str:
    """Steps to the end; why they ended: "done", "early", "stopped" or "interrupted".

    A step's record is read one step late, so that no step waits for the host. Raises OutOfMemory, NoBatch, NotFinite.
    """
    dist = trainer.dist
    callbacks = trainer.callbacks
    last = trainer.job.steps
    for callback in callbacks if trainer.participates else ():
        callback.before(trainer)
    if dist.all_agree(trainer.signals.stop)[0]:
        return "interrupted"
    records = step_records(trainer)
    late = None
    with bar("training", lambda: STATUS.get(trainer.heartbeat.state, "")) as progress:
        trainer.heartbeat.set("training", trainer.first - 1)
        while True:
            try:
                record = next(records, None)
            except (OutOfMemory, NoBatch):
                if late is not None:
                    write_step(trainer, late, progress)
                settle(trainer)
                raise
            if record is None:
                return "done"
            if late is not None:
                write_step(trainer, late, progress)
            late = record
            step = record.step
            trainer.heartbeat.set("training", step)
            asked = poll_control(trainer.run) if dist.is_main else set()
            stop, *wanted = dist.all_agree(
                trainer.signals.stop or "stop" in asked,
                *(one.due(trainer, step, asked) for one in callbacks),
            )
            end = step == last
            failing = trainer.skipped_in_a_row >= MOST_SKIPPED - 1
            # the first step's line is written at once: a sign of life is worth one wait
            if end or stop or failing or any(wanted) or step == trainer.first:
                write_step(trainer, late, progress)
                late = None
                if trainer.skipped_in_a_row >= MOST_SKIPPED:
                    raise NotFinite(
                        f"{trainer.skipped_in_a_row} steps in a row had no finite loss or gradient"
                    )
            ran = run_callbacks(trainer, step, wanted, stop, end)
            settle(trainer, wait=stop or end)
            if stop and not end:
                return "interrupted" if trainer.signals.stop else "stopped"
            if ran and not end:  # a callback may take minutes, and its result may end the run
                stop, early = dist.all_agree(
                    trainer.signals.stop, any(one.stops(trainer) for one in callbacks)
                )
                if stop or early:
                    save(trainer, step)
                    settle(trainer)
                    return "interrupted" if stop else "early"
            trainer.heartbeat.set("training", step)


def run_callbacks(
    trainer: Trainer, step: int, wanted: list[bool], stop: bool, end: bool
) -> bool:
    """Run the callbacks that are due, at a stop those alone that save; whether one ran that does more than save."""
    ran = False
    for callback, is_due in zip(trainer.callbacks, wanted, strict=True):
        if callback.at_stop:
            is_due = is_due or stop or end
        elif stop and not end:
            continue
        if is_due:
            begun = perf_counter()
            if trainer.participates or callback.at_stop:
                callback.run(trainer, step)
            trainer.throughput.took[callback] = perf_counter() - begun
            ran = ran or not callback.at_stop
    return ran


def step_records(trainer: Trainer) -> Iterator[StepRecord]:
    """The steps of a trainer from its first one on, one update for each batch.

    A step's record comes when its weights are in place. Raises OutOfMemory, NoBatch.
    """
    pool = trainer.pool
    settings = step_settings(trainer)
    choose_attention(trainer, settings)
    device = next(trainer.net.parameters()).device
    only = pool.trainable if len(pool) == 1 else None
    before = None
    ahead = batches(trainer)
    while True:
        clock = Clock(device)
        batch = next(ahead, None)
        if batch is None:
            return
        clock.mark("data")
        if only is None or pool.loaded is None:
            net, trainable, own_step = pool.switch(batch.step)
        else:
            net = pool.loaded[1]
            trainable = only
            own_step = batch.step
        if trainable.expert and trainable.expert != before:
            clock.mark("experts")  # the other one had to be loaded
            before = trainable.expert
        if not net.training:  # a callback was here; setting it walks every module
            net.train()
        if device.type in OVERLAPPING:
            torch.accelerator.reset_peak_memory_stats(
                device
            )  # what callbacks held is no part of a step
        record = train_step(settings, net, trainable, batch, clock, own_step)
        if device.type in OVERLAPPING:
            stats = torch.accelerator.memory_stats(device)
            for name in ("allocated_bytes", "reserved_bytes"):
                trainer.peaks[name] = max(trainer.peaks.get(name, 0), stats[f"{name}.all.peak"])
        del net, trainable  # a generator that waits would keep an expert beside the next one
        yield record


def step_settings(trainer: Trainer) -> StepSettings:
    """What is the same in every step of a run."""
    config = trainer.job.config
    return StepSettings(
        trainer.family, trainer.source.objective, config.gradient_accumulation_steps * trainer.job.processes,
        config.max_grad_norm, config.seed if config.lora.dropout else None, config.micro_batch_size, trainer.dist,
    )  # fmt: skip


def batches(trainer: Trainer) -> Iterator[StepBatch]:
    """The batches of the steps that are not done. Raises NoBatch."""
    job = trainer.job
    dist = trainer.dist
    threads = job.config.dataloader_threads
    share = (dist.rank, dist.size)
    try:
        yield from stream(
            trainer.source, trainer.first, job.steps, threads, share, trainer.weights_sharded
        )
    except (VideotuneError, OSError) as error:
        raise NoBatch(str(error)) from error
