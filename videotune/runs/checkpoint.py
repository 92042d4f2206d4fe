"""Checkpoints as they lie on the disk: complete, or absent. ``checkpoint_writer`` writes them.

One process has written ``{part}.safetensors``, several each their rows of it, a file each, with ``{part}.index.json``:
``files``, and ``tensors``, each with its shape and, in the order of its rows, the files that hold some and the row with
which each begins. What is not cut stands in one file alone.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from videotune.errors import VideotuneError
from videotune.files import hash_file, is_left_behind, read_json, sync_folder
from videotune.memory.sharding import Shard
from videotune.runs.schemas import FileEntry, read_record

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. ``kind``: "save" stays as the config says, "backup" makes way for the next ones.

    ``files``: length and hash of each file, as COMPLETE lists them.
    """

    step: int
    folder: Path
    kind: str = "save"
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def verify(self, part: str, share: tuple[int, int] = (0, 1)) -> None:
        """Compare the files of a part, or state.json, with their hashes; of ``share`` (i, n) every n-th file from i on.

        Raises VideotuneError that names the first file with other bytes, and the checkpoints to use instead.
        """
        names = sorted(
            name
            for name in self.files
            if re.fullmatch(rf"{part}(-\d+-of-\d+|\.index)?\.\w+", name)
        )
        if not names:
            raise VideotuneError(
                f"checkpoint {self.folder} is damaged: {MARKER} has no file of {part}{self._others()}"
            )
        for name in names[share[0] :: share[1]]:
            if hash_file(self.folder / name) != self.files[name]["hash"]:
                raise VideotuneError(
                    f"checkpoint {self.folder} cannot be read: {name} is damaged, its bytes are not those that were written"
                    f"{self._others()}"
                )

    def _others(self) -> str:
        steps = [
            one.step
            for one in complete_checkpoints(self.folder.parent.parent)
            if one.step != self.step
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
        share: tuple[int, int] = (0, 1),
    ) -> dict[str, Tensor]:
        """The tensors of a part, whole, whether one process has written them or each its rows; their hashes are compared.

        ``rows`` by parameter name: what of them, and of what is kept of them, this process has; of the others nothing.
        ``share`` (i, n): of n processes that load it, each compares every n-th file. Raises VideotuneError where a file
        is missing or damaged.
        """
        name = f"{part}.safetensors"
        try:
            self.verify(part, share)
            if (self.folder / name).is_file():
                return cut(load_file(self.folder / name), rows or {})
            return merge_shards(self.folder, part, rows or {})
        except VideotuneError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise VideotuneError(
                f"checkpoint {self.folder} cannot be read: {name}: {error}{self._others()}"
            ) from error

    def state(self) -> dict[str, Any]:
        """state.json: the step, and the numbers that are no tensors.

        Raises VideotuneError where it is missing or damaged.
        """
        try:
            self.verify("state")
            found: dict[str, Any] = read_record(self.folder / "state.json")
        except OSError as error:
            raise VideotuneError(
                f"checkpoint {self.folder} cannot be read: state.json: {error}"
            ) from error
        return found

    @property
    def has_ema(self) -> bool:
        """Whether an average of the weights was kept."""
        return any(name in self.files for name in ("ema.safetensors", "ema.index.json"))

    def result(self) -> dict[str, Tensor]:
        """What a run gives away: the averages where there are any, else the weights."""
        return self.load("ema" if self.has_ema else "weights")


FOLDER = re.compile(r"step-(0|[1-9]\d*)")


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step-{step}"


def shards_of(name: str, shape: tuple[int, ...], rows: Mapping[str, Shard]) -> Shard | None:
    """A process's rows of a parameter, or of what an optimizer keeps of it (``{parameter}.{key}``); None: it is not cut.

    A number that is kept of a whole parameter is not cut, but only they have it who have a row.
    """
    own = rows.get(name) or rows.get(name.rpartition(".")[0])
    return own if own is not None and (shape == own.whole or not own.count) else None


