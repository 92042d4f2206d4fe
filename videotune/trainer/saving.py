"""Save checkpoints: when, which ones stay, and what happens while the disk is full."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from videotune.console import echo, size
from videotune.distributed import DistributedContext, processes_here
from videotune.errors import DoesNotFit, VideotuneError
from videotune.files import existing_folder, is_disk_full
from videotune.latent_cache.thread_pool import pool_without_openmp
from videotune.runs.checkpoint import (
    Checkpoint,
    complete_checkpoints,
    listed,
    remove,
    superfluous,
    sweep,
)
from videotune.runs.checkpoint_writer import on_each, save_checkpoint
from videotune.runs.journal import readings_of, with_mean_of_modalities
from videotune.runs.run_dir import poll_control
from videotune.text import as_argument, counted
from videotune.trainer.checkpoint_parts import (
    CheckpointParts,
    bytes_of,
    collect_parts,
    has_room_for_copy,
    host_copy,
    lora_scale,
)
from videotune.trainer.optimizer_state import names_with_state
from videotune.trainer.trainer import Callback, PendingSave, Trainer, count_due

T = TypeVar("T")


TRY_AGAIN = 5.0
"""Seconds between two looks at a full disk."""

SPARE = 4 << 20
"""Bytes that must stay free beside a checkpoint: for the journal, the heartbeat and the
marker.
"""


class Saving(Callback):
    """Save every ``save_every`` steps, at the end, on a stop and when asked.

    Backups have a schedule of their own.
    """

    saves = True
    control_key = "save"

    def __init__(self, every: int) -> None:
        self.every = every
        self._kind = "save"

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        """Return whether a save or a backup is due after ``step``, and remember which of
        the two for ``run``.

        Backups are also due by time, if the config says so.
        """
        is_save = (
            step == trainer.job.steps
            or trainer.signals.stop
            or "stop" in requests
            or super().due(trainer, step, requests)
        )
        is_backup = trainer.dist.is_main and self._backup_is_due(trainer, step)
        self._kind = "backup" if is_backup and not is_save else "save"
        return is_save or is_backup

    def _backup_is_due(self, trainer: Trainer, step: int) -> bool:
        config = trainer.job.config
        if config.backup_every > 0 and step % config.backup_every == 0:
            return True
        minutes_since_save = (time.monotonic() - trainer.saved_at) / 60
        return 0 < config.backup_after <= minutes_since_save

    def run(self, trainer: Trainer, step: int) -> None:
        """Write the checkpoint that ``due`` asked for."""
        kind = self._kind
        if trainer.shard_rows:  # all processes write, and the main one knows the kind
            kind = trainer.dist.broadcast(kind)
        save(trainer, step, kind)

    def seconds_left(self, trainer: Trainer, step: int, took: float) -> float:
        """Estimate the seconds of the saves to come. One always comes at the last step."""
        last = trainer.job.steps
        saves = count_due(self.every, last, step) if self.every else int(step < last)
        return saves * took


def save(trainer: Trainer, step: int, kind: str = "save", thread: bool = True) -> None:
    """Begin a checkpoint: copy its tensors and let a thread write them.

    ``finish_pending_save`` ends it. If several processes hold rows of it, each copies
    its own, and their threads write together.

    It is written at once if ``thread`` is False, or if a host has no room for a copy.

    Args:
        trainer: the run.
        step: the step whose state is saved.
        kind: "save" or "backup".
        thread: let a thread write.

    Raises:
        VideotuneError: as ``finish_pending_save`` does.
    """
    dist = trainer.dist
    is_sharded = bool(trainer.shard_rows)
    if step == 0 or not (dist.is_main or is_sharded):
        return

    finish_pending_save(trainer)
    is_saved = dist.is_main and is_kept(trainer.run, step, kind)
    if is_sharded:
        is_saved = dist.any_process(is_saved)[0]
    if is_saved:
        return

    trainer.heartbeat.set("saving", step)
    begun = time.perf_counter()
    parts = collect_parts(trainer)
    state = _state_of(trainer, parts)

    if not (thread and _all_have_room(trainer, parts)):
        write = _make_write(trainer, step, kind, parts, state)
        trainer.pending_save = PendingSave(step, begun, write, is_shared=is_sharded)
        trainer.pending_save.waited = time.perf_counter() - begun
        trainer.saved_at = time.monotonic()
        finish_pending_save(trainer)
        return

    copies, arrived = host_copy(parts)
    write = _make_write(trainer, step, kind, copies, state, arrived)
    trainer.pending_save = PendingSave(step, begun, write, is_shared=is_sharded)
    trainer.saved_at = time.monotonic()

    pool = pool_without_openmp(1, "checkpoint")
    trainer.pending_save.written = pool.submit(write)
    pool.shutdown(wait=False)
    trainer.pending_save.waited = time.perf_counter() - begun


def _all_have_room(trainer: Trainer, parts: CheckpointParts) -> bool:
    """Return whether each process that saves has room for a copy of what it saves."""
    if not trainer.shard_rows:
        return has_room_for_copy(parts, processes=1)
    has_room = has_room_for_copy(parts, processes_here())
    return not trainer.dist.any_process(not has_room)[0]


def _make_write(
    trainer: Trainer,
    step: int,
    kind: str,
    parts: CheckpointParts,
    state: Mapping[str, Any],
    arrived: torch.Event | None = None,
) -> Callable[[], Checkpoint]:
    """Return what writes a checkpoint, in any thread.

    Args:
        trainer: the run.
        step: the step whose state is saved.
        kind: "save" or "backup".
        parts: the tensors.
        state: content of state.json.
        arrived: an event after which the tensors are there.
    """
    rows = trainer.shard_rows

    def write() -> Checkpoint:
        if arrived is not None:
            arrived.synchronize()
        if not rows:
            refuse_full(trainer.run, parts)
        # With rows all processes write together, so an error of any of them, such as a full
        # disk, is raised in all.
        writers = trainer.dist.for_writing_thread if rows else DistributedContext()
        on_each(writers, trainer.journal.sync)
        return save_checkpoint(trainer.run, step, parts, state, kind, rows, writers)

    return write


def _state_of(trainer: Trainer, parts: CheckpointParts) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json."""
    with_state = names_with_state(parts["optimizer"])
    without_state = [name for name in trainer.parameters if name not in with_state]
    if trainer.shard_rows:
        all_names: list[str] = []
        for names in trainer.dist.all_gather(without_state):
            all_names += names
        without_state = all_names
    return {
        "seed": trainer.job.config.seed,
        "effective_batch": trainer.job.effective_batch,
        "without_state": sorted(set(without_state)),
        "lora_scale": lora_scale(trainer),
    }


