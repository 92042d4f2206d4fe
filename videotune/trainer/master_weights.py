"""float32 master weights of a network that computes in another dtype (Micikevicius et al. 2018, arXiv 1710.03740).

An update of a thousandth of a weight is lost in bf16, whose steps are 1/256: the optimizer updates float32 copies, and the
network holds them rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class MasterWeights:
    """``parameters`` are what the optimizer updates, by name: a float32 copy, or the network's own where it is float32."""

    def __init__(self, held: Mapping[str, nn.Parameter]) -> None:
        self.parameters = {
            name: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for name, parameter in held.items()
        }
        self._pairs = [(held[name], master) for name, master in self.parameters.items() if master is not held[name]]

    @property
    def apart(self) -> bool:
        """Whether any master is a copy."""
        return bool(self._pairs)

    def gather(self) -> None:
        """The network's gradients go to their masters; each is freed as it goes."""
        for held, master in self._pairs:
            if held.grad is not None:
                master.grad = held.grad.float()
                held.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """The network holds its masters again, rounded to nearest."""
        for held, master in self._pairs:
            held.copy_(master)
