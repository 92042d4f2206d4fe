"""LoRA files as other programs write them: their names, factors and alpha, retyped from
their sources.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from videotune.adapters.effect import change
from videotune.adapters.lora import matching
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import modules_by_path
from videotune.exporter.lora_target import Target

FAMILIES = (
    "wan",
    "cogvideox",
    "ltx_video",
    "hunyuan_video",
    "hunyuan_video15",
    "hidream",
    "kandinsky5",
)
RANK = 4
Tensors = dict[str, torch.Tensor]
Name = Callable[[str], str]


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(
    family: Any, targets: Any = "linear", rank: int = RANK
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """B and A of each module, drawn."""
    net = family.skeleton()
    found = {}
    for seed, path in enumerate(matching(net, family.spec, targets)):
        rows, columns = net.get_submodule(path).weight.shape
        found[path] = (
            random_tensor(rows, rank, seed=2 * seed),
            random_tensor(rank, columns, seed=2 * seed + 1),
        )
    return found


def peft_file(
    family: Any,
    path: Path,
    alpha: float | None = None,
    targets: Any = "linear",
    rank: int = RANK,
) -> Tensors:
    """A file with PEFT's names behind ``transformer.``, alpha beside the factors; the
    ΔW of its modules, float64.
    """
    tensors, deltas = {}, {}
    for name, (b, a) in pairs(family, targets, rank).items():
        tensors |= {
            f"transformer.{name}.lora_A.weight": a,
            f"transformer.{name}.lora_B.weight": b,
        }
        if alpha is not None:
            tensors[f"transformer.{name}.alpha"] = torch.tensor(alpha)
        deltas[name] = (
            (1.0 if alpha is None else alpha / rank) * b.double() @ a.double()
        )
    save_file(tensors, path)
    return deltas


def deltas_of(family: Any, path: Path) -> Tensors:
    """What a file adds to each weight, float64."""
    found = modules_by_path(family, family.skeleton(), AdapterFile(path))
    return {name: change(own.parts, own.scale) for name, own in found.items()}


def same_deltas(
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    bound: float = 1e-6,
) -> None:
    """Every ΔW is the wanted one, relative to its size; a module that only one of them
    has changes nothing.
    """
    for name in found.keys() | wanted.keys():
        if name not in wanted or name not in found:
            assert not bool((found if name in found else wanted)[name].any()), name
            continue
        off = float((found[name] - wanted[name]).norm() / wanted[name].norm())
        assert off <= bound, f"{name}: {off:.1e}"


def file_of_form(family: Any, path: Path, form: str = "diffusers") -> Target:
    """A file of a form for the family's tiny base."""
    return Target(path, form, str(family.folder))
