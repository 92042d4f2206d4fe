"""LoRA in formats that lay several modules into one weight: their updates become one of the sum of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""A list of blocks, and modules of a block in the order of their rows: see ``ModelSpec.fused``."""


def fuse(state: Mapping[str, Tensor], net: nn.Module, groups: Groups) -> dict[str, Tensor]:
    """A LoRA in which each group of modules is one, under the path of its first module; exactly the same update.

    A of the modules stand one below the other, (Σr, in), and B on the diagonal, (Σout, Σr); rows of a module that has no
    update are zeros. ``net`` gives the modules' sizes. Readers know such a format by its joined weights, so where no module
    of the first group is in the state, one update of nothing is.
    """
    import torch

    left, joined = dict(state), {}
    for number, (blocks, paths) in enumerate(groups):
        places = [[f"{blocks}.{index}.{path}" for path in paths] for index in range(_count(net, blocks))]
        if number == 0 and not any(f"{path}.lora_A.weight" in state for members in places for path in members):
            rows, wide = _size(net, places[0][0])
            left[f"{places[0][0]}.lora_A.weight"] = torch.zeros(1, wide)
            left[f"{places[0][0]}.lora_B.weight"] = torch.zeros(rows, 1)
        for members in places:
            below = [left.pop(f"{path}.lora_A.weight") for path in members if f"{path}.lora_A.weight" in left]
            if below:
                beside = [left.pop(f"{path}.lora_B.weight", torch.zeros(_size(net, path)[0], 0)) for path in members]
                joined[f"{members[0]}.lora_A.weight"] = torch.cat(below)
                joined[f"{members[0]}.lora_B.weight"] = torch.block_diag(*beside)
    return left | joined


def _count(net: nn.Module, blocks: str) -> int:
    """How many blocks a list has."""
    return len(list(net.get_submodule(blocks).children()))


def _size(net: nn.Module, path: str) -> tuple[int, int]:
    """Rows and columns of a module's weight."""
    module: Any = net.get_submodule(path)
    return module.out_features, module.in_features
