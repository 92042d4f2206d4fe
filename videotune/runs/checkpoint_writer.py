"""Write a checkpoint: into a temporary folder, synced, renamed, and its marker last.

Several processes write their rows.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from videotune.runs.checkpoint import (
    MARKER,
    Checkpoint,
    folder_of,
    read_checkpoint,
    remove,
)
from videotune.runs.schemas import FileEntry

T = TypeVar("T")

WrittenPiece = dict[str, Any]
"""The files that a process has written, by part."""


@dataclass(frozen=True)
class _Failure:
    """An error of a process, in a form that other processes can raise."""

    text: str
    is_os_error: bool
    is_disk_full: bool


def save_checkpoint(
    run: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    kind: str = "save",
    rows: Mapping[str, Shard] | None = None,
    dist: DistributedContext | None = None,
) -> Checkpoint:
    """Write ``checkpoints/step-N`` so that at every moment it is either complete or
    absent.

    If the step has a complete checkpoint, that is this state already; a backup becomes
    a save.

    Args:
        run: the run folder.
        step: the step whose state is saved.
        parts: tensors of "weights", "optimizer" and, if there is an average, "ema".
        state: content of state.json.
        kind: "save" or "backup".
        rows: the rows that this process has of sharded parameters, and writes.
        dist: this process among those that write. The main one writes everything that
            is not sharded.

    Raises:
        VideotuneError: if a value is not finite, or the processes have no run folder in
            common.
        OSError: if the disk is full or broken. Each process raises what any of them has
            met.
    """
    dist = dist or DistributedContext()
    folder = folder_of(run, step)
    temporary = folder.with_name(f".{folder.name}.part")

    def on_main(work: Callable[[], T]) -> T | None:
        """Do work on the main process and return its result there, and everywhere."""
        return on_each(dist, lambda: work() if dist.is_main else None)[0]

    on_each(dist, lambda: refuse_broken(step, parts))
    existing = on_main(lambda: _existing(folder, kind))
    if existing is not None:
        return existing

    on_main(lambda: _make_empty(folder, temporary))
    try:
        written = on_each(dist, lambda: _write_own(temporary, parts, rows or {}, dist))
        checkpoint = on_main(
            lambda: _complete(temporary, folder, written, step, state, kind)
        )
    except (OSError, VideotuneError):
        if dist.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    assert checkpoint is not None, "the main process has completed it"
    return checkpoint


def on_each(dist: DistributedContext, work: Callable[[], T]) -> list[T]:
    """Return the result of each process's work, in their order.

    If one of them fails, all raise its error.
    """
    result: Any = None
    error: OSError | VideotuneError | None = None
    failure = None
    try:
        result = work()
    except (OSError, VideotuneError) as caught:
        error = caught
        is_os_error = isinstance(caught, OSError)
        is_full = isinstance(caught, OSError) and is_disk_full(caught)
        failure = _Failure(str(caught), is_os_error, is_full)

    gathered = dist.all_gather((result, failure))
    failures = [failure for _, failure in gathered if failure is not None]
    if not failures:
        return [result for result, _ in gathered]

    # A full disk goes first: the run can wait for room.
    full = [failure for failure in failures if failure.is_disk_full]
    raised = (full or failures)[0]
    if error is not None and isinstance(error, OSError) == raised.is_os_error:
        raise error
    if raised.is_os_error:
        number = errno.ENOSPC if raised.is_disk_full else errno.EIO
        raise OSError(number, raised.text)
    raise VideotuneError(raised.text)


def refuse_broken(step: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise VideotuneError if any tensor holds a NaN or an infinity; it names the first
    one.
    """
    broken = []
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                broken.append(f"{part} of {name}")
    if broken:
        raise VideotuneError(
            f"step {step} is not saved: {len(broken)} tensors are not finite, the first is {broken[0]}"
        )


def _existing(folder: Path, kind: str) -> Checkpoint | None:
    """Return the complete checkpoint of a step, or None.

    A backup becomes a save if one is wanted.
    """
    checkpoint = read_checkpoint(folder)
    if isinstance(checkpoint, str):
        return None
    if kind == "save" and checkpoint.kind != "save":
        marker = {"step": checkpoint.step, "kind": kind, "files": checkpoint.files}
        write_json(folder / MARKER, marker)
        return replace(checkpoint, kind=kind)
    return checkpoint


