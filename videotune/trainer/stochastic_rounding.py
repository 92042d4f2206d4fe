"""bf16 weights without float32 masters: each update is rounded up or down by chance, so that on average none is lost.

Rounding to nearest loses every update below half of bf16's step, 1/256 of a weight; by chance such an update moves the
weight rarely and then a whole step, and the mean is right (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al. 2020, arXiv
2010.06192). The price is noise of that size in the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from videotune.rng import seed32
from videotune.trainer.optimizers import AnyOptimizer, apply

DROPPED = 16
"""Bits of a float32 that a bf16 has not."""


def round_by_chance(x: Tensor, seed: int, *name: str | int) -> Tensor:
    """bf16 neighbours of float32 numbers, the nearer the likelier: the mean is x; what bf16 holds exactly stays.

    The draw belongs to (seed, name) on one kind of device: a number below 2^16 is added to the bits of each float32, and
    the lower half of them is cut off.
    """
    random = torch.Generator(x.device).manual_seed(seed32(seed, "rounding", *name))
    chance = torch.randint(0, 1 << DROPPED, x.shape, generator=random, device=x.device, dtype=torch.int32)
    bits = (x.view(torch.int32) + chance).bitwise_right_shift(DROPPED).bitwise_left_shift(DROPPED)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


@torch.no_grad()
def update_rounded(part: AnyOptimizer, parameter: nn.Parameter, good: Tensor, seed: int, step: int, name: str) -> None:
    """One parameter's update where it is held in bf16: float32 while it lasts, then rounded by chance; its gradient goes.

    A parameter of another dtype is updated as it is.
    """
    if parameter.grad is None:
        return
    if parameter.dtype != torch.bfloat16:
        apply(part, good)
        parameter.grad = None
        return
    held, gradient = parameter.data, parameter.grad
    parameter.grad = None
    try:
        parameter.data = held.float()
        parameter.grad = gradient.float()
        apply(part, good)
        held.copy_(round_by_chance(parameter.data, seed, step, name))
    finally:
        parameter.grad = None
        parameter.data = held
