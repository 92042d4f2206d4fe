"""Change what a network computes for a while, without touching its weights.

So a preview can be drawn with another LoRA, without one that is merged into packed
weights, or with the trained adapter at another strength.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor, nn

from videotune.adapters.lora import ADAPTER

Undo = Callable[[], None]
"""Ends a change. It keeps no network in memory, so the network may be unloaded before.
"""


@dataclass(frozen=True)
class SideUpdate:
    """A low-rank update that is added to the outputs of linear modules."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    """A (rank, in) and B (out, rank) of each module, by its path; the scale is in B."""

    biases: Mapping[str, Tensor]
    """What is added to a module's bias, by its path."""

    def add_to(self, net: nn.Module) -> Undo:
        """Add the update to a network's outputs, and return the function that ends it.

        Passes must not be compiled, because compiled graphs leave hooks out.
        """
        handles = []
        for path in dict.fromkeys([*self.factors, *self.biases]):
            hook = _Hook(self.factors.get(path), self.biases.get(path))
            handles.append(net.get_submodule(path).register_forward_hook(hook))

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo


UpdatesByExpert = Mapping[str, Sequence[SideUpdate]]
"""The updates of each expert's network, by the expert's name."""


class _Hook:
    """A forward hook that keeps its tensors on the device of the first input."""

    def __init__(
        self, factors: tuple[Tensor, Tensor] | None, bias: Tensor | None
    ) -> None:
        self.factors = factors
        self.bias = bias

    def __call__(
        self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        (input,) = args
        if self.factors is not None:
            factor_a, factor_b = (factor.to(input) for factor in self.factors)
            self.factors = (factor_a, factor_b)
            output = output + (input @ factor_a.T) @ factor_b.T
        if self.bias is not None:
            self.bias = self.bias.to(input)
            output = output + self.bias
        return output


def set_strength(net: nn.Module, strength: float) -> Undo:
    """Multiply a network's own adapter by a number, and return the function that ends
    it.
    """
    scales: list[tuple[ref[Any], float]] = []
    if strength != 1.0:
        for module in net.modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict) and ADAPTER in scaling:
                scales.append((ref(module), scaling[ADAPTER]))
                scaling[ADAPTER] *= strength

    def undo() -> None:
        for reference, scale in scales:
            changed_module = reference()
            if changed_module is not None:
                changed_module.scaling[ADAPTER] = scale

    return undo
