"""Checkpoints on the disk, complete or absent. ``checkpoint_writer`` writes them.

One process writes ``{part}.safetensors``. Several processes write their rows into a
file each, with ``{part}.index.json``: ``files``, and ``tensors``, each with its shape
and, in the order of its rows, the files that hold some of them and the first row of
each. A tensor that is not sharded is in one file only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from videotune.errors import VideotuneError
from videotune.files import hash_file, is_left_behind, read_json, sync_folder
from videotune.lazy import safetensors_torch, torch
from videotune.runs.schemas import FileEntry, read_record

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.memory.sharding import Shard

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    step: int
    folder: Path
    kind: str = "save"
    """A "save" stays as the config says; a "backup" makes way for the next ones."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Length and hash of each file, as COMPLETE lists them."""

    def verify(self, part: str, share: tuple[int, int] = (0, 1)) -> None:
        """Compare the files of a part, or state.json, with their hashes.

        Args:
            part: "weights", "optimizer", "ema" or "state".
            share: (i, n): compare every n-th file, from the i-th on.

        Raises:
            VideotuneError: if a file has other bytes; it names the first one, and the
                checkpoints to use instead.
        """
        pattern = re.compile(rf"{part}(-\d+-of-\d+|\.index)?\.\w+")
        names = sorted(name for name in self.files if pattern.fullmatch(name))
        if not names:
            raise VideotuneError(
                f"checkpoint {self.folder} is damaged: {MARKER} lists no file of {part}{self._others()}"
            )

        first, processes = share
        for name in names[first::processes]:
            if hash_file(self.folder / name) != self.files[name]["hash"]:
                raise VideotuneError(
                    f"checkpoint {self.folder} cannot be read: {name} is damaged, its bytes are not those that were written"
                    f"{self._others()}"
                )

    def _others(self) -> str:
        """Return a sentence on the checkpoints to use instead."""
        run = self.folder.parent.parent
        steps = [
            checkpoint.step
            for checkpoint in complete_checkpoints(run)
            if checkpoint.step != self.step
        ]
        if not steps:
            return ". The run has no other checkpoint"
        return (
            f". Use another one: {', '.join(map(str, steps))} (train --resume --from {steps[-1]}; "
            f"sample, export: --step {steps[-1]})"
        )

    def load(
        self,
        part: str,
        rows: Mapping[str, Shard] | None = None,
        verify_share: tuple[int, int] = (0, 1),
    ) -> dict[str, Tensor]:
        """Load the tensors of a part, whether one process wrote them or each its rows,
        and compare hashes.

        Args:
            part: "weights", "optimizer" or "ema".
            rows: what this process has of sharded parameters, by name. Only those rows
                are returned.
            verify_share: (i, n): of n processes that load it, each compares every n-th file.

        Raises:
            VideotuneError: if a file is missing or damaged.
        """
        name = f"{part}.safetensors"
        try:
            self.verify(part, verify_share)
            if (self.folder / name).is_file():
                tensors = safetensors_torch.load_file(self.folder / name)
                return select_rows(tensors, rows or {})
            return merge_shards(self.folder, part, rows or {})
        except VideotuneError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise VideotuneError(
                f"checkpoint {self.folder} cannot be read: {name}: {error}{self._others()}"
            ) from error

    def state(self) -> dict[str, Any]:
        """Return state.json: the step, and numbers that are not tensors.

        Raises VideotuneError if it is missing or damaged.
        """
        try:
            self.verify("state")
            state: dict[str, Any] = read_record(self.folder / "state.json")
        except OSError as error:
            raise VideotuneError(
                f"checkpoint {self.folder} cannot be read: state.json: {error}"
            ) from error
        return state

    @property
    def has_ema(self) -> bool:
        """Whether it holds an average of the weights."""
        return "ema.safetensors" in self.files or "ema.index.json" in self.files

    def result(self) -> dict[str, Tensor]:
        """Return what the run exports: the averages if there are any, else the weights."""
        return self.load("ema" if self.has_ema else "weights")


FOLDER = re.compile(r"step-(0|[1-9]\d*)")


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / "checkpoints" / f"step-{step}"


