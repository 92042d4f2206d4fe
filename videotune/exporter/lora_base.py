"""Which base model an adapter file is for: held against the published architectures, or against one that is named."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, adapter_path
from videotune.exporter.adapter_modules import Module, bare, keys_of, linear_size, modules_in, places, size_of
from videotune.models.base_model import CONFIGS, of_base, place, spec_for
from videotune.models.model_files import headers
from videotune.models.registry import find
from videotune.types import Family

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

    Raises VideotuneError where there is none, or it is too large for an adapter.
    """
    file = adapter_path(path)
    if not file.is_file():
        raise VideotuneError(f"no such file or folder: {path}")
    if (size := file.stat().st_size) > MOST:
        raise VideotuneError(f"{file} has {size >> 30} GB: that is no adapter")
    if not any(mark in key for key in headers([file]) for mark in (".lora", ".hada_", ".lokr_", ".oft_R")):
        raise VideotuneError(f"{file} holds no adapter: no tensor is called like those of LoRA, LoHa, LoKr or OFT")
    return AdapterFile(file, finite=finite)


@cache
def architecture(folder: Path, names: tuple[str, ...]) -> Base:
    """The architecture whose configs lie in a folder."""
    name = spec_for(None, place(str(folder), weights=False)).name
    family = find(name)(folder, torch.device("cpu"), torch.float32)
    return Base(names, family, family.skeleton())


def bases(base: str | None = None, family: str | None = None) -> Iterator[Base]:
    """The named base model, by its folder or Hub id and without its weights, or the published ones (of a family)."""
    if base is not None:
        yield architecture(place(base, weights=False).folder, (base,))
        return
    index: dict[str, str] = json.loads((CONFIGS / "index.json").read_text(encoding="utf-8"))
    for folder in sorted(own for own in CONFIGS.iterdir() if own.is_dir()):
        if family is None or of_base(folder) is find(family):
            yield architecture(folder, tuple(name for name, own in index.items() if own == folder.name and "/" in name))


def misfits(base: Base, modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Why the base model has no place for some of a file's modules, by their names."""
    found = {}
    for name, parts in modules.items():
        size = size_of({part: value for part, value in parts.items() if part != "alpha"})
        held = [linear_size(base.net, path) for path in places(base.family, base.net).get(bare(name), ())]
        if not held:
            found[name] = "no module of it"
        elif size and size != (wanted := (sum(rows for rows, _ in held), held[0][1])):
            found[name] = f"{size[0]}x{size[1]}, and {wanted[0]}x{wanted[1]} in the base"
    return found


def fitting(file: AdapterFile, base: str | None, family: str | None) -> tuple[list[Base], Base, dict[str, str]]:
    """The bases that every module of a file fits, that of its own header first; the nearest one; and its misfits."""
    modules, _ = keys_of(file)
    tried = sorted(
        ((misfits(one, modules), one) for one in bases(base, family)),
        key=lambda each: (len(each[0]), each[1].family.spec.name != file.facts.get("family")),
    )
    odd, nearest = tried[0]
    return [one for wrong, one in tried if not wrong], nearest, odd


def open_modules(path: Path, base: str | None, family: str | None) -> tuple[AdapterFile, Base, dict[str, Module]]:
    """A file's adapter by its paths in diffusers, and the base model that it is for.

    Raises VideotuneError where it fits none, or bases of several families.
    """
    file = open_file(path)
    fits, nearest, odd = fitting(file, base, family)
    if len({one.family.spec.name for one in fits}) > 1 and "family" not in file.facts:
        raise VideotuneError(f"{path} fits bases of several families: say which with --family or --base")
    if odd and base is None:
        name, why = next(iter(odd.items()))
        raise VideotuneError(f"{path} fits no published base ({name}: {why}): name its base model with --base")
    return file, nearest, modules_in(nearest.family, nearest.net, file)


def expert_of(file: AdapterFile) -> tuple[str | None, str]:
    """Which expert a file is of, and what says so: our own header, or the file's name; (None, "") where nothing does."""
    if isinstance(own := file.facts.get("expert"), str):
        return own[:20], "header"
    name = (
        f"{file.path.parent.name} {file.path.name}" if file.told == "folder" and file.lora_settings else file.path.name
    )
    found = re.findall(r"(high|low)[^a-z]?noise", name.lower())
    return (found[0], "file name") if len(set(found)) == 1 else (None, "")