def is_writing(trainer: Trainer) -> bool:
    """Return whether a thread of this process still writes a checkpoint."""
    return trainer.pending_save is not None and trainer.pending_save.is_being_written


def finish_pending_save(trainer: Trainer) -> None:
    """End the checkpoint that is being written: wait for its thread, write its journal
    line, and remove older ones that make way for it.

    While the disk is full, the run waits. If the processes write it together, all call
    this after the same step.

    Raises:
        VideotuneError: if the disk is broken, or the user ends the waiting; and any
            error of the thread.
    """
    pending = trainer.pending_save
    if pending is None:
        return
    trainer.pending_save = None
    begun = time.perf_counter()
    written = pending.written

    # After an error of the disk there may be room now, so the checkpoint is written
    # again here.
    if written is None or isinstance(written.exception(), OSError):
        finish = pending.write
    else:
        finish = written.result
    saved = with_disk_retry(trainer, pending.step, finish)
    pending.waited += time.perf_counter() - begun
    _note_saved(trainer, pending, saved)


def settle_pending_save(trainer: Trainer) -> None:
    """End the checkpoint that a thread writes, in a process that fails.

    One that the processes write together is not written again after an error: the
    others may train on, or be gone.

    Raises:
        VideotuneError: as ``finish_pending_save`` does, if no other process writes.
    """
    pending = trainer.pending_save
    if pending is None:
        return
    if not pending.is_shared or pending.written is None:
        finish_pending_save(trainer)
        return

    trainer.pending_save = None
    error = pending.written.exception()
    if error is None:
        _note_saved(trainer, pending, pending.written.result())
    elif trainer.dist.is_main:
        trainer.journal.warn(pending.step, f"step {pending.step} is not saved: {error}")


