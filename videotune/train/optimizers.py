"""Optimizers from libraries, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    name: str = "ADAMW"
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01


@dataclass(frozen=True)
class RateSettings:
    """The peak rate, what it does after the warm-up (CONSTANT, LINEAR or COSINE, both down to 0), and the run's length."""

    learning_rate: float
    scheduler: str
    warmup_steps: int
    steps: int


def default_warmup(steps: int) -> int:
    """5 % of the steps, at most 100."""
    return min(100, steps // 20)


def rate(settings: RateSettings, step: int) -> float:
    """The learning rate of step ``step`` (from 1): linear warm-up, then as the scheduler says."""
    done = step - 1
    if done < settings.warmup_steps:
        return settings.learning_rate * (done + 1) / (settings.warmup_steps + 1)
    share = (done - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    match settings.scheduler:
        case "CONSTANT":
            factor = 1.0
        case "LINEAR":
            factor = 1 - share
        case "COSINE":
            factor = 0.5 * (1 + math.cos(math.pi * share))
        case other:
            raise ValueError(f"learning_rate_scheduler: {other!r}")
    return settings.learning_rate * factor


def make_optimizer(groups: Mapping[str, Sequence[nn.Parameter]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """One parameter group a name; the table OPTIMIZERS says whose."""
    rows = [{"params": list(parameters), "name": name} for name, parameters in groups.items()]
    return OPTIMIZERS[settings.name](rows, settings)


def _adamw(rows: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """torch's. The fused kernel can skip a step on the device, without asking the host."""
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(rows, lr=0.0, betas=betas, weight_decay=settings.weight_decay, fused=True)


def _adamw_8bit(rows: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """bitsandbytes' (Dettmers et al. 2022, arXiv 2110.02861): moments of weights of 4096 numbers and more in 8 bits."""
    import bitsandbytes

    betas = (settings.beta1, settings.beta2)
    return bitsandbytes.optim.AdamW8bit(rows, lr=0.0, betas=betas, weight_decay=settings.weight_decay)


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer]] = {
    "ADAMW": _adamw,
    "ADAMW_8BIT": _adamw_8bit,
}


def apply(optimizer: torch.optim.Optimizer, good: Tensor) -> None:
    """Take the step where ``good`` () is true; where not, weights and moments stay as they are.

    A fused kernel looks on the device. For the others, and for parameters on the host beside a device, the host has to wait
    for the answer, once a step.
    """
    waits = good.is_cuda and any(not p.is_cuda for group in optimizer.param_groups for p in group["params"])
    if optimizer.defaults.get("fused") and not waits:
        optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(good):
        optimizer.step()


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors ``{parameter}.{key}``; a plain number becomes ``{parameter}.{key}#``, int64.

    Raises ValueError for what is neither.
    """
    out = {}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                out[f"{name}.{key}"] = value
            elif isinstance(value, int):
                out[f"{name}.{key}#"] = torch.tensor(value, dtype=torch.int64)
            else:
                raise ValueError(f"optimizer state {name}.{key} is a {type(value).__name__}: it cannot be kept exactly")
    return out


def without_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters that no update has reached yet, and which therefore have no state."""
    return [name for name, parameter in names.items() if not optimizer.state.get(parameter)]


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
    without: Collection[str] = (),
) -> None:
    """Put flat tensors back, bit for bit, on each parameter's device; the parameters ``without`` had none.

    Raises ValueError where another parameter has no state, or a state no parameter.
    """
    parts: dict[str, dict[str, Tensor | int]] = {name: {} for name in names}
    for key, value in state.items():
        name, _, last = key.rpartition(".")
        if name not in parts:
            raise ValueError(f"optimizer state of no parameter: {key}")
        exact: Tensor | int = int(value) if last.endswith("#") else value.to(names[name].device)
        parts[name][last.removesuffix("#")] = exact
    for name, parameter in names.items():
        if bool(parts[name]) == (name in without):
            raise ValueError(f"no optimizer state for {name}" if name not in without else f"a state too many: {name}")
        if parts[name]:
            optimizer.state[parameter] = parts[name]
