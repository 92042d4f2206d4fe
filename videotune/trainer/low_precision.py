"""How updates reach weights in bf16, by float32 masters or rounded by chance, and updates during backward.

The optimizer updates float32 copies, and the network holds them rounded (Micikevicius et al. 2018, arXiv 1710.03740).

Without copies, rounding to nearest loses every update below half of bf16's step, 1/256 of a weight; by chance such an update
moves the weight rarely and then a whole step, and the mean is right (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al.
2020, arXiv 2010.06192). The price is noise of that size in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from videotune.adapters.layers import Parameters
from videotune.rng import seed32
from videotune.trainer.optimizers import (
    AnyOptimizer,
    OptimizerList,
    clip_grad_norm,
    parts_of,
    step_if_finite,
)


class MasterWeights:
    """``parameters`` are what the optimizer updates, by name: a float32 copy, or the network's own where it is float32."""

    def __init__(self, held: Parameters) -> None:
        self.parameters = {
            name: parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float())
            for name, parameter in held.items()
        }
        self._pairs = [
            (held[name], master)
            for name, master in self.parameters.items()
            if master is not held[name]
        ]

    @property
    def apart(self) -> bool:
        """Whether any master is a copy."""
        return bool(self._pairs)

    def grads_to_masters(self) -> None:
        """The network's gradients go to their masters; each is freed as it goes."""
        for held, master in self._pairs:
            if held.grad is not None:
                master.grad = held.grad.float()
                held.grad = None

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """The network holds its masters again, rounded to nearest."""
        for held, master in self._pairs:
            held.copy_(master)


DROPPED = 16
"""Bits of a float32 that a bf16 has not."""


def stochastic_round(x: Tensor, seed: int, *name: str | int) -> Tensor:
    """bf16 neighbours of float32 numbers, the nearer the likelier: the mean is x; what bf16 holds exactly stays.

    The draw belongs to (seed, name) on one kind of device: a number below 2^16 is added to the bits of each float32, and
    the lower half of them is cut off.
    """
    random = torch.Generator(x.device).manual_seed(seed32(seed, "rounding", *name))
    chance = torch.randint(
        0, 1 << DROPPED, x.shape, generator=random, device=x.device, dtype=torch.int32
    )
    bits = (
        (x.view(torch.int32) + chance).bitwise_right_shift(DROPPED).bitwise_left_shift(DROPPED)
    )
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


@torch.no_grad()
def update_rounded(
    part: AnyOptimizer, parameter: nn.Parameter, good: Tensor, seed: int, step: int, name: str
) -> None:
    """One parameter's update where it is held in bf16: float32 while it lasts, then rounded by chance; its gradient goes.

    A parameter of another dtype is updated as it is.
    """
    if parameter.grad is None:
        return
    if parameter.dtype != torch.bfloat16:
        step_if_finite(part, good)
        parameter.grad = None
        return
    held = parameter.data
    gradient = parameter.grad
    parameter.grad = None
    try:
        parameter.data = held.float()
        parameter.grad = gradient.float()
        step_if_finite(part, good)
        held.copy_(stochastic_round(parameter.data, seed, step, name))
    finally:
        parameter.grad = None
        parameter.data = held


def update_each_rounded(
    optimizer: AnyOptimizer,
    parameters: Parameters,
    good: Tensor,
    seed: int,
    step: int,
    first_rows: Mapping[str, int],
) -> None:
    """``update_rounded`` of one parameter after the other, so that one tensor at a time is float32.

    ``first_rows``: the row with which this process's shard begins, so that no two processes draw the same.
    """
    owners = owners_of(optimizer)
    for name, parameter in parameters.items():
        first = first_rows.get(name)
        update_rounded(
            owners[id(parameter)],
            parameter,
            good,
            seed,
            step,
            f"{name}[{first}:]" if first else name,
        )


def owners_of(optimizer: AnyOptimizer) -> dict[int, torch.optim.Optimizer]:
    """Each parameter's optimizer, by the parameter's id, where each has one of its own."""
    assert isinstance(optimizer, OptimizerList), (
        "one optimizer for all parameters cannot update one alone"
    )
    return {
        id(group["params"][0]): part
        for part in parts_of(optimizer)
        for group in part.param_groups
    }


@dataclass
class BackwardOptimizer:
    """Updates each parameter as soon as its gradient is whole, and drops that, so that gradients never all live at once.

    So nothing that needs them all is possible: each tensor's gradient is clipped by its own norm, and where one is not
    finite the others are updated all the same. A loss that is not finite updates none: it is known before backward.
    """

    most: float
    rounding: int | None = None
    masters: MasterWeights | None = None
    _norms: list[Tensor] = field(default_factory=list)
    _good: Tensor | None = None
    _step: int = 0

    def attach(self, held: Parameters, optimizer: AnyOptimizer) -> BackwardOptimizer:
        """Watch the parameters that the network holds; the optimizer has one of its own for each of them, or its master."""
        owners = owners_of(optimizer)
        for name, parameter in held.items():
            master = parameter if self.masters is None else self.masters.parameters[name]
            parameter.register_post_accumulate_grad_hook(
                partial(self._ready, name, owners[id(master)], master)
            )
        return self

    def begin(self, step: int) -> None:
        """What comes next is the backward pass of a step."""
        self._norms = []
        self._good = None
        self._step = step

    def loss(self, loss: Tensor) -> None:
        """The loss () whose backward comes next."""
        self._good = torch.isfinite(loss.detach())

    def norm(self) -> Tensor:
        """The norm () of the whole gradient."""
        return torch.stack(self._norms).norm()

    @torch.no_grad()
    def _ready(self, name: str, part: AnyOptimizer, master: nn.Parameter, held: Tensor) -> None:
        assert self._good is not None, "a gradient came outside of a step"
        if master is not held:
            assert held.grad is not None
            master.grad = held.grad.float()
            held.grad = None
        norm = clip_grad_norm([master], self.most)
        self._norms.append(norm)
        good = self._good & torch.isfinite(norm)
        if self.rounding is not None:
            update_rounded(part, master, good, self.rounding, self._step, name)
        else:
            step_if_finite(part, good)
        master.grad = None
        if master is not held:
            held.copy_(master)