def wait_for_writer(trainer: Trainer) -> None:
    """Wait until no thread writes, and leave its result alone. Threads that write a
    checkpoint together send each other messages, so no process may end before its own has.
    """
    if trainer.pending_save is not None and trainer.pending_save.written is not None:
        wait([trainer.pending_save.written])


def _note_saved(trainer: Trainer, pending: PendingSave, saved: Checkpoint) -> None:
    """Write the journal line of a checkpoint, and remove those that make way for it."""
    if not trainer.dist.is_main:
        return
    seconds = round(time.perf_counter() - pending.begun, 3)
    write_saved(trainer, saved, seconds=seconds, waited=round(pending.waited, 3))
    retire(trainer)


def write_saved(
    trainer: Trainer,
    saved: Checkpoint,
    seconds: float | None,
    waited: float | None = None,
) -> None:
    """Write a checkpoint's line into the journal.

    Args:
        trainer: the run.
        saved: the checkpoint.
        seconds: how long saving took. None: another process has saved it.
        waited: for how much of it the steps have waited. None: likewise.
    """
    path = saved.folder.relative_to(trainer.run).as_posix()
    backup = {"backup": True} if saved.kind == "backup" else {}
    trainer.journal.event(
        "save", step=saved.step, path=path, **backup, seconds=seconds, waited=waited
    )
    trainer.write_exposure(saved.step)


def is_kept(run: Path, step: int, kind: str) -> bool:
    """Return whether a step has a checkpoint of this kind; a save counts as a backup, too."""
    for checkpoint in complete_checkpoints(run):
        if checkpoint.step == step and kind in ("backup", checkpoint.kind):
            return True
    return False


def retire(trainer: Trainer) -> None:
    """Remove the checkpoints that the config lets go.

    The last one and the best one by validation loss stay.
    """
    config = trainer.job.config
    checkpoints = complete_checkpoints(trainer.run)
    steps = {checkpoint.step for checkpoint in checkpoints}
    best = best_step(trainer.journal.history.events, steps)

    for outdated in superfluous(
        checkpoints, config.backup_keep, config.save_keep, best
    ):
        try:
            remove(outdated.folder)
        except OSError as error:
            # Another program may have a file of it open. The state is saved, so the run
            # goes on.
            trainer.journal.warn(
                checkpoints[-1].step,
                f"the old checkpoint {outdated.folder.name} cannot be removed: {error}",
            )


def best_step(lines: Iterable[Mapping[str, Any]], steps: Collection[int]) -> int | None:
    """Return which of ``steps`` has the lowest normalised loss over held-out clips, or
    None if none was measured.

    ``readings_of`` leaves out readings of an earlier validation set: they do not compare.
    Without held-out clips no step can be called best.
    """
    loss_by_step: dict[int, float] = {}
    for line in with_mean_of_modalities(readings_of(lines)):
        loss = (line.get("held_out") or {}).get("normalised")
        if line["step"] not in steps:
            continue
        if loss is None:
            loss_by_step.pop(line["step"], None)
        else:
            loss_by_step[line["step"]] = loss
    return min(loss_by_step, key=lambda step: (loss_by_step[step], step), default=None)


def refuse_full(run: Path, parts: CheckpointParts) -> None:
    """Raise OSError if the disk has no room for a checkpoint, before any of it is
    written.
    """
    needed = bytes_of(parts) + SPARE
    free = shutil.disk_usage(run).free
    if free < needed:
        reason = (
            f"{os.strerror(errno.ENOSPC)}: {size(needed)} are needed, {size(free)} free"
        )
        raise OSError(errno.ENOSPC, reason, str(run))


