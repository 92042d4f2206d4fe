"""The learning rate as a pure function of the step, so that a resume needs no state."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULT_TIMESCALE = 10_000
"""Steps of INVERSE_SQRT's timescale without a warm-up."""


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate over the steps: a linear warm-up, then the scheduler's curve."""

    learning_rate: float
    """The peak."""
    scheduler: str
    """CONSTANT stays; INVERSE_SQRT falls and never ends; all others reach ``floor`` one
    step after the last.
    """
    warmup_steps: int
    steps: int
    """Steps that train the parameters, of two experts those of one."""
    cycles: int = 1
    """How often COSINE_RESTARTS goes down."""
    power: float = 1.0
    """POLYNOMIAL is the share of the steps that is left, to this power."""
    floor: float = 0.0
    """The lowest rate, as a share of the peak."""
    decay_steps: int = 0
    """WSD: the last steps, in which it falls."""
    timescale: int | None = None
    """INVERSE_SQRT: steps in which it falls to 1/√2. None: the warm-up."""


def lr_at(schedule: LRSchedule, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    done = step - 1
    if done < schedule.warmup_steps:
        return schedule.learning_rate * (done + 1) / (schedule.warmup_steps + 1)

    factor = FACTORS[schedule.scheduler](schedule, done)
    if schedule.floor:
        factor = _above_floor(schedule, factor)
    return schedule.learning_rate * factor


def _above_floor(schedule: LRSchedule, factor: float) -> float:
    """Return the factor of a schedule that ends at its floor in place of 0; that of a
    constant one stays 1.
    """
    if schedule.scheduler == "INVERSE_SQRT":
        return max(factor, schedule.floor)
    return schedule.floor + (1 - schedule.floor) * factor


def _progress(schedule: LRSchedule, done: int) -> float:
    """Return the share of the steps after the warm-up that are done."""
    return (done - schedule.warmup_steps) / max(
        1, schedule.steps - schedule.warmup_steps
    )


def _constant(schedule: LRSchedule, done: int) -> float:
    return 1.0


def _linear(schedule: LRSchedule, done: int) -> float:
    return 1 - _progress(schedule, done)


def _cosine(schedule: LRSchedule, done: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(schedule, done)))


def _cosine_restarts(schedule: LRSchedule, done: int) -> float:
    cycle_progress = _progress(schedule, done) * schedule.cycles % 1.0
    return 0.5 * (1 + math.cos(math.pi * cycle_progress))


def _polynomial(schedule: LRSchedule, done: int) -> float:
    return max(0.0, 1 - _progress(schedule, done)) ** schedule.power


def _rex(schedule: LRSchedule, done: int) -> float:
    """Chen et al. 2021, arXiv 2107.04197: between linear and constant."""
    progress = min(1.0, _progress(schedule, done))
    return (1 - progress) / (1 - progress / 2)


def _warmup_stable_decay(schedule: LRSchedule, done: int) -> float:
    """Hu et al. 2024, arXiv 2404.06395: constant, then a cosine over the last steps."""
    decay_steps = min(schedule.decay_steps, schedule.steps - schedule.warmup_steps)
    decay_begins = schedule.steps - decay_steps
    if done < decay_begins:
        return 1.0
    progress = min(1.0, (done - decay_begins) / max(1, decay_steps))
    return 0.5 * (1 + math.cos(math.pi * progress))


def _inverse_sqrt(schedule: LRSchedule, done: int) -> float:
    """Vaswani et al. 2017, arXiv 1706.03762; with a timescale, Zhai et al. 2022."""
    timescale = schedule.timescale or schedule.warmup_steps or DEFAULT_TIMESCALE
    return 1 / math.sqrt(1 + (done - schedule.warmup_steps) / timescale)


FACTORS: Mapping[str, Callable[[LRSchedule, int], float]] = {
    "CONSTANT": _constant,
    "LINEAR": _linear,
    "COSINE": _cosine,
    "COSINE_RESTARTS": _cosine_restarts,
    "POLYNOMIAL": _polynomial,
    "REX": _rex,
    "WSD": _warmup_stable_decay,
    "INVERSE_SQRT": _inverse_sqrt,
}
"""The share of the peak after the warm-up, by scheduler, as a function of the steps
done.
"""