def cut(state: Mapping[str, Tensor], rows: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Of whole tensors what a process has: its rows of those that are cut, all of the others."""
    out = {}
    for name, value in state.items():
        own = shards_of(name, tuple(value.shape), rows)
        if own is None:
            out[name] = value
        elif own.count:
            out[name] = own.of(value)
    return out


def merge_shards(folder: Path, part: str, rows: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The tensors of a part from the files of all processes, whole, or of each what ``rows`` says.

    Raises OSError, SafetensorError, KeyError or ValueError where a file or the index is missing or damaged.
    """
    index = read_json(folder / f"{part}.index.json")
    files = {
        file: load_file(folder / file) for file in index["files"]
    }  # mapped: what is not asked for is not read
    out = {}
    for name, told in index["tensors"].items():
        shape = tuple(told["shape"])
        own = shards_of(name, shape, rows)
        if own is not None and not own.count:
            continue
        lo, hi = (
            (own.first, own.first + own.count)
            if own is not None
            else (0, shape[0] if shape else 1)
        )
        pieces = ((files[file][name], first) for file, first in told["rows"])
        own_rows = (
            x[max(0, lo - first) : max(0, hi - first)] if shape else x for x, first in pieces
        )
        found = [piece for piece in own_rows if not shape or len(piece)]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        if tuple(whole.shape[1:]) != shape[1:] or (shape and len(whole) != hi - lo):
            raise ValueError(f"rows of {name} are missing")
        out[name] = whole
    return out


def remove(folder: Path) -> None:
    """Take a checkpoint away; its marker goes first, so that it never looks complete when it is not."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)
    sync_folder(folder.parent)


def complete_checkpoints(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run whose marker is there, with every file at the length that it lists; oldest first."""
    return [one for _, one in sorted(read_all(run).items()) if isinstance(one, Checkpoint)]


def incomplete_checkpoints(run: Path) -> dict[int, str]:
    """For each checkpoint's folder that is not complete, by step, what is wrong with it."""
    return {step: why for step, why in sorted(read_all(run).items()) if isinstance(why, str)}


def read_all(run: Path) -> dict[int, Checkpoint | str]:
    """Each checkpoint of a run, or what is wrong with it, by step."""
    names = (
        (folder, FOLDER.fullmatch(folder.name))
        for folder in (run / "checkpoints").glob("step-*")
    )
    return {int(name[1]): read_checkpoint(folder) for folder, name in names if name}


def read_checkpoint(folder: Path) -> Checkpoint | str:
    """The checkpoint in a folder, or what is wrong with it."""
    name = FOLDER.fullmatch(folder.name)
    if not name:
        return "its name is no step's"
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
        if path.stat().st_size != entry["bytes"]:
            return f"{file} has {path.stat().st_size} bytes of {entry['bytes']}"
    return Checkpoint(marker["step"], folder, marker["kind"], marker["files"])


def newest_checkpoint(
    run: Path, saved: Iterable[int] = (), option: str = "--step"
) -> Checkpoint | None:
    """The newest checkpoint; None where there is none. ``saved``: the steps at which the journal says that one was written.

    Raises VideotuneError where a newer one was damaged or lost since: an older one in its place would lose steps in silence.
    """
    found = complete_checkpoints(run)
    damaged = incomplete_checkpoints(run)
    last = found[-1].step if found else 0
    newest = max(
        (*saved, *(step for step in damaged if (folder_of(run, step) / MARKER).is_file())),
        default=0,
    )
    if newest > last:
        wrong = damaged.get(newest, "its folder is missing")
        other = (
            f"Use one of them: {option} {last}"
            if found
            else "Go back to the beginning: --from 0"
        )
        raise VideotuneError(
            f"the newest checkpoint of {run}, step {newest}, is not whole: {wrong}; {listed(run)}. {other}"
        )
    return found[-1] if found else None


def last_checkpoint(run: Path) -> Checkpoint:
    """``newest_checkpoint``; VideotuneError also where there is none."""
    if complete_checkpoints(run) and (found := newest_checkpoint(run)):
        return found
    raise VideotuneError(f"{run} has no complete checkpoint{why_not(run)}")


def pick(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest.

    Raises VideotuneError that lists the complete ones.
    """
    if step is None:
        return last_checkpoint(run)
    found = {checkpoint.step: checkpoint for checkpoint in complete_checkpoints(run)}
    if step not in found:
        raise VideotuneError(
            f"{run} has no complete checkpoint of step {step}; {listed(run)}{why_not(run)}"
        )
    return found[step]


def listed(run: Path) -> str:
    """The steps of the complete checkpoints in words."""
    steps = ", ".join(str(checkpoint.step) for checkpoint in complete_checkpoints(run))
    return f"complete are those of the steps {steps}" if steps else "none is complete"


def why_not(run: Path) -> str:
    """What is wrong with the checkpoints that are not complete, in words."""
    return "".join(
        f"\n  step {step}: {why}" for step, why in incomplete_checkpoints(run).items()
    )


def sweep(run: Path) -> None:
    """Take away what killed processes have left unfinished: checkpoints, and files that were being replaced."""
    for aside in (run / "checkpoints").glob(".step-*.part"):
        shutil.rmtree(aside)
    for path in run.rglob(".part-*"):
        if is_left_behind(path):
            path.unlink(missing_ok=True)


def superfluous(
    found: list[Checkpoint], backup_keep: int, save_keep: int | None, best: int | None
) -> list[Checkpoint]:
    """The checkpoints that make way: all but the newest backups and the newest saves; never the best or the last one."""
    backups, saves = ([one for one in found if one.kind == kind] for kind in ("backup", "save"))
    kept = {
        one.step
        for one in (*backups[-backup_keep:], *saves[-(save_keep or len(saves)) :], *found[-1:])
    }
    return [one for one in found if one.step not in kept and one.step != best]
