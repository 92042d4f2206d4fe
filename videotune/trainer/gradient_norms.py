"""Norms of the gradients of single steps, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class GradientNorms:
    """The norms of the gradients of a step that was asked for."""

    is_due: Callable[[int], bool]
    """Whether a step's norms are wanted."""
    step: int = 0
    """The step whose norms are kept."""
    expert: str | None = None
    """The expert that trained then."""
    norms: Tensor | None = None
    """(n,), in the order of ``TrainableState.parameters``."""

    def keep(
        self, step: int, parameters: Sequence[nn.Parameter], expert: str | None
    ) -> None:
        """Keep the norms of a step, if they are wanted. Nothing waits for the device.

        Args:
            step: the step.
            parameters: what trains, with complete gradients.
            expert: that trained.
        """
        if not self.is_due(step):
            return
        device = parameters[0].device
        norms = torch.zeros(len(parameters), device=device)
        indices = []
        gradients = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                indices.append(index)
                gradients.append(parameter.grad)
        if gradients:
            all_norms = torch._foreach_norm(gradients)
            for index, norm in zip(indices, all_norms, strict=True):
                norms[index] = norm.to(device)
        self.step = step
        self.expert = expert
        self.norms = norms
