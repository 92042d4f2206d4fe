"""Norms of the gradients of single steps, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from videotune.trainer.step import TrainableState


@dataclass
class GradientNorms:
    """The norms of the gradients of a step that was asked for."""

    is_due: Callable[[int], bool]
    """Whether a step's norms are wanted."""
    step: int = 0
    """The step whose norms are kept."""
    by_expert: dict[str | None, Tensor] = field(default_factory=dict)
    """Norms (n,) in the order of ``TrainableState.parameters``, by the expert that
    trained.
    """

    def keep(self, step: int, trainable: TrainableState) -> None:
        """Keep the norms of a step, if they are wanted. Its gradients are complete.

        Nothing waits for the device.
        """
        if not self.is_due(step):
            return
        parameters = list(trainable.parameters.values())
        device = parameters[0].device
        norms = torch.zeros(len(parameters), device=device)
        indices = []
        gradients = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                indices.append(index)
                gradients.append(parameter.grad)
        if gradients:
            found = torch._foreach_norm(gradients)
            for index, norm in zip(indices, found, strict=True):
                norms[index] = norm.to(device)
        self.step = step
        self.by_expert = {trainable.expert: norms}
