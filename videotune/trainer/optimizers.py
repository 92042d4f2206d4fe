"""Optimizers from libraries, and the learning rate as a pure function of the step."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from videotune.adapters.layers import Parameters
from videotune.config.optimizers import OPTIMIZERS, Optimizer


@dataclass(frozen=True)
class LRSchedule:
    """The peak rate, what it does after the warm-up, all of it down to 0 but CONSTANT, and the run's length in steps.

    COSINE_RESTARTS goes down ``cycles`` times; POLYNOMIAL as the power ``power`` of the share of the steps that is left.
    """

    learning_rate: float
    scheduler: str
    warmup_steps: int
    steps: int
    cycles: int = 1
    power: float = 1.0


def lr_at(settings: LRSchedule, step: int) -> float:
    """The learning rate of step ``step`` (from 1): linear warm-up, then as the scheduler says."""
    done = step - 1
    if done < settings.warmup_steps:
        return settings.learning_rate * (done + 1) / (settings.warmup_steps + 1)
    share = (done - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    factors = {
        "CONSTANT": 1.0,
        "LINEAR": 1 - share,
        "COSINE": 0.5 * (1 + math.cos(math.pi * share)),
        "COSINE_RESTARTS": 0.5 * (1 + math.cos(math.pi * (share * settings.cycles % 1.0))),
        "POLYNOMIAL": max(0.0, 1 - share) ** settings.power,
    }
    return settings.learning_rate * factors[settings.scheduler]


class OptimizerList:
    """Optimizers that step as one; each parameter belongs to one of them."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts; a rate that is set in one is the part's own."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)


AnyOptimizer = torch.optim.Optimizer | OptimizerList


def parts_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The library's own optimizers that an optimizer is made of."""
    return optimizer.parts if isinstance(optimizer, OptimizerList) else (optimizer,)


def make_optimizer(
    groups: Mapping[str, Sequence[nn.Parameter]], settings: Optimizer, *, apart: bool = False
) -> AnyOptimizer:
    """One parameter group a name, for the optimizer that the settings name (``config/optimizers.py``).

    ``apart``: every parameter gets an optimizer of its own, so that it can be updated alone. Raises VideotuneError where the
    device is not for this optimizer.
    """
    build = OPTIMIZERS[settings.name].build
    rows: list[dict[str, Any]] = [
        {"params": list(parameters), "name": name} for name, parameters in groups.items()
    ]
    if apart:
        return OptimizerList(
            p
            for row in rows
            for one in row["params"]
            for p in build([row | {"params": [one]}], settings)
        )
    parts = build(rows, settings)
    return parts[0] if len(parts) == 1 else OptimizerList(parts)


def step_if_finite(optimizer: AnyOptimizer, good: Tensor) -> None:
    """Take the step where ``good`` () is true; where not, weights and moments stay as they are.

    A fused kernel looks on the device (that of MPS does not). For the others, and for parameters on the host beside a
    device, the host has to wait for the answer, once a step.
    """
    waiting = []
    for part in parts_of(optimizer):
        apart = any(
            p.device != good.device for group in part.param_groups for p in group["params"]
        )
        if part.defaults.get("fused") and not apart and good.device.type != "mps":
            part.found_inf = (~good).float()  # type: ignore[attr-defined]
            part.step()
        else:
            waiting.append(part)
    for part in waiting if waiting and bool(good) else ():
        part.step()


def clip_grad_norm(
    parameters: Sequence[nn.Parameter], most: float, norm: Tensor | None = None
) -> Tensor:
    """The gradient's norm (), float32, with the gradient scaled down to ``most`` where it is longer.

    On a CPU a gradient that is short enough is not touched; on a device the host does not look, and it is scaled by 1.
    """
    norm = norm_of(parameters) if norm is None else norm
    if norm.device.type != "cpu" or isinstance(norm, FakeTensor) or norm > most:
        nn.utils.clip_grads_with_norm_(
            [p for p in parameters if p.device == norm.device], most, norm
        )
        away = [p.grad for p in parameters if p.grad is not None and p.device != norm.device]
        if away:
            torch._foreach_mul_(away, (most / (norm + 1e-6)).item())
    return norm