def _make_empty(folder: Path, temporary: Path) -> None:
    """Make an empty folder to write a checkpoint into, and delete what a kill has left
    of the step.
    """
    # The old checkpoint is deleted first, since the disk may not have room for both.
    if folder.exists():
        remove(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _write_own(
    temporary: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, Shard],
    dist: DistributedContext,
) -> WrittenPiece:
    """Write this process's tensors, a file for each part, and return what the index
    needs to know of them.
    """
    if not temporary.is_dir():
        raise VideotuneError(
            f"process {dist.rank} does not see {temporary.parent}, which the first process has made: with sharding FULL "
            "and FINE_TUNE every process writes its part of a checkpoint into the run folder. Set --out to a disk that "
            "all machines share"
        )
    suffix = f"-{dist.rank + 1:05d}-of-{dist.size:05d}" if dist.size > 1 else ""

    written: WrittenPiece = {}
    for part, tensors in parts.items():
        own_tensors: dict[str, Tensor] = {}
        shape_and_first_row: dict[str, tuple[list[int], int]] = {}
        for name, tensor in tensors.items():
            # The optimizer's tensors have the names of parameters with a key behind.
            shard = rows.get(name) or rows.get(name.rpartition(".")[0])
            is_rows = shard is not None and tensor.shape == (
                shard.count,
                *shard.full_shape[1:],
            )
            if shard is not None and is_rows:
                own_tensors[name] = tensor
                shape_and_first_row[name] = (list(shard.full_shape), shard.first)
            # Everything else is the same on all processes, such as the number of an
            # optimizer's steps. torch gives out rows from the first process on, so the main
            # one has a row of every parameter, and with it what the optimizer keeps of it.
            elif dist.is_main:
                own_tensors[name] = tensor
                shape_and_first_row[name] = (list(tensor.shape), 0)

        file = f"{part}{suffix}.safetensors"
        write_tensors(temporary / file, own_tensors)
        written[part] = {
            "file": file,
            "entry": entry_of(temporary / file),
            "tensors": shape_and_first_row,
        }
    return written


def _complete(
    temporary: Path,
    folder: Path,
    written: list[WrittenPiece],
    step: int,
    state: Mapping[str, Any],
    kind: str,
) -> Checkpoint:
    """Check that each file is there, write the indices, and rename the folder.

    The marker comes last.
    """
    files: dict[str, FileEntry] = {}
    for piece in written:
        files.update((part["file"], part["entry"]) for part in piece.values())
    for file, entry in files.items():
        path = temporary / file
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise VideotuneError(
                f"{path} was written by another process and is not complete here. "
                "Set --out to a disk that all machines share"
            )

    if len(written) > 1:
        for part in written[0]:
            index = _index_of([piece[part] for piece in written])
            write_json(temporary / f"{part}.index.json", index)
    write_json(temporary / "state.json", {"step": step, **state})

    all_files = {}
    for path in sorted(temporary.iterdir()):
        all_files[path.name] = files.get(path.name) or entry_of(path)
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)
    write_json(folder / MARKER, {"step": step, "kind": kind, "files": all_files})
    return Checkpoint(step, folder, kind, all_files)


def _index_of(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the index of a part that several processes have written."""
    tensors: dict[str, Any] = {}
    for piece in pieces:
        for name, (shape, first_row) in piece["tensors"].items():
            entry = tensors.setdefault(name, {"shape": shape, "rows": []})
            entry["rows"].append([piece["file"], first_row])
    return {"files": [piece["file"] for piece in pieces], "tensors": tensors}


def entry_of(path: Path) -> FileEntry:
    """Return what COMPLETE lists of a file."""
    return {"bytes": path.stat().st_size, "hash": hash_file(path)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors and sync it.

    Raises OSError, with the system's number, if it cannot be written.
    """
    with system_errors(path):
        save_file(_own_storage(tensors), path)
    sync_file(path)


def _own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor in host memory of its own, as the file format needs it;
    optimizers share small tables.
    """
    separate: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        host_tensor = tensor.detach().cpu().contiguous()
        address = host_tensor.untyped_storage().data_ptr()
        separate[name] = host_tensor.clone() if address in addresses else host_tensor
        addresses.add(address)
    return separate
