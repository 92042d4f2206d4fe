"""The engine: a generator of StepRecords. Whoever drives it saves, samples and stops between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from videotune.cache.batches import Prepared
from videotune.diffusion.objective import Objective
from videotune.train.crew import Crew
from videotune.train.optimizers import RateSettings, rate
from videotune.train.step import Clock, Learner, StepRecord, StepSettings, train_step
from videotune.types import Family


def run_steps(
    family: Family,
    learner: Learner,
    objective: Objective,
    stream: Iterable[Prepared],
    settings: StepSettings,
    rates: RateSettings,
    crew: Crew | None = None,
) -> Iterator[StepRecord]:
    """One update for each prepared batch; the record of a step is yielded when its weights are in place."""
    device = next(iter(learner.parameters.values())).device
    batches, crew = iter(stream), crew or Crew()
    while True:
        clock = Clock(device)
        prepared = next(batches, None)
        if prepared is None:
            return
        clock.mark("data")
        if not learner.net.training:  # a preview or the ruler was here; setting it walks every module
            learner.net.train()
        lr = {group["name"]: rate(rates, prepared.step) for group in learner.optimizer.param_groups}
        yield train_step(family, learner, objective, prepared, settings, lr, clock, crew)
