"""The engine: a generator of StepRecords. Whoever drives it saves, samples and stops between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from videotune.cache.batches import Prepared
from videotune.diffusion.objective import Objective
from videotune.train.distributed import DistributedContext
from videotune.train.step import Clock, StepRecord, StepSettings, Trainable, train_step
from videotune.types import Family

Turn = tuple[nn.Module, Trainable, int]
"""The network of a step, what of it trains, and how many steps that has had with this one."""


def run_steps(
    family: Family,
    turn_of: Callable[[int], Turn],
    objective: Objective,
    stream: Iterable[Prepared],
    settings: StepSettings,
    device: torch.device,
    dist: DistributedContext | None = None,
) -> Iterator[StepRecord]:
    """One update for each prepared batch; the record of a step is yielded when its weights are in place."""
    batches, dist, before = iter(stream), dist or DistributedContext(), None
    while True:
        clock = Clock(device)
        prepared = next(batches, None)
        if prepared is None:
            return
        clock.mark("data")
        net, trainable, own_step = turn_of(prepared.step)
        if trainable.expert and trainable.expert != before:
            clock.mark("experts")  # the other one had to be loaded
            before = trainable.expert
        if not net.training:  # a preview or the ruler was here; setting it walks every module
            net.train()
        yield train_step(family, net, trainable, objective, prepared, settings, clock, dist, own_step)
