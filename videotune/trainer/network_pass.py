"""A pass of the denoiser over one micro-batch: what it reads, its forward half, and what
it returns. ``step.py`` adds the backward half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from videotune.diffusion.loss import Objective, denoising_loss
from videotune.models.base import DiffusersModel
from videotune.types import Batch, Velocity

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class PassInputs:
    """What a pass reads, on the device."""

    batch: Batch
    t: Tensor
    """Noise levels (b,)."""
    noise: Tensor
    """(b,C,F,H,W)."""
    target: Velocity | None
    """What the network is to predict. None: v of the data."""
    weight: float
    """Factor of the loss: this pass's share of the step's samples, 0 for padding."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> PassInputs:
        """Return the same inputs with ``fn`` applied to each tensor, always in one order."""
        target = self.target
        if target is not None:
            sound = None if target.sound is None else fn(target.sound)
            target = Velocity(fn(target.video), sound)
        return replace(
            self,
            batch=self.batch.map(fn),
            t=fn(self.t),
            noise=fn(self.noise),
            target=target,
        )


@dataclass(frozen=True)
class PassOutput:
    """What a pass returns beside the gradients."""

    weighted_loss: Tensor
    """The loss times the weight of the pass ()."""
    mse: Tensor
    """See ``LossOutput.mse`` (b,)."""
    sound_mse: Tensor | None
    """See ``LossOutput.sound_mse`` (b,)."""


def forward_pass(
    family: DiffusersModel, net: nn.Module, objective: Objective, inputs: PassInputs
) -> PassOutput:
    """Return the loss of a micro-batch, with its graph.

    Its mean is multiplied by its share of the step's samples, so any split gives the
    same gradient (apart from dropout, which is drawn by pass).
    """
    output = denoising_loss(
        family, net, objective, inputs.batch, inputs.t, inputs.noise, inputs.target
    )
    return PassOutput(output.loss * inputs.weight, output.mse, output.sound_mse)


def tokens_per_sample(family: DiffusersModel, batch: Batch) -> int:
    """Return the tokens of one sample, from the size of its latents."""
    sides = zip(batch.x0.shape[2:], family.spec.patch, strict=True)
    return math.prod(math.ceil(side / step) for side, step in sides)
