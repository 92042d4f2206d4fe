"""A checkpoint that several processes write: each its rows, a file a part, and an index that says what is where.

``{part}.index.json``: ``files``, and ``tensors``, each with its shape and, in the order of its rows, the files that hold
some and the row with which each begins. What is not cut stands in one file alone.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import is_disk_full, write_json
from videotune.trainer.checkpoint import (
    PARTS,
    Checkpoint,
    aside_of,
    clear_aside,
    complete,
    entry_of,
    known,
    refuse_broken,
    write_tensors,
)
from videotune.trainer.distributed import DistributedContext

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.memory.sharding import Shard

Told = dict[str, Any]
"""What a process tells of the files that it has written, by part; or of what stood in its way."""


def save_shards(
    run: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, Shard],
    state: Mapping[str, Any],
    kind: str,
    dist: DistributedContext,
) -> Checkpoint:
    """Write ``checkpoints/step-N`` by all processes, each its rows; complete only when every file is there as it was told.

    What is not cut the first process writes. All end alike: whatever goes wrong with one is raised by each. Raises
    VideotuneError and OSError as ``save_checkpoint`` does, and where the processes have no run folder in common.
    """
    assert set(parts) <= set(PARTS), sorted(parts)
    _all_well(dist, lambda: refuse_broken(step, parts))
    there = dist.broadcast(known(run, step, kind) if dist.is_main else None)
    if there is not None:
        return there
    _all_well(dist, lambda: clear_aside(run, step) if dist.is_main else None)
    aside = aside_of(run, step)
    try:
        told = _all_well(dist, lambda: _write_own(aside, parts, rows, dist))
        made = _all_well(dist, lambda: _join(aside, told, step, state, kind) if dist.is_main else None)
    except (OSError, VideotuneError):
        if dist.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    done = made[0]
    assert done is not None, "the first process has completed it"
    return done


def _all_well(dist: DistributedContext, work: Any) -> list[Any]:
    """What each process's work gives, in their order; what one of them has met is raised by all alike."""
    done: Any = None
    error: OSError | VideotuneError | None = None
    trouble: tuple[str, bool, bool] | None = None
    try:
        done = work()
    except OSError as met:
        error, trouble = met, (str(met), True, is_disk_full(met))
    except VideotuneError as met:
        error, trouble = met, (str(met), False, False)
    each = dist.all_gather((done, trouble))
    wrong = [one for _, one in each if one is not None]
    if not wrong:
        return [value for value, _ in each]
    text, system, full = next((one for one in wrong if one[2]), wrong[0])
    if error is not None and isinstance(error, OSError) == system:
        raise error
    raise OSError(errno.ENOSPC if full else errno.EIO, text) if system else VideotuneError(text)


def _write_own(
    aside: Path, parts: Mapping[str, Mapping[str, Tensor]], rows: Mapping[str, Shard], dist: DistributedContext
) -> Told:
    """Write this process's tensors, a file a part; what the index must know of them."""
    if not aside.is_dir():
        raise VideotuneError(
            f"process {dist.rank} does not see {aside.parent}, which the first one has made: with sharding FULL and "
            "FINE_TUNE every process writes its part of a checkpoint into the run folder. Put --out on a disk that all "
            "machines share"
        )
    told: Told = {}
    for part, tensors in parts.items():
        own: dict[str, Tensor] = {}
        places: dict[str, tuple[list[int], int]] = {}
        for name, value in tensors.items():
            mine = rows.get(name) or rows.get(name.rpartition(".")[0])
            if mine is not None and value.shape == (mine.count, *mine.whole[1:]):
                own[name], places[name] = value, (list(mine.whole), mine.first)
            elif dist.is_main:
                own[name], places[name] = value, (list(value.shape), 0)
        file = f"{part}-{dist.rank + 1:05d}-of-{dist.size:05d}.safetensors"
        write_tensors(aside / file, own)
        told[part] = {"file": file, "entry": entry_of(aside / file), "tensors": places}
    return told


def _join(aside: Path, told: list[Told], step: int, state: Mapping[str, Any], kind: str) -> Checkpoint:
    """Write the indices of what all processes told, once each file is seen to be there, and complete the checkpoint."""
    for part in told[0]:
        tensors: dict[str, Any] = {}
        for one in (each[part] for each in told):
            path = aside / one["file"]
            if not path.is_file() or path.stat().st_size != one["entry"]["bytes"]:
                raise VideotuneError(
                    f"{path} was written by another process and is not here whole: put --out on a disk that all share"
                )
            for name, (shape, first) in one["tensors"].items():
                tensors.setdefault(name, {"shape": shape, "rows": []})["rows"].append([one["file"], first])
        files = [one[part]["file"] for one in told]
        write_json(aside / f"{part}.index.json", {"files": files, "tensors": tensors})
    written = {one["file"]: one["entry"] for each in told for one in each.values()}
    return complete(aside, step, state, kind, written)
