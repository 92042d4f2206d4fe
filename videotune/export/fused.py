"""LoRA in formats that lay several modules into one weight: their updates become one of the sum of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""A list of blocks, and modules of a block in the order of their rows: see ``FamilySpec.fused``."""


def fuse(state: Mapping[str, Tensor], net: nn.Module, groups: Groups) -> dict[str, Tensor]:
    """A LoRA in which each group of modules is one, under the path of its first module; exactly the same update.

    A of the modules stand one below the other, (Σr, in), and B on the diagonal, (Σout, Σr); rows of a module that has no
    update are zeros. ``net`` gives the modules' sizes. Readers know such a format by its joined weights, so where no module
    of the first group is in the state, one update of nothing is.
    """
    import torch

    left, joined = dict(state), {}
    for number, (blocks, paths) in enumerate(groups):
        places = list(_members(net, blocks, paths))
        if number == 0 and not any(f"{path}.lora_A.weight" in state for members in places for path in members):
            path = places[0][0]
            wide = net.get_submodule(path).in_features
            left |= {f"{path}.lora_A.weight": torch.zeros(1, wide), f"{path}.lora_B.weight": torch.zeros(_rows(net, path), 1)}
        for members in places:
            here = [path for path in members if f"{path}.lora_A.weight" in left]
            if not here:
                continue
            below = [left.pop(f"{path}.lora_A.weight") for path in here]
            own = {path: left.pop(f"{path}.lora_B.weight") for path in here}
            wide = sum(len(x) for x in below)
            whole, row, column = torch.zeros(sum(_rows(net, path) for path in members), wide), 0, 0
            for path in members:
                if path in own:
                    height, width = own[path].shape
                    whole[row : row + height, column : column + width] = own[path]
                    column += width
                row += _rows(net, path)
            joined |= {f"{members[0]}.lora_A.weight": torch.cat(below), f"{members[0]}.lora_B.weight": whole}
    return left | joined


def _members(net: nn.Module, blocks: str, paths: tuple[str, ...]) -> Iterator[list[str]]:
    """The paths of a group's modules in each block."""
    for index, _ in enumerate(net.get_submodule(blocks).children()):
        yield [f"{blocks}.{index}.{path}" for path in paths]


def _rows(net: nn.Module, path: str) -> int:
    return int(net.get_submodule(path).out_features)  # type: ignore[arg-type]
