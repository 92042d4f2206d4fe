"""Optimizers from libraries, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """One parameter group a name. The fused kernel can skip a step on the device, without asking the host."""
    rows = [{"params": list(parameters), "name": name} for name, parameters in groups.items()]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(rows, lr=0.0, betas=betas, weight_decay=settings.weight_decay, fused=True)


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors ``{parameter}.{key}``."""
    return {
        f"{name}.{key}": value
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Put flat tensors back, bit for bit, on each parameter's device.

    Raises ValueError where a parameter has no state or a state no parameter.
    """
    rest = dict(state)
    for name, parameter in names.items():
        keys = [key for key in rest if key.startswith(f"{name}.") and "." not in key[len(name) + 1 :]]
        if not keys:
            raise ValueError(f"no optimizer state for {name}")
        optimizer.state[parameter] = {key[len(name) + 1 :]: rest.pop(key).to(parameter.device) for key in keys}
    if rest:
        raise ValueError(f"optimizer state of no parameter: {next(iter(rest))}")
