"""Saving: when, what stays, and what happens where the disk has no room."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from videotune.adapters.adapter_types import parse_param_name
from videotune.adapters.lora import of_module
from videotune.console import echo, size
from videotune.errors import DoesNotFit, VideotuneError
from videotune.files import is_disk_full
from videotune.latent_cache.read_ahead import single_threaded_pool
from videotune.memory.accelerator import OVERLAPPING
from videotune.memory.host_weights import pinned
from videotune.runs.checkpoint import (
    Checkpoint,
    complete_checkpoints,
    listed,
    remove,
    superfluous,
    sweep,
)
from videotune.runs.checkpoint_writer import save_checkpoint
from videotune.runs.journal import readings_of
from videotune.runs.run_dir import poll_control
from videotune.trainer.optimizers import optimizer_state
from videotune.trainer.trainer import Callback, PendingSave, Trainer, times

T = TypeVar("T")

TRY_AGAIN = 5.0
"""Seconds between two looks at a full disk."""

SPARE = 4 << 20
"""Bytes that must stay free beside a checkpoint: the journal, the heartbeat and the marker."""


class Saving(Callback):
    """Checkpoints: every ``save_every`` steps, at the end, at a stop and when asked; backups by their own schedule."""

    at_stop = True
    word = "save"

    def __init__(self, every: int) -> None:
        self.every = every
        self._kind = "save"

    def due(self, trainer: Trainer, step: int, asked: Collection[str]) -> bool:
        """As any callback, and by time where the config says so: then it is a backup."""
        config = trainer.job.config
        saves = (
            step == trainer.job.steps
            or trainer.signals.stop
            or super().due(trainer, step, asked)
        )
        long_ago = (
            config.backup_after > 0
            and time.monotonic() - trainer.saved_at >= 60 * config.backup_after
        )
        backup = trainer.dist.is_main and (
            long_ago or (config.backup_every > 0 and step % config.backup_every == 0)
        )
        self._kind = "backup" if backup and not saves else "save"
        return saves or backup

    def run(self, trainer: Trainer, step: int) -> None:
        """Write the checkpoint that ``due`` asked for."""
        save(trainer, step, trainer.dist.broadcast(self._kind) if trainer.rows else self._kind)

    def seconds_left(self, trainer: Trainer, step: int, took: float) -> float:
        """At least the last checkpoint is still to come."""
        last = trainer.job.steps
        return (times(self.every, last, step) if self.every else int(step < last)) * took


def parts_of(trainer: Trainer) -> dict[str, Mapping[str, Tensor]]:
    """What a checkpoint holds of the training, by part."""
    moments: dict[str, Tensor] = {}
    for expert, trainable in trainer.pool.trainables.items():
        named = {
            trainer.prefix(expert) + key: parameter
            for key, parameter in trainable.parameters.items()
        }
        moments |= optimizer_state(trainable.optimizer, named)
    parts: dict[str, Mapping[str, Tensor]] = {
        "weights": trainer.parameters,
        "optimizer": moments,
    }
    return parts | ({"ema": trainer.averages} if trainer.averages else {})


def host_copy(
    parts: Mapping[str, Mapping[str, Tensor]],
) -> tuple[dict[str, dict[str, Tensor]], torch.Event | None] | None:
    """The tensors of a checkpoint copied to host memory, and the event behind the copies from a card (None: they are done).

    From a card to pinned memory, for which the host does not wait. None where half of the free memory has no room for them.
    """
    if bytes_of(parts) > psutil.virtual_memory().available // 2:
        return None
    copied = {
        part: {name: _on_host(value) for name, value in tensors.items()}
        for part, tensors in parts.items()
    }
    on_card = any(
        value.device.type in OVERLAPPING
        for tensors in parts.values()
        for value in tensors.values()
    )
    return copied, torch.accelerator.current_stream().record_event() if on_card else None


def _on_host(value: Tensor) -> Tensor:
    make = pinned if value.device.type in OVERLAPPING else torch.empty
    return make(value.shape, dtype=value.dtype).copy_(value.detach(), non_blocking=True)


def bytes_of(parts: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(value.nbytes for tensors in parts.values() for value in tensors.values())


def lora_scale(trainer: Trainer) -> float | dict[str, float] | None:
    """What an adapter's updates are multiplied by, of each module where ``lora.modules`` may differ; None: no adapter."""
    config = trainer.job.config
    if config.training_method != "LORA":
        return None
    names = (
        [name for one in trainer.pool.trainables.values() for name in one.parameters]
        if config.lora.modules
        else []
    )
    places = {place[0] for name in names if (place := parse_param_name(name))}
    return {
        path: of_module(config.lora, path).scale for path in sorted(places)
    } or config.lora.scale


