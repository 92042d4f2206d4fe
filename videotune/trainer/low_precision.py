"""Update weights in bf16, with float32 masters or stochastic rounding, and update
weights during backward.

With masters, the optimizer updates float32 copies, and the network holds them rounded
(Micikevicius et al. 2018, arXiv 1710.03740).

Without masters, rounding to nearest loses every update below half of bf16's step, 1/256
of a weight. Rounded stochastically, such an update moves the weight rarely but by a
whole step, and the mean is right (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al.
2020, arXiv 2010.06192). The price is noise of that size in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from videotune.adapters.layers import Parameters
from videotune.rng import torch_seed
from videotune.trainer.optimizers import (
    AnyOptimizer,
    OptimizerList,
    clip_grad_norm,
    parts_of,
    step_if_finite,
)


class MasterWeights:
    """Float32 copies of a network's parameters for the optimizer."""

    def __init__(self, module_params: Parameters) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """What the optimizer updates, by name: a copy, or the network's own parameter
        if it is float32.
        """
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in module_params.items():
            if parameter.dtype == torch.float32:
                self.parameters[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().float())
            self.parameters[name] = master
            self._pairs.append((parameter, master))

    @property
    def has_copies(self) -> bool:
        """Whether any master is a copy."""
        return bool(self._pairs)

    def grads_to_masters(self) -> None:
        """Move the network's gradients to their masters; each is freed as it goes."""
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def forget_gradients(self) -> None:
        """Remove what the passes so far have left in the network's gradients."""
        for parameter, _ in self._pairs:
            parameter.grad = None

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """Copy the masters to the network, rounded to nearest."""
        for parameter, master in self._pairs:
            parameter.copy_(master)


TRUNCATED_BITS = 16
"""Bits of a float32 that a bf16 does not have."""


def stochastic_round(x: Tensor, seed: int, *name: str | int) -> Tensor:
    """Round float32 to bf16 neighbours, the nearer the likelier.

    The mean is x, and what bf16 can hold exactly stays.

    A number below 2^16 is added to the bits of each float32, and their lower half is
    cut off. (seed, name) decide the draw; another kind of device draws other numbers.
    """
    generator = torch.Generator(x.device).manual_seed(
        torch_seed(seed, "rounding", *name)
    )
    addend = torch.randint(
        1 << TRUNCATED_BITS,
        x.shape,
        generator=generator,
        device=x.device,
        dtype=torch.int32,
    )
    bits = x.view(torch.int32) + addend
    bits = bits.bitwise_right_shift(TRUNCATED_BITS).bitwise_left_shift(TRUNCATED_BITS)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


@torch.no_grad()
def update_rounded(
    optimizer: AnyOptimizer,
    parameter: nn.Parameter,
    grads_finite: Tensor,
    seed: int,
    step: int,
    name: str,
) -> None:
    """Update one parameter and free its gradient.

    In bf16 it is float32 during the update, then rounded stochastically.
    """
    if parameter.grad is None:
        return
    if parameter.dtype != torch.bfloat16:
        step_if_finite(optimizer, grads_finite)
        parameter.grad = None
        return

    weight = parameter.data
    gradient = parameter.grad
    parameter.grad = None
    try:
        parameter.data = weight.float()
        parameter.grad = gradient.float()
        step_if_finite(optimizer, grads_finite)
        # A skipped step is rounded too: bf16 values are exact, and stay.
        weight.copy_(stochastic_round(parameter.data, seed, step, name))
    finally:
        parameter.grad = None
        parameter.data = weight


