"""Writing a checkpoint, by one process or by several, each its rows: aside, synced, renamed, and the marker last."""

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.files import (
    hash_file,
    is_disk_full,
    sync_file,
    sync_folder,
    system_errors,
    write_json,
)
from videotune.memory.sharding import Shard
from videotune.runs.checkpoint import MARKER, Checkpoint, folder_of, read_checkpoint, remove
from videotune.runs.schemas import FileEntry

T = TypeVar("T")

WrittenPiece = dict[str, Any]
"""What a process says of the files that it has written, by part."""


def save_checkpoint(
    run: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    kind: str = "save",
    rows: Mapping[str, Shard] | None = None,
    dist: DistributedContext | None = None,
) -> Checkpoint:
    """Write ``checkpoints/step-N`` so that at every moment it is either complete or not there.

    ``parts``: "weights", "optimizer" and, where one is kept, "ema"; ``rows``: of each of several processes the rows that it
    has and writes, the main one all that is not cut. A complete checkpoint of this step is this state already, and only
    becomes a save where it was a backup.

    Raises VideotuneError where a number is NaN or infinite, or the processes have no run folder in common; OSError where the
    disk is full or broken. Whatever goes wrong with one process is raised by each.
    """
    dist = dist or DistributedContext()
    folder = folder_of(run, step)
    aside = folder.with_name(f".{folder.name}.part")
    _on_each(dist, lambda: refuse_broken(step, parts))
    (known, *_) = _on_each(dist, lambda: _known(folder, kind) if dist.is_main else None)
    if known is not None:
        return known
    _on_each(dist, lambda: _clear(folder, aside) if dist.is_main else None)
    try:
        written = _on_each(dist, lambda: _write_own(aside, parts, rows or {}, dist))
        (done, *_) = _on_each(
            dist,
            lambda: (
                _complete(aside, folder, written, step, state, kind) if dist.is_main else None
            ),
        )
    except (OSError, VideotuneError):
        if dist.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    assert done is not None, "the main process has completed it"
    return done


def _on_each(dist: DistributedContext, work: Callable[[], T]) -> list[T]:
    """What each process's work gives, in their order; what one of them has met is raised by all alike."""
    done: Any = None
    error: OSError | VideotuneError | None = None
    try:
        done = work()
    except (OSError, VideotuneError) as met:
        error = met
    system = isinstance(error, OSError)
    full = isinstance(error, OSError) and is_disk_full(error)
    each = dist.all_gather((done, None if error is None else (str(error), system, full)))
    wrong = [one for _, one in each if one is not None]
    if not wrong:
        return [value for value, _ in each]
    text, system, full = next((one for one in wrong if one[2]), wrong[0])
    if error is not None and isinstance(error, OSError) == system:
        raise error
    raise OSError(errno.ENOSPC if full else errno.EIO, text) if system else VideotuneError(text)


def refuse_broken(step: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise VideotuneError that names the first tensor with a NaN or an infinity in it."""
    broken = [
        f"{part} of {name}"
        for part, tensors in parts.items()
        for name, value in tensors.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if broken:
        raise VideotuneError(
            f"step {step}: {len(broken)} tensors are not finite, the first: {broken[0]}: not saved"
        )


def _known(folder: Path, kind: str) -> Checkpoint | None:
    """The complete checkpoint of a step, a save from now on where one is wished; None where there is none."""
    there = read_checkpoint(folder)
    if isinstance(there, str):
        return None
    if kind == "save" and there.kind != "save":
        write_json(folder / MARKER, {"step": there.step, "kind": kind, "files": there.files})
        return replace(there, kind=kind)
    return there


def _clear(folder: Path, aside: Path) -> None:
    """Make an empty folder in which a checkpoint can be written; what a kill has left of the step is taken away."""
    if (
        folder.exists()
    ):  # left by a kill before the marker; it goes first, since both may not have room
        remove(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_own(
    aside: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, Shard],
    dist: DistributedContext,
) -> WrittenPiece:
    """Write this process's tensors, a file a part; what the index must know of them."""
    if not aside.is_dir():
        raise VideotuneError(
            f"process {dist.rank} does not see {aside.parent}, which the first one has made: with sharding FULL and "
            "FINE_TUNE every process writes its part of a checkpoint into the run folder. Put --out on a disk that all "
            "machines share"
        )
    written: WrittenPiece = {}
    for part, tensors in parts.items():
        own: dict[str, Tensor] = {}
        places: dict[str, tuple[list[int], int]] = {}
        for name, value in tensors.items():
            mine = rows.get(name) or rows.get(name.rpartition(".")[0])
            if mine is not None and value.shape == (mine.count, *mine.whole[1:]):
                own[name] = value
                places[name] = (list(mine.whole), mine.first)
            elif dist.is_main:
                own[name] = value
                places[name] = (list(value.shape), 0)
        number = f"-{dist.rank + 1:05d}-of-{dist.size:05d}" if dist.size > 1 else ""
        file = f"{part}{number}.safetensors"
        write_tensors(aside / file, own)
        written[part] = {"file": file, "entry": entry_of(aside / file), "tensors": places}
    return written


def _complete(
    aside: Path,
    folder: Path,
    written: list[WrittenPiece],
    step: int,
    state: Mapping[str, Any],
    kind: str,
) -> Checkpoint:
    """Once each file is seen to be there, write the indices and put the checkpoint into its place; its marker comes last."""
    files: dict[str, FileEntry] = {
        one["file"]: one["entry"] for each in written for one in each.values()
    }
    for file, entry in files.items():
        if not (aside / file).is_file() or (aside / file).stat().st_size != entry["bytes"]:
            raise VideotuneError(
                f"{aside / file} was written by another process and is not here whole: put --out on a disk that all share"
            )
    for part in written[0] if len(written) > 1 else ():
        tensors: dict[str, Any] = {}
        for one in (each[part] for each in written):
            for name, (shape, first) in one["tensors"].items():
                tensors.setdefault(name, {"shape": shape, "rows": []})["rows"].append(
                    [one["file"], first]
                )
        write_json(
            aside / f"{part}.index.json",
            {"files": [one[part]["file"] for one in written], "tensors": tensors},
        )
    write_json(aside / "state.json", {"step": step, **state})
    files = {
        path.name: files.get(path.name) or entry_of(path) for path in sorted(aside.iterdir())
    }
    sync_folder(aside)
    aside.rename(folder)
    sync_folder(folder.parent)
    write_json(folder / MARKER, {"step": step, "kind": kind, "files": files})
    return Checkpoint(step, folder, kind, files)


def entry_of(path: Path) -> FileEntry:
    """What COMPLETE lists of a file."""
    return {"bytes": path.stat().st_size, "hash": hash_file(path)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file of tensors, on the disk when this returns.

    Raises OSError, with the system's number, where it cannot be written.
    """
    with system_errors(path):
        save_file(_apart(tensors), path)
    sync_file(path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own on the host, as the file format wants; optimizers share small tables."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        whole = value.detach().cpu().contiguous()
        out[name] = whole.clone() if whole.untyped_storage().data_ptr() in seen else whole
        seen.add(whole.untyped_storage().data_ptr())
    return out
