"""How gradients reach the weights: all after backward, tensor by tensor after it, or each while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from videotune.trainer.master_weights import MasterWeights
from videotune.trainer.optimizers import AnyOptimizer, Several, apply, parts_of
from videotune.trainer.stochastic_rounding import update_rounded


def clip(
    parameters: Sequence[nn.Parameter],
    most: float,
    cut: Sequence[nn.Parameter] = (),
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The gradient's norm (), float32, with the gradient scaled down to ``most`` where it is longer.

    On a CPU a gradient that is short enough is not touched; on a device the host does not look, and it is scaled by 1.
    ``cut``: those of the parameters of which other processes have the other rows; ``total`` sums over processes.
    """
    norm = norm_of(parameters)
    if total is not None:
        apart = {id(parameter) for parameter in cut}
        rows, whole = norm_of(cut), norm_of([p for p in parameters if id(p) not in apart])
        device = parameters[0].device  # of a process without a row the sum must go the same way as the others'
        norm = (total(rows.float().to(device) ** 2) + whole.to(device) ** 2).sqrt()
    if norm.is_cuda or isinstance(norm, FakeTensor) or norm > most:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm () of the gradients that are there, float32."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients and parameters:
        return torch.zeros((), device=parameters[0].device)
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # a norm that is summed up in bf16 is a few percent off
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()


def update(
    optimizer: AnyOptimizer,
    parameters: Mapping[str, nn.Parameter],
    masters: MasterWeights | None,
    good: Tensor,
    rounding: int | None,
    step: int,
    first_rows: Mapping[str, int] | None = None,
) -> None:
    """Take a step where ``good`` () is true. ``rounding``: the seed of draws by which bf16 weights are rounded, or None.

    With it each parameter has an optimizer of its own, and one tensor at a time is float32. ``first_rows``: of those that
    are cut the row with which this process's part begins, so that no two processes draw the same.
    """
    if rounding is None:
        apply(optimizer, good)
        if masters is not None:
            masters.spread()
        return
    owners = owners_of(optimizer)
    for name, parameter in parameters.items():
        first = (first_rows or {}).get(name)
        drawn = name if not first else f"{name}[{first}:]"
        update_rounded(owners[id(parameter)], parameter, good, rounding, step, drawn)


def owners_of(optimizer: AnyOptimizer) -> dict[int, torch.optim.Optimizer]:
    """Each parameter's optimizer, by the parameter's id, where each has one of its own."""
    assert isinstance(optimizer, Several), "one optimizer for all parameters cannot update one alone"
    return {id(group["params"][0]): part for part in parts_of(optimizer) for group in part.param_groups}


@dataclass
class InBackward:
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

    def attach(self, held: Mapping[str, nn.Parameter], optimizer: AnyOptimizer) -> InBackward:
        """Watch the parameters that the network holds; the optimizer has one of its own for each of them, or its master."""
        owners = owners_of(optimizer)
        for name, parameter in held.items():
            master = parameter if self.masters is None else self.masters.parameters[name]
            part = owners[id(master)]

            def ready(held: Tensor, name: str = name, master: nn.Parameter = master, part: AnyOptimizer = part) -> None:
                self._ready(name, held, master, part)

            parameter.register_post_accumulate_grad_hook(ready)
        return self

    def begin(self, step: int) -> None:
        """What comes next is the backward pass of a step."""
        self._norms, self._good, self._step = [], None, step

    def loss(self, loss: Tensor) -> None:
        """The loss () whose backward comes next."""
        self._good = torch.isfinite(loss.detach())

    def end(self) -> tuple[Tensor, Tensor]:
        """(norm of the whole gradient (), whether every part of it was finite ())."""
        norm = torch.stack(self._norms).norm()
        return norm, torch.isfinite(norm)

    @torch.no_grad()
    def _ready(self, name: str, held: Tensor, master: nn.Parameter, part: AnyOptimizer) -> None:
        assert self._good is not None, "a gradient came outside of a step"
        if master is not held:
            assert held.grad is not None
            master.grad, held.grad = held.grad.float(), None
        norm = clip([master], self.most)
        self._norms.append(norm)
        good = self._good & torch.isfinite(norm)
        if self.rounding is not None:
            update_rounded(part, master, good, self.rounding, self._step, name)
        else:
            apply(part, good)
        master.grad = None
        if master is not held:
            held.copy_(master)