def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm () of the gradients that are there, float32: on their device, or on the host where some of them are there.

    Then the host waits once, for the norm of those that are on the device.
    """
    gradients: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.device, []).append(parameter.grad)
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    norms = [_norm(on_one) for on_one in gradients.values()]
    return norms[0] if len(norms) == 1 else torch.stack([norm.cpu() for norm in norms]).norm()


def _norm(gradients: list[Tensor]) -> Tensor:
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # a norm that is summed up in bf16 is a few percent off
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()


GROUP = "@"
"""How the last part of a saved name begins where the value belongs to a parameter group, by its first parameter."""


def optimizer_state(optimizer: AnyOptimizer, names: Parameters) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors ``{parameter}.{key}``.

    An int becomes ``{key}#``, int64, and a float ``{key}~``, float64. Of a group's own numbers those are kept that updates
    change (``COUNTED``): ``{its first parameter}.@{key}``. Raises ValueError for what is none of these.
    """
    out: dict[str, Tensor] = {}
    known = {id(parameter): name for name, parameter in names.items()}
    states = {
        id(parameter): kept
        for part in parts_of(optimizer)
        for parameter, kept in part.state.items()
    }
    for name, parameter in names.items():
        for key, value in states.get(id(parameter), {}).items():
            out |= _flat(f"{name}.{key}", value)
    for group in optimizer.param_groups:
        first = known.get(id(group["params"][0]))
        if first is not None and group.get("k"):  # an update has changed its own numbers
            for key in sorted(COUNTED & set(group)):
                out |= _flat(f"{first}.{GROUP}{key}", group[key])
    return out


COUNTED = frozenset(
    ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k", "lr_max", "weight_sum")
)
"""What optimizers keep in their groups: Prodigy its estimate of the distance, schedule-free AdamW its weights' sum."""


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, int):
        return {f"{name}#": torch.tensor(value, dtype=torch.int64)}
    if isinstance(value, float):
        return {f"{name}~": torch.tensor(value, dtype=torch.float64)}
    raise ValueError(
        f"optimizer state {name} is a {type(value).__name__}: it cannot be kept exactly"
    )


def load_optimizer_state(
    optimizer: AnyOptimizer,
    names: Parameters,
    state: Mapping[str, Tensor],
    without: Collection[str] = (),
) -> None:
    """Put flat tensors back, bit for bit, on each parameter's device; the parameters ``without`` had none.

    Raises ValueError where another parameter has no state, or a state no parameter.
    """
    parts: dict[str, dict[str, Any]] = {name: {} for name in names}
    groups = {id(group["params"][0]): group for group in optimizer.param_groups}
    owners = {
        id(p): part
        for part in parts_of(optimizer)
        for group in part.param_groups
        for p in group["params"]
    }
    for key, value in state.items():
        name, _, last = key.rpartition(".")
        if name not in parts:
            raise ValueError(f"optimizer state of no parameter: {key}")
        number = (
            int(value) if last.endswith("#") else float(value) if last.endswith("~") else None
        )
        exact = value.to(names[name].device) if number is None else number
        if last.startswith(GROUP):
            groups[id(names[name])][last.strip(f"{GROUP}#~")] = exact
        else:
            parts[name][last.rstrip("#~")] = exact
    for name, parameter in names.items():
        if bool(parts[name]) == (name in without):
            raise ValueError(
                f"no optimizer state for {name}"
                if name not in without
                else f"a state too many: {name}"
            )
        if parts[name]:
            owner = owners[id(parameter)]
            owner.state[parameter] = _paged(owner, parameter, parts[name])


def _paged(owner: Any, parameter: nn.Parameter, kept: dict[str, Any]) -> dict[str, Any]:
    """The same state, with what a paging optimizer pages in its unified memory again."""
    if not getattr(owner, "is_paged", False):
        return kept
    for key in {"state1", "state2"} & set(kept):
        kept[key] = owner.get_state_buffer(parameter, dtype=kept[key].dtype).copy_(kept[key])
    return kept