def shard_of(
    name: str, shape: tuple[int, ...], rows: Mapping[str, Shard]
) -> Shard | None:
    """Return a process's rows of a tensor, or None if the tensor is not sharded.

    What an optimizer keeps of a whole parameter, such as the number of its steps, is not
    sharded. Processes without a row of the parameter do not have it: a shard without rows
    is returned for them.

    Args:
        name: of a parameter, or ``{parameter}.{key}`` for what an optimizer keeps of
            it.
        shape: of the whole tensor.
        rows: what this process has of sharded parameters, by name.
    """
    shard = rows.get(name) or rows.get(name.rpartition(".")[0])
    if shard is None:
        return None
    return shard if shape == shard.full_shape or not shard.count else None


def select_rows(
    state: Mapping[str, Tensor], rows: Mapping[str, Shard]
) -> dict[str, Tensor]:
    """Return what a process has of whole tensors: its rows of those that are sharded,
    all of the others.
    """
    sharded_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        shard = shard_of(name, tuple(tensor.shape), rows)
        if shard is None:
            sharded_state[name] = tensor
        elif shard.count:
            sharded_state[name] = shard.of(tensor)
    return sharded_state


def merge_shards(
    folder: Path, part: str, rows: Mapping[str, Shard]
) -> dict[str, Tensor]:
    """Join the tensors of a part from the files of all processes.

    Args:
        folder: of the checkpoint.
        part: "weights", "optimizer" or "ema".
        rows: what to return of sharded parameters, by name. Others are returned whole.

    Raises:
        OSError, SafetensorError, KeyError, ValueError: if a file or the index is
            missing or damaged.
    """
    index = read_json(folder / f"{part}.index.json")
    # The files are mapped: what is not used is not read.
    files = {}
    for file in index["files"]:
        files[file] = safetensors_torch.load_file(folder / file)

    merged: dict[str, Tensor] = {}
    for name, entry in index["tensors"].items():
        shape = tuple(entry["shape"])
        shard = shard_of(name, shape, rows)
        if shard is not None and not shard.count:
            continue
        pieces = [(files[file][name], first) for file, first in entry["rows"]]
        merged[name] = _join(name, pieces, shape, shard)
    return merged


def _join(
    name: str,
    pieces: list[tuple[Tensor, int]],
    shape: tuple[int, ...],
    shard: Shard | None,
) -> Tensor:
    """Join the pieces of a tensor, each with the number of its first row; only the rows
    of ``shard`` if there is one.
    """
    if not shape:
        numbers = [piece for piece, _ in pieces]
        if len(numbers) != 1 or numbers[0].shape:
            raise ValueError(f"{name} is one number and has other values")
        return numbers[0]

    begin = 0
    end = shape[0]
    if shard is not None:
        begin = shard.first
        end = shard.first + shard.count

    parts = []
    next_row = 0
    for piece, first in pieces:
        is_like_whole = (
            piece.dim() == len(shape) and tuple(piece.shape[1:]) == shape[1:]
        )
        if first != next_row or not is_like_whole:
            raise ValueError(f"rows of {name} are missing or in another order")
        next_row += len(piece)
        part = piece[max(0, begin - first) : max(0, end - first)]
        if len(part):
            parts.append(part)

    if next_row != shape[0]:
        raise ValueError(f"rows of {name} are missing")
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def remove(folder: Path) -> None:
    """Delete a checkpoint.

    Its marker goes first, so that it never looks complete when it is not.
    """
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)
    sync_folder(folder.parent)


def complete_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run that have their marker and every file at the
    length it lists, oldest first.
    """
    by_step = sorted(read_all(run).items())
    return [
        checkpoint for _, checkpoint in by_step if isinstance(checkpoint, Checkpoint)
    ]


def incomplete_checkpoints(run: Path) -> dict[int, str]:
    """Return what is wrong with each checkpoint's folder that is not complete, by step."""
    by_step = sorted(read_all(run).items())
    return {step: reason for step, reason in by_step if isinstance(reason, str)}


def read_all(run: Path) -> dict[int, Checkpoint | str]:
    """Return each checkpoint of a run, or what is wrong with it, by step."""
    by_step: dict[int, Checkpoint | str] = {}
    for folder in (run / "checkpoints").glob("step-*"):
        name = FOLDER.fullmatch(folder.name)
        if name:
            by_step[int(name[1])] = read_checkpoint(folder)
    return by_step


