"""The factor of the loss in a run in float16 (``train_dtype`` FLOAT_16).

A float16 number below 6e-8 is zero, and gradients of activations often are that small.
The loss is therefore multiplied before backward, and gradients are divided by the same
factor before they are used (Micikevicius et al. 2017, arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

FIRST_SCALE = 2.0**16
"""The factor of the first step; that and the two below are torch.amp.GradScaler's."""

GROWTH = 2.0
"""By how much the factor grows, and falls after a gradient that is not finite."""

GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the factor grows."""

PREFIX = "loss_scale."
"""Begins the names of its tensors in a checkpoint's optimizer state."""


class LossScale:
    """The factor, found by torch's own kernels.

    Both numbers stay on the device and at their place in memory: no step waits for
    them, and a CUDA graph of a pass reads the factor of the step that it is replayed in.
    """

    def __init__(
        self,
        device: torch.device,
        first: float = FIRST_SCALE,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        self.factor = torch.full((), first, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Finite steps since the factor changed."""
        self._growth_interval = growth_interval

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss () whose backward pass gives scaled gradients."""
        return loss * self.factor

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients, in place; one that is not finite stays so."""
        gradients: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.setdefault(parameter.grad.device, []).append(parameter.grad)

        inverse = self.factor.double().reciprocal().float()
        for device, on_one_device in gradients.items():
            # The norm shows whether all are finite, also over several processes.
            unused = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                on_one_device, unused, inverse.to(device)
            )

    def update(self, grads_finite: Tensor) -> None:
        """Let the factor fall after a step that was not finite, or grow after
        ``growth_interval`` finite ones.
        """
        torch._amp_update_scale_(
            self.factor,
            self.finite_steps,
            (~grads_finite).float(),
            GROWTH,
            1 / GROWTH,
            self._growth_interval,
        )

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of it."""
        return {
            f"{PREFIX}factor": self.factor,
            f"{PREFIX}finite_steps": self.finite_steps,
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore both numbers at their place. Raises ValueError if one is missing."""
        for name, tensor in self.state().items():
            if name not in state:
                raise ValueError(f"no {name}")
            tensor.copy_(state[name])


def without_loss_scale(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an optimizer's state without the factor's own tensors."""
    return {
        name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)
    }