def wait_or_raise(trainer: Trainer, step: int, error: OSError) -> None:
    """Wait once while the disk is full.

    A run that was already asked to stop waits as well, because what it has to write is
    what the user would lose. A second signal ends it.

    Raises:
        VideotuneError: if the disk is broken rather than full, or the user ends the
            waiting.
    """
    if not is_disk_full(error):
        raise VideotuneError(
            f"step {step} cannot be saved in {trainer.run}: {error}. {rescue_message(trainer.run)}"
        ) from error

    sweep(trainer.run)
    if trainer.paused_at is None:
        trainer.paused_at = time.monotonic()
        reason = (
            f"no room to save step {step} ({error.strerror or error}): "
            "the run waits until there is"
        )
        echo(
            f"paused: {reason}. Free some space, and the run continues; Ctrl-C ends it. "
            f"{rescue_message(trainer.run)}"
        )
        trainer.journal.event("warning", step=step, text=reason)
    trainer.heartbeat.set("paused", step)
    trainer.heartbeat.beat()

    until = time.monotonic() + TRY_AGAIN
    while time.monotonic() < until:
        # A request from before the pause has led to this save, so it does not end it.
        stopped_since = trainer.signals.stop and trainer.signals.at >= trainer.paused_at
        if stopped_since or "stop" in poll_control(trainer.run):
            is_saved = is_kept(trainer.run, step, "backup")
            lost = "the steps since the last checkpoint are lost"
            raise VideotuneError(
                f"stopped while the disk was full: {'all steps are saved' if is_saved else lost}. "
                f"{rescue_message(trainer.run)}"
            )
        time.sleep(0.2)


def with_disk_retry(trainer: Trainer, step: int, write: Callable[[], T]) -> T:
    """Return what ``write`` returns. While the disk is full, wait and call it again.

    Raises VideotuneError as ``wait_or_raise`` does.
    """
    state = trainer.heartbeat.state
    while True:
        try:
            result = write()
            break
        except OSError as error:
            # Only the main process waits here. The others call ``write`` again at once, and
            # wait in its first message (``on_each``) until the main one does.
            if trainer.dist.is_main:
                wait_or_raise(trainer, step, error)
            elif not is_disk_full(error):
                raise VideotuneError(
                    f"step {step} cannot be saved in {trainer.run}: {error}"
                ) from error

    if trainer.paused_at is not None:
        echo("there is room again: the run continues")
        trainer.paused_at = None
        trainer.heartbeat.set(state)
    return result


def flush_or_wait(trainer: Trainer, step: int) -> None:
    """Write every journal line that waits. While the disk is full, the run waits."""
    with_disk_retry(trainer, step, trainer.journal.flush)


def rescue_message(run: Path) -> str:
    """Return a sentence on where the run can be resumed."""
    if not complete_checkpoints(run):
        return "Nothing has been saved yet; a resume begins at step 0."
    checkpoints = listed(run)
    return f"{checkpoints[0].upper()}{checkpoints[1:]}; resume with: videotune resume {as_argument(run)}"


def refuse_small_disk(run: Path, disk: Mapping[str, Any]) -> None:
    """Check the disk before a run. Warn if it has no room for all checkpoints.

    Raises DoesNotFit if it has no room for two.
    """
    if "run_bytes" not in disk:
        return

    folder = existing_folder(run)
    free = shutil.disk_usage(folder).free
    needed = 2 * disk["checkpoint_bytes"] + SPARE
    if free < needed:
        raise DoesNotFit(
            f"{run}: two checkpoints need {size(needed)}, and {size(free)} are free. "
            "Free some space, or choose another --out"
        )
    if free < disk["run_bytes"]:
        echo(
            f"warning: {counted(disk['checkpoints'], 'checkpoint')} and the export need {size(disk['run_bytes'])}, "
            f"and {size(free)} are free in {folder}: set save_keep, or a larger save_every. "
            "While the disk is full, the run waits."
        )


def save_before_error(trainer: Trainer, step: int) -> str:
    """Save the state after ``step`` before an error ends the run, and return where it
    can be resumed.
    """
    finish_pending_save(trainer)
    saved_steps = [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]
    if step and (
        trainer.shard_rows or (trainer.dist.is_main and step not in saved_steps)
    ):
        save(trainer, step, thread=False)  # there may be no memory for a copy
    return rescue_message(trainer.run)
