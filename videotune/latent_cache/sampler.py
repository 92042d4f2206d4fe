"""Which windows a step takes: a pure function of (seed, step), endless, one bucket a step.

A step takes b_j samples of its bucket j of n_j windows, so a bucket has w_j = n_j / b_j steps an epoch. Its t-th step
(t from 0) is due at the time (t + 1/2) / w_j in epochs, that of bucket 0, the dearest, at t / w_0; steps come in the order
of these times. Every bucket is then near its fair share at all times. The samples of a bucket, counted from the first step
on, go through one permutation of its windows after the other.

And which expert a step trains: runs of steps, dealt out by the experts' shares, a pure function of the step too.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm

import numpy as np

from videotune.errors import VideotuneError
from videotune.rng import generator_for


@dataclass(frozen=True)
class Schedule:
    """The seed; for each bucket its windows (a window shown r times counts r times) and the samples of its steps.

    Bucket 0 is the dearest: the first step takes it. ``shuffle`` False keeps each bucket's own order. Raises
    VideotuneError where there is nothing to sample from.
    """

    seed: int
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise VideotuneError(
                f"There is nothing to train on: the buckets hold {list(self.sizes)} windows, and each needs at least one. "
                "`videotune check` says why clips were not used."
            )
        assert len(self.batches) == len(self.sizes), (
            f"{len(self.batches)} batches for {len(self.sizes)} buckets"
        )
        if min(self.batches) < 1:
            raise VideotuneError(
                f"The samples of a step are {list(self.batches)}, bucket by bucket; batch_size must be at least 1."
            )


def steps_per_epoch(schedule: Schedule) -> Fraction:
    """How many steps show every window once on average: Σ n_j / b_j."""
    return sum(
        (Fraction(n, b) for n, b in zip(schedule.sizes, schedule.batches, strict=True)),
        Fraction(0),
    )


@lru_cache(maxsize=256)
def steps_per_bucket(schedule: Schedule, steps: int) -> tuple[int, ...]:
    """How many of the steps 1 … ``steps`` are each bucket's: those with the earliest due times, ties by bucket."""
    spacing, epoch = _spacing(schedule)
    # due times as integers: the t-th step of bucket j is due at (2t + 1)·spacing_j, of bucket 0 at 2t·spacing_0
    now = int(steps * epoch)  # about the time at which so many steps are done
    counts = [max(0, (now // each - (j > 0)) // 2 + 1) for j, each in enumerate(spacing)]

    def due(j: int, turn: int) -> tuple[int, int]:
        return (2 * turn + (j > 0)) * spacing[j], j

    while sum(counts) < steps:
        counts[min(range(len(counts)), key=lambda j: due(j, counts[j]))] += 1
    while sum(counts) > steps:
        counts[
            max(
                (j for j in range(len(counts)) if counts[j]),
                key=lambda j: due(j, counts[j] - 1),
            )
        ] -= 1
    return tuple(counts)


def bucket_of(schedule: Schedule, step: int) -> int:
    """The bucket of a step; steps count from 1."""
    assert step >= 1, "steps count from 1"
    before = steps_per_bucket(schedule, step - 1)
    after = steps_per_bucket(schedule, step)
    return next(j for j, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)


def sample_indices(schedule: Schedule, step: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(bucket, (window of that bucket, epoch of the bucket from 0) for each of the step's samples, in order)."""
    bucket = bucket_of(schedule, step)
    num = schedule.sizes[bucket]
    batch = schedule.batches[bucket]
    first = steps_per_bucket(schedule, step - 1)[bucket] * batch
    samples = (divmod(sample, num) for sample in range(first, first + batch))
    return bucket, tuple(
        (int(order(schedule, bucket, epoch)[place]), epoch) for epoch, place in samples
    )


def times_seen(schedule: Schedule, steps: int) -> list[list[int]]:
    """How often each window of each bucket has been sampled after ``steps`` steps, without going through them."""
    counts = []
    for bucket, done in enumerate(steps_per_bucket(schedule, steps)):
        num = schedule.sizes[bucket]
        full, rest = divmod(done * schedule.batches[bucket], num)
        counts.append(
            (full + np.bincount(order(schedule, bucket, full)[:rest], minlength=num)).tolist()
        )
    return counts


@lru_cache(maxsize=64)
def order(schedule: Schedule, bucket: int, epoch: int) -> np.ndarray:
    """The windows of a bucket in the order of one of its epochs (from 0): a permutation drawn for (seed, bucket, epoch)."""
    num = schedule.sizes[bucket]
    shuffled = generator_for(schedule.seed, "stream", bucket, epoch)
    return shuffled.random(num).argsort(kind="stable") if schedule.shuffle else np.arange(num)


@lru_cache(maxsize=64)
def _spacing(schedule: Schedule) -> tuple[tuple[int, ...], Fraction]:
    """(half the time between two steps of each bucket, in units in which all are integers; the time of one step of all)."""
    whole = lcm(*schedule.sizes)
    spacing = tuple(
        b * (whole // n) for n, b in zip(schedule.sizes, schedule.batches, strict=True)
    )
    return spacing, 2 * whole / steps_per_epoch(schedule)


@dataclass(frozen=True)
class ExpertSchedule:
    """Of one or two experts that train, the first has ``share`` of the runs of ``period`` steps, spread evenly.

    Run p (from 0) is the first one's where ⌊(p + 1)·share + ½⌋ > ⌊p·share + ½⌋ (Bresenham's line), so after P runs it has
    had P·share of them to within one half.
    """

    names: tuple[str, ...]
    share: Fraction = Fraction(1)
    period: int = 1

    def __post_init__(self) -> None:
        assert 1 <= len(self.names) <= 2, self.names
        assert 0 <= self.share <= 1, self.share
        assert self.period >= 1, self.period

    def at(self, step: int) -> str:
        """The expert of a step (from 1)."""
        if len(self.names) == 1:
            return self.names[0]
        run = (step - 1) // self.period
        return self.names[0] if self._runs(run + 1) > self._runs(run) else self.names[1]

    def count(self, step: int, name: str) -> int:
        """How many of the steps 1 … ``step`` are an expert's."""
        if len(self.names) == 1:
            return step if name == self.names[0] else 0
        runs, rest = divmod(step, self.period)
        first = self._runs(runs) * self.period + (
            rest if rest and self.at(step) == self.names[0] else 0
        )
        return first if name == self.names[0] else step - first

    def _runs(self, count: int) -> int:
        """How many of the first ``count`` runs are the first expert's."""
        return floor(count * self.share + Fraction(1, 2))


def exact(share: float) -> Fraction:
    """A share as a fraction of small numbers, so that no rounding moves a run."""
    return Fraction(share).limit_denominator(10_000)
