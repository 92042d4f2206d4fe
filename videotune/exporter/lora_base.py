"""Which base model an adapter file is for: held against the published architectures, or against one that is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, adapter_path
from videotune.exporter.adapter_modules import bare, keys_of, linear_size, modules_in, places, size_of
from videotune.models.base_model import CONFIGS, of_base, place, spec_for
from videotune.models.model_files import headers
from videotune.models.registry import find

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.exporter.adapter_modules import Module
    from videotune.types import Family

WORDS = {"high": re.compile(r"high[^a-z]?noise"), "low": re.compile(r"low[^a-z]?noise")}
"""What files of an expert are called."""

MOST = 8 << 30
"""Bytes of the largest adapter that is read; published ones have some hundred megabytes."""


@dataclass(frozen=True)
class Base:
    """A base model's architecture: its transformer on the meta device, and the names that it is published under."""

    names: tuple[str, ...]
    family: Family
    net: nn.Module


def open_file(path: Path, *, finite: bool = True) -> AdapterFile:
    """An adapter's file or folder.

    Raises VideotuneError where there is none, it is too large for an adapter, or holds none.
    """
    if not path.exists():
        raise VideotuneError(f"no such file or folder: {path}")
    file = adapter_path(path)
    if file.stat().st_size > MOST:
        raise VideotuneError(f"{file} has {file.stat().st_size >> 30} GB: that is no adapter")
    if not any(mark in key for key in headers([file]) for mark in (".lora", ".hada_", ".lokr_", ".oft_R")):
        raise VideotuneError(f"{file} holds no adapter: none of its tensors is of LoRA, DoRA, LoHa, LoKr or OFT")
    return AdapterFile(file, finite=finite)


@cache
def published(folder: Path) -> Base:
    """The architecture whose configs lie in a folder of videotune's own."""
    index: dict[str, str] = json.loads((CONFIGS / "index.json").read_text(encoding="utf-8"))
    names = tuple(name for name, own in index.items() if own == folder.name and "/" in name)
    family = of_base(folder)(folder, torch.device("cpu"), torch.float32)
    return Base(names, family, family.skeleton())


def named(name: str) -> Base:
    """The architecture of a base model's folder or Hub id; its weights are not needed."""
    found = place(name, weights=False)
    spec = spec_for(None, found)
    family = find(spec.name)(found.folder, torch.device("cpu"), torch.float32)
    return Base((name,), family, family.skeleton())


def bases(base: str | None = None, family: str | None = None) -> Iterator[Base]:
    """The named base model, or the published ones (of a family)."""
    if base is not None:
        yield named(base)
        return
    wanted = find(family) if family is not None else None
    for folder in sorted(own for own in CONFIGS.iterdir() if own.is_dir()):
        if wanted is None or of_base(folder) is wanted:
            yield published(folder)


def misfits(base: Base, modules: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """What of a file's modules the base model has no place for, a sentence each."""
    table, found = places(base.family, base.net), []
    for name, parts in modules.items():
        paths = table.get(bare(name))
        size = size_of({part: value for part, value in parts.items() if part not in ("alpha", "lora_magnitude_vector")})
        if paths is None:
            found.append(f"{name} is no module of it")
        elif size is not None:
            held = [linear_size(base.net, path) for path in paths]
            wanted = (sum(rows for rows, _ in held), held[0][1])
            if size != wanted:
                found.append(f"{name} is {size[0]}x{size[1]}, and in the base it is {wanted[0]}x{wanted[1]}")
    return found


def fitting(file: AdapterFile, base: str | None, family: str | None) -> tuple[list[Base], Base, list[str]]:
    """The bases that every module of a file fits; the nearest one; and what does not fit that."""
    modules, _ = keys_of(file)
    tried = [(misfits(one, modules), one) for one in bases(base, family)]
    fits = [one for odd, one in tried if not odd]
    own = file.facts.get("family")
    fits.sort(key=lambda one: one.family.spec.name != own)
    odd, nearest = min(tried, key=lambda each: len(each[0]))
    return fits, (fits or [nearest])[0], odd


def open_modules(path: Path, base: str | None, family: str | None) -> tuple[AdapterFile, Base, dict[str, Module]]:
    """A file's adapter by its paths in diffusers, and the base model that it is for.

    Raises VideotuneError where it fits none, or bases of several families.
    """
    file = open_file(path)
    fits, nearest, odd = fitting(file, base, family)
    if len({one.family.spec.name for one in fits}) > 1 and "family" not in file.facts:
        raise VideotuneError(f"{path} fits bases of several families: say which with --family or --base")
    if not fits and len(odd) == len(keys_of(file)[0]) and base is None and family is None:
        raise VideotuneError(f"{path} is for none of the published bases: {odd[0]}. Name its base model with --base")
    return file, nearest, modules_in(nearest.family, nearest.net, file)


def expert_of(file: AdapterFile) -> tuple[str | None, str]:
    """Which expert a file is of, and what says so: our own header, or the file's name; (None, "") where nothing does."""
    own = file.facts.get("expert")
    if isinstance(own, str):
        return own[:20], "header"
    name = file.path.stem if file.path.stem not in ("adapter_model", "pytorch_lora_weights") else file.path.parent.name
    found = [expert for expert, words in WORDS.items() if words.search(name.lower())]
    return (found[0], "file name") if len(found) == 1 else (None, "")
