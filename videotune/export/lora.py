"""A trained LoRA as a file that others read, and the proof that they read what was trained.

alpha / rank is multiplied into B and neither alpha nor PEFT's metadata is written: every reader then applies the update as
it was trained, whatever it assumes of alpha. Our own facts stand in the header under the key ``videotune``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.lora import updates
from videotune.errors import VideotuneError
from videotune.files import system_errors, write_whole
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 1e-6
"""Largest allowed difference of ΔW, relative to its largest entry."""


@dataclass(frozen=True)
class Exported:
    """A file that was written and read back; ``max_error`` is the largest relative difference of ΔW over the modules."""

    format: str
    path: Path
    modules: int
    max_error: float
    reader: str = "diffusers load_lora_weights"

    def to_json(self, run: Path) -> dict[str, Any]:
        """A line of the run's ``exports.json``; the path is relative to the run folder where the file lies in it."""
        place, home = self.path.absolute(), run.absolute()
        path = place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)
        verified = {"max_error": self.max_error, "modules": self.modules, "reader": self.reader}
        return {"format": self.format, "path": path, "verified": verified}


def baked(family: Family, format: str, state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The adapter under the format's names, scale multiplied into B.

    Raises VideotuneError for a format the family has no names for, and for an adapter that is NaN or does nothing.
    """
    maps = family.key_maps()
    if format not in maps:
        raise VideotuneError(f"output_model_format: {family.spec.title} has {', '.join(sorted(maps))}, not {format!r}")
    if any(not bool(value.isfinite().all()) for value in state.values()):
        raise VideotuneError("the adapter holds NaN or infinite weights: it is not exported")
    if not any(bool(value.any()) for name, value in state.items() if ".lora_B." in name):
        raise VideotuneError(
            "the adapter is zero, so it changes nothing: it is not exported (did the run train any step?)"
        )
    out = {}
    for name, value in state.items():
        path, matrix = name.rsplit(".lora_", 1)
        value = value.detach().cpu().float() * (scale if matrix.startswith("B") else 1.0)
        out[f"{maps[format](path)}.lora_{matrix}"] = value.contiguous()
    return out


def export_lora(
    family: Family,
    format: str,
    state: Mapping[str, Tensor],
    scale: float,
    path: Path,
    facts: Mapping[str, Any],
    expert: str | None = None,
) -> Exported:
    """Write one file, read it back through diffusers and compare ΔW module by module; ``expert``: whose adapter it is.

    Raises VideotuneError where the file would not do elsewhere what was trained here.
    """
    from safetensors.torch import save_file

    tensors = baked(family, format, state, scale)
    header = {"format": "pt", "videotune": json.dumps(dict(facts), ensure_ascii=False)}
    worst: list[float] = []

    def write(aside: Path) -> None:
        with system_errors(path):
            save_file(tensors, aside, metadata=header)
        worst.append(difference(updates(state, scale), read_back(family, aside, expert), path))

    write_whole(path, write)
    return Exported(format, path, len(updates(state, scale)), worst[0])


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> float:
    """The largest difference of ΔW over the modules, each relative to its own largest entry.

    Raises VideotuneError where a module is missing or differs by more than is allowed.
    """
    if set(wanted) != set(found):
        odd = sorted(set(wanted) ^ set(found))
        raise VideotuneError(
            f"{path}: diffusers reads {len(found)} of {len(wanted)} modules; the first odd one is {odd[0]}"
        )
    worst = 0.0
    for name, update in wanted.items():
        off = float((found[name] - update).abs().max())
        worst = max(worst, off / float(update.abs().max()) if bool(update.any()) else off)
    if worst > TOLERANCE:
        raise VideotuneError(
            f"{path}: read back through diffusers, ΔW differs by {worst:.1e} (allowed: {TOLERANCE:.0e}): not written"
        )
    return worst


def read_back(family: Family, path: Path, expert: str | None = None) -> dict[str, Tensor]:
    """ΔW of each module as diffusers' own loader applies it, float64, by module path."""
    return {
        name: scale * (b.double() @ a.double()) for name, (a, b, scale) in read_factors(family, path, expert).items()
    }


def read_factors(family: Family, path: Path, expert: str | None = None) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A, B and scale of each module as diffusers' own loader reads them, by module path.

    The loader runs on a model of the same shape whose weights are one shared zero, so only the adapter takes memory.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.nn import Parameter

    net, zero = family.skeleton(expert), torch.zeros(())
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(zero.expand(parameter.shape), requires_grad=False))
    read_lora(family, net, path, "read")
    out = {}
    for name, module in net.named_modules():
        if isinstance(module, BaseTunerLayer) and "read" in module.lora_A:
            a, b = (getattr(module, part)["read"].weight.detach() for part in ("lora_A", "lora_B"))
            out[name] = (a, b, module.scaling["read"])
    return out


def read_lora(family: Family, net: nn.Module, path: Path, name: str) -> None:
    """Read a LoRA file into a network as ``load_lora_weights`` does, its metadata (an alpha, say) included."""
    loader = family.pipeline_class()
    state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
    loader.load_lora_into_transformer(state, net, adapter_name=name, metadata=metadata)
