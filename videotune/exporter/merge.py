"""The base model with an adapter worked into its weights: a folder in diffusers layout that needs no adapter any more."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from videotune.adapters.effect import new_weight
from videotune.adapters.kinds import by_module
from videotune.errors import VideotuneError
from videotune.exporter.full import link, model_folder
from videotune.exporter.verify import Exported, check_finite, failed
from videotune.models.model_files import headers, spans_of, weight_files
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor


def export_merged(
    family: Family,
    adapters: Mapping[str, Mapping[str, Tensor]],
    scale: float,
    base: Path,
    folder: Path,
    facts: Mapping[str, Any],
) -> Exported:
    """Write the model with the adapter of each expert in its weights, all else as in ``base``, and read them back.

    A weight becomes what the adapter makes of it, calculated in float64 and rounded once to the dtype that it has in the
    base's file. One tensor at a time is in memory. Raises VideotuneError for NaN, for modules that the base lacks, and
    where a weight reads back as something else.
    """
    check_finite("adapter", *adapters.values())
    names = {family.spec.part_of(expert): state for expert, state in adapters.items()}
    with model_folder(base, folder, names, facts) as aside:
        count = sum(_merge_part(base / part, state, scale, aside / part) for part, state in names.items())
    return Exported("merged", folder, count, 0.0, "safetensors", facts.get("use", ""))


def _merge_part(base: Path, state: Mapping[str, Tensor], scale: float, folder: Path) -> int:
    """Copy a part of the model and change the weights that the adapter has modules for; how many these are."""
    modules = {f"{path}.weight": parts for path, parts in by_module(state).items()}
    files = weight_files(base)
    if absent := sorted(set(modules) - set(headers(files))):
        raise VideotuneError(
            f"{base} has no weight called {absent[0]}: its tensors have their authors' names. Save the model in diffusers "
            "layout first (from_single_file, then save_pretrained), and name that as base_model_name"
        )
    folder.mkdir(parents=True)
    for entry in sorted(base.iterdir()):
        if entry.is_file() and not entry.name.startswith("."):
            changed = entry in files and not set(modules).isdisjoint(headers([entry]))
            (shutil.copyfile if changed else link)(os.path.realpath(entry), str(folder / entry.name))
    for file in files:
        _merge_file(file, modules, scale, folder / file.name)
    return len(modules)


def _merge_file(base: Path, modules: Mapping[str, Mapping[str, Tensor]], scale: float, target: Path) -> None:
    """Write the new weights over the old ones in a copy of a file, whose head stays as it is, and read them back."""
    spans = spans_of(base)
    if not (mine := [name for name in modules if name in spans]):
        return
    digests: dict[str, bytes] = {}
    with safe_open(base, "pt") as old, target.open("r+b") as new:
        for name in mine:
            own = old.get_tensor(name)
            weight = new_weight(own, modules[name], scale).to(own.dtype).contiguous()
            if not bool(weight.isfinite().all()):
                raise VideotuneError(f"{name} is too large for the base's {own.dtype} after merging: not exported")
            data = raw(weight)
            begin, end = spans[name]
            assert len(data) == end - begin, name
            new.seek(begin)
            new.write(data)
            digests[name] = hashlib.blake2b(data).digest()
        new.flush()
        os.fsync(new.fileno())
    with safe_open(target, "pt") as back:
        for name, digest in digests.items():
            if hashlib.blake2b(raw(back.get_tensor(name))).digest() != digest:
                raise failed(target, f"{name} does not match")


def raw(x: Tensor) -> bytes:
    """A tensor's bytes as safetensors keeps them."""
    data: bytes = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data
