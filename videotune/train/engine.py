"""The engine: a generator of StepRecords. Whoever drives it saves, samples and stops between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from videotune.cache.batches import Prepared
from videotune.diffusion.objective import Objective
from videotune.train.optimizers import RateSettings, rate
from videotune.train.step import Clock, StepRecord, StepSettings, train_step
from videotune.types import Family


def run_steps(
    family: Family,
    net: nn.Module,
    objective: Objective,
    stream: Iterable[Prepared],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    rates: RateSettings,
) -> Iterator[StepRecord]:
    """One update for each prepared batch; the record of a step is yielded when its weights are in place."""
    device = parameters[0].device
    batches = iter(stream)
    while True:
        clock = Clock(device)
        prepared = next(batches, None)
        if prepared is None:
            return
        clock.mark("data")
        if not net.training:  # a preview or the ruler was here; setting it walks every module
            net.train()
        lr = {group["name"]: rate(rates, prepared.step) for group in optimizer.param_groups}
        yield train_step(family, net, objective, prepared, parameters, optimizer, settings, lr, clock)