def read_checkpoint(folder: Path) -> Checkpoint | str:
    """Return the checkpoint in a folder, or what is wrong with it."""
    name = FOLDER.fullmatch(folder.name)
    if not name:
        return "its name is not that of a step"
    try:
        marker = read_record(folder / MARKER)
    except FileNotFoundError:
        return f"it has no {MARKER}: it was never finished"
    except (OSError, VideotuneError) as error:
        return f"its {MARKER} cannot be read ({error})"

    if marker["step"] != int(name[1]):
        return f"it is the checkpoint of step {marker['step']} under another name"
    for file, entry in marker["files"].items():
        path = folder / file
        if not path.is_file():
            return f"{file} is missing"
        length = path.stat().st_size
        if length != entry["bytes"]:
            return f"{file} has {length} bytes of {entry['bytes']}"
    return Checkpoint(marker["step"], folder, marker["kind"], marker["files"])


def newest_checkpoint(
    run: Path, saved: Iterable[int] = (), option: str = "--step"
) -> Checkpoint | None:
    """Return the newest checkpoint, or None if there is none.

    Args:
        run: the run folder.
        saved: the steps at which the journal says that one was written.
        option: the option of the command that names another step, for the message.

    Raises:
        VideotuneError: if a newer one was damaged or lost since, because an older one
            would silently lose steps.
    """
    checkpoints = complete_checkpoints(run)
    damaged = incomplete_checkpoints(run)
    last_step = checkpoints[-1].step if checkpoints else 0

    written = list(saved)
    for step in damaged:
        if (folder_of(run, step) / MARKER).is_file():
            written.append(step)
    newest = max(written, default=0)
    if newest > last_step:
        reason = damaged.get(newest, "its folder is missing")
        if checkpoints:
            remedy = f"Use one of them: {option} {last_step}"
        else:
            remedy = "Go back to the beginning: --from 0"
        raise VideotuneError(
            f"the newest checkpoint of {run}, step {newest}, is not complete: {reason}; {listed(run)}. {remedy}"
        )
    return checkpoints[-1] if checkpoints else None


def last_checkpoint(run: Path) -> Checkpoint:
    """Return the newest checkpoint.

    Raises VideotuneError as ``newest_checkpoint`` does, and if there is none.
    """
    if complete_checkpoints(run):
        checkpoint = newest_checkpoint(run)
        if checkpoint is not None:
            return checkpoint
    raise VideotuneError(f"{run} has no complete checkpoint{why_not(run)}")


def pick(run: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest for None.

    Raises VideotuneError that lists the complete ones.
    """
    if step is None:
        return last_checkpoint(run)
    for checkpoint in complete_checkpoints(run):
        if checkpoint.step == step:
            return checkpoint
    raise VideotuneError(
        f"{run} has no complete checkpoint of step {step}; {listed(run)}{why_not(run)}"
    )


def listed(run: Path) -> str:
    """List the steps of the complete checkpoints, in words."""
    steps = [str(checkpoint.step) for checkpoint in complete_checkpoints(run)]
    if not steps:
        return "no checkpoint is complete"
    if len(steps) == 1:
        return f"the only complete checkpoint is of step {steps[0]}"
    return f"complete checkpoints are those of steps {', '.join(steps)}"


def why_not(run: Path) -> str:
    """Return what is wrong with the checkpoints that are not complete, a line each."""
    return "".join(
        f"\n  step {step}: {reason}"
        for step, reason in incomplete_checkpoints(run).items()
    )


def sweep(run: Path) -> None:
    """Delete what killed processes have left unfinished: checkpoints, and files that
    were being replaced.
    """
    for unfinished in (run / "checkpoints").glob(".step-*.part"):
        shutil.rmtree(unfinished)
    for path in run.rglob(".part-*"):
        if is_left_behind(path):
            path.unlink(missing_ok=True)


def superfluous(
    checkpoints: list[Checkpoint],
    backup_keep: int,
    save_keep: int | None,
    best: int | None,
) -> list[Checkpoint]:
    """Return the checkpoints that make way for newer ones.

    The best and the last one never do.

    Args:
        checkpoints: the complete ones, oldest first.
        backup_keep: how many of the newest backups stay.
        save_keep: how many of the newest saves stay. None: all.
        best: the step with the best validation loss.
    """
    backups = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "backup"]
    saves = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "save"]
    newest_saves = saves[-(save_keep or len(saves)) :]
    staying = (*backups[-backup_keep:], *newest_saves, *checkpoints[-1:])
    staying_steps = {checkpoint.step for checkpoint in staying} | {best}
    return [
        checkpoint for checkpoint in checkpoints if checkpoint.step not in staying_steps
    ]