def save(trainer: Trainer, step: int, kind: str = "save", thread: bool = True) -> None:
    """Begin a checkpoint, whose tensors are copied here and written by a thread: ``settle`` ends it.

    It is written at once, without ``thread`` and where it has rows of several processes, or the host has no room for a copy.
    Raises VideotuneError as ``settle`` does.
    """
    dist = trainer.dist
    rows = trainer.rows
    if step == 0 or not (dist.is_main or rows):
        return
    settle(trainer)
    kept = dist.is_main and is_kept(trainer.run, step, kind)
    if dist.all_agree(kept)[0] if rows else kept:
        return
    trainer.heartbeat.set("saving", step)
    begun = time.perf_counter()
    parts = parts_of(trainer)
    reached = {key.rpartition(".")[0] for key in parts["optimizer"]}
    without = [name for name in trainer.parameters if name not in reached]
    state = {
        "seed": trainer.job.config.seed,
        "effective_batch": trainer.job.effective_batch,
        "without_state": sorted(
            {key for own in (dist.all_gather(without) if rows else [without]) for key in own}
        ),
        "lora_scale": lora_scale(trainer),
    }

    copied = host_copy(parts) if thread and not rows else None
    tensors, arrived = copied or (parts, None)

    def write() -> Checkpoint:
        if arrived is not None:
            arrived.synchronize()
        if not rows:  # of several each finds out by itself, and all hear of it
            refuse_full(trainer.run, tensors)
        trainer.journal.sync()
        return save_checkpoint(
            trainer.run, step, tensors, state, kind, rows, dist if rows else None
        )

    trainer.saving = PendingSave(step, begun, write)
    trainer.saved_at = time.monotonic()
    if copied is None:
        settle(trainer)
        return
    pool = single_threaded_pool(1)
    trainer.saving.written = pool.submit(write)
    pool.shutdown(wait=False)


def settle(trainer: Trainer, wait: bool = True) -> None:
    """End the checkpoint that is being written: its line in the journal, and the older ones that make way for it.

    Without ``wait`` only where it is written already. Where the disk is full the run waits. Raises VideotuneError where it
    is broken, or the person ends the waiting, and whatever the thread has met.
    """
    pending = trainer.saving
    if pending is None or not (wait or pending.written is None or pending.written.done()):
        return
    trainer.saving = None
    written = pending.written
    again = written is None or isinstance(
        written.exception(), OSError
    )  # the disk may have room since
    saved = with_disk_retry(
        trainer, pending.step, pending.write if written is None or again else written.result
    )
    if trainer.dist.is_main:
        write_saved(trainer, saved, seconds=round(time.perf_counter() - pending.begun, 3))
        retire(trainer)


def write_saved(trainer: Trainer, saved: Checkpoint, seconds: float | None) -> None:
    """A checkpoint's line in the journal; ``seconds`` that it took (None: another process has written it)."""
    place = saved.folder.relative_to(trainer.run).as_posix()
    backup = {"backup": True} if saved.kind == "backup" else {}
    trainer.journal.event("save", step=saved.step, path=place, **backup, seconds=seconds)
    trainer.write_exposure(saved.step)


def is_kept(run: Path, step: int, kind: str) -> bool:
    """Whether a step's checkpoint is there already, and to stay at least as long."""
    return any(
        one.step == step and kind in ("backup", one.kind) for one in complete_checkpoints(run)
    )


def retire(trainer: Trainer) -> None:
    """Remove the checkpoints that the config lets go; the best one by the validation loss and the last one stay."""
    config = trainer.job.config
    found = complete_checkpoints(trainer.run)
    best = best_step(trainer.journal.history.events, {checkpoint.step for checkpoint in found})
    for old in superfluous(found, config.backup_keep, config.save_keep, best):
        try:
            remove(old.folder)
        except OSError as error:  # somebody has a file of it open, say: no reason to end a run whose state is saved
            text = f"the old checkpoint {old.folder.name} cannot be taken away: {error}"
            trainer.journal.warn(found[-1].step, text)