def update_each_rounded(
    optimizer: AnyOptimizer,
    parameters: Parameters,
    grads_finite: Tensor,
    seed: int,
    step: int,
    first_rows: Mapping[str, int],
) -> None:
    """Apply ``update_rounded`` to one parameter after the other, so that one tensor at
    a time is float32.

    Args:
        optimizer: an ``OptimizerList`` with one optimizer a parameter.
        parameters: by name.
        grads_finite: () whether the step is applied.
        seed: of the rounding.
        step: the step.
        first_rows: the first row of this process's shard of a parameter, so that no two
            processes draw the same.
    """
    owners = owners_of(optimizer)
    for name, parameter in parameters.items():
        first_row = first_rows.get(name)
        draw_name = f"{name}[{first_row}:]" if first_row else name
        update_rounded(
            owners[id(parameter)], parameter, grads_finite, seed, step, draw_name
        )


def owners_of(optimizer: AnyOptimizer) -> dict[int, torch.optim.Optimizer]:
    """Return each parameter's optimizer, by the parameter's id, where each has its own."""
    assert isinstance(optimizer, OptimizerList), (
        "one optimizer for all parameters cannot update one of them"
    )
    owners = {}
    for part in parts_of(optimizer):
        for group in part.param_groups:
            owners[id(group["params"][0])] = part
    return owners


@dataclass
class BackwardOptimizer:
    """Update each parameter as soon as its gradient is complete, and free the gradient.

    Gradients never all exist at the same time, so nothing that needs them all is
    possible: each tensor's gradient is clipped by its own norm, and if one is not
    finite the others are still applied. If the loss is not finite, which is known
    before backward, no parameter is updated.
    """

    max_grad_norm: float
    rounding_seed: int | None = None
    """Seed of stochastic rounding. None: updates are not rounded."""
    masters: MasterWeights | None = None
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The norm of each gradient of the step, a scalar, before it was clipped, by name."""
    _loss_finite: Tensor | None = None
    _step: int = 0
    _updated: set[str] = field(default_factory=set)
    _skipped: frozenset[str] = frozenset()

    def attach(
        self, module_params: Parameters, optimizer: AnyOptimizer
    ) -> BackwardOptimizer:
        """Watch the network's parameters.

        The optimizer has one of its own for each of them, or for its master.
        """
        owners = owners_of(optimizer)
        for name, parameter in module_params.items():
            master = (
                parameter if self.masters is None else self.masters.parameters[name]
            )
            parameter.register_post_accumulate_grad_hook(
                partial(self._apply, name, owners[id(master)], master)
            )
        return self

    def begin(self, step: int) -> None:
        """Begin a step, before its backward pass."""
        self.norms = {}
        self._loss_finite = None
        self._step = step
        self._updated = set()
        self._skipped = frozenset()

    def repeat(self) -> None:
        """Begin the pass of a step again, which failed. What has been updated already
        is not updated again.

        Unlike ``begin`` it keeps their norms, which are not measured again.
        """
        self._skipped = frozenset(self._updated)

    def expect_loss(self, loss: Tensor) -> None:
        """Take the loss whose backward pass comes next: if it is not finite, nothing is
        updated.
        """
        self._loss_finite = torch.isfinite(loss.detach())

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, a scalar: 0 if nothing had one, because no
        caption of the step has a new token.
        """
        if not self.norms:
            return torch.zeros(())
        return torch.stack(list(self.norms.values())).norm()

    @torch.no_grad()
    def _apply(
        self,
        name: str,
        optimizer: AnyOptimizer,
        master: nn.Parameter,
        parameter: Tensor,
    ) -> None:
        """Clip the gradient of a parameter, update the parameter, and free the
        gradient.
        """
        assert self._loss_finite is not None, "a gradient came outside of a step"
        if name in self._skipped:
            parameter.grad = None
            return
        self._updated.add(name)
        if master is not parameter:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None

        norm = clip_grad_norm([master], self.max_grad_norm)
        self.norms[name] = norm
        grads_finite = self._loss_finite & torch.isfinite(norm)

        if self.rounding_seed is None:
            step_if_finite(optimizer, grads_finite)
        else:
            update_rounded(
                optimizer, master, grads_finite, self.rounding_seed, self._step, name
            )
        master.grad = None
        if master is not parameter:
            parameter.copy_(master)
