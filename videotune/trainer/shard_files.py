"""Tensors that several processes have written, each its rows: read back whole, or a process's rows of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from videotune.files import read_json
from videotune.memory.sharding import Shard


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
    files = {file: load_file(folder / file) for file in index["files"]}  # mapped: what is not asked for is not read
    out = {}
    for name, told in index["tensors"].items():
        shape = tuple(told["shape"])
        own = shards_of(name, shape, rows)
        if own is not None and not own.count:
            continue
        lo, hi = (own.first, own.first + own.count) if own is not None else (0, shape[0] if shape else 1)
        found = []
        for file, first in told["rows"]:
            value = files[file][name]
            if not shape:
                found.append(value)
                continue
            a, b = max(lo, first), min(hi, first + len(value))
            if a < b:
                found.append(value[a - first : b - first])
        whole = found[0] if len(found) == 1 else torch.cat(found)
        if tuple(whole.shape[1:]) != shape[1:] or (shape and len(whole) != hi - lo):
            raise ValueError(f"rows of {name} are missing")
        out[name] = whole
    return out