def best_step(lines: Iterable[Mapping[str, Any]], steps: Collection[int]) -> int | None:
    """Of ``steps`` the one with the lowest normalised reading over held-out clips; None where none was read.

    Only validations of the latest set compare. Where no clip is held out nothing can be called best.
    """
    held_out = {
        line["step"]: (line.get("held_out") or {}).get("normalised")
        for line in readings_of(lines)
    }
    found = {
        step: value for step, value in held_out.items() if value is not None and step in steps
    }
    return min(found, key=lambda step: (found[step], step), default=None)


def refuse_full(run: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise OSError where the disk has no room for a checkpoint, before any of it is written."""
    need = bytes_of(parts) + SPARE
    free = shutil.disk_usage(run).free
    if free < need:
        what = f"{os.strerror(errno.ENOSPC)}: {size(need)} are needed, {size(free)} free"
        raise OSError(errno.ENOSPC, what, str(run))


def wait_or_raise(trainer: Trainer, step: int, error: OSError) -> None:
    """Wait while the disk is full, once; raise VideotuneError where it is broken instead, or the person ends the waiting.

    A run that was asked to stop already waits as well, since what it has to write is what the person would lose; a second
    signal ends it.
    """
    if not is_disk_full(error):
        raise VideotuneError(
            f"step {step} cannot be saved in {trainer.run}: {error}. {rescue_message(trainer.run)}"
        ) from error
    sweep(trainer.run)
    if trainer.paused_at is None:
        trainer.paused_at = time.monotonic()
        text = f"no room for what step {step} has to write ({error.strerror or error}): the run waits until there is"
        echo(
            f"paused: {text}. Make room, and it goes on by itself; Ctrl-C ends it. {rescue_message(trainer.run)}"
        )
        trainer.journal.event("warning", step=step, text=text)
    trainer.heartbeat.set("paused", step)
    trainer.heartbeat.beat()
    until = time.monotonic() + TRY_AGAIN
    while time.monotonic() < until:
        asked_since = trainer.signals.stop and trainer.signals.at >= trainer.paused_at
        if asked_since or "stop" in poll_control(trainer.run):
            saved = is_kept(trainer.run, step, "backup")
            lost = (
                "all steps are saved"
                if saved
                else "the steps since the last checkpoint are lost"
            )
            raise VideotuneError(
                f"stopped while the disk was full: {lost}. {rescue_message(trainer.run)}"
            )
        time.sleep(0.2)


def with_disk_retry(trainer: Trainer, step: int, write: Callable[[], T]) -> T:
    """What ``write`` gives; where the disk is full the run waits, and does it again.

    Raises VideotuneError as ``wait_or_raise`` does.
    """
    doing = trainer.heartbeat.state
    while True:
        try:
            done = write()
            break
        except OSError as error:
            if trainer.dist.is_main:
                wait_or_raise(trainer, step, error)
            elif not is_disk_full(error):
                raise VideotuneError(
                    f"step {step} cannot be saved in {trainer.run}: {error}"
                ) from error
    if trainer.paused_at is not None:
        echo("there is room again: going on")
        trainer.paused_at = None
        trainer.heartbeat.set(doing)
    return done


def flush_or_wait(trainer: Trainer, step: int) -> None:
    """Nothing of the journal waits when this returns; on a full disk the run waits instead."""
    with_disk_retry(trainer, step, trainer.journal.flush)


def rescue_message(run: Path) -> str:
    """Where the run can go on from, in words."""
    if not complete_checkpoints(run):
        return "Nothing was saved before; a resume begins at step 0."
    return f"Checkpoints: {listed(run)}; go on with: videotune train --out {run} --resume"


def refuse_small_disk(run: Path, disk: Mapping[str, Any]) -> None:
    """Before a run: raise DoesNotFit where its disk has no room for two checkpoints; say where not for all of them."""
    if "run_bytes" not in disk:
        return
    place = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    least = 2 * disk["checkpoint_bytes"] + SPARE
    if free < least:
        raise DoesNotFit(
            f"{run}: two checkpoints need {size(least)}, and {size(free)} are free. Free some space, or give another --out"
        )
    if free < disk["run_bytes"]:
        echo(
            f"warning: {disk['checkpoints']} checkpoints and the export need {size(disk['run_bytes'])}, and {size(free)} "
            f"are free in {place}: set save_keep, or a larger save_every. On a full disk the run waits."
        )


def save_what_is_good(trainer: Trainer, step: int) -> str:
    """Before an error ends the run: keep the state after ``step``, and say where the run can continue."""
    settle(trainer)
    there = [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]
    if step and (trainer.rows or (trainer.dist.is_main and step not in there)):
        save(trainer, step, thread=False)  # there may be no memory for it
    return rescue_message(trainer.run)
