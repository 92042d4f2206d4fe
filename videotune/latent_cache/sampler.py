"""Which windows a step takes: a pure function of (seed, step), endless, one bucket a
step.

A step takes b_j samples of its bucket j of n_j windows, so a bucket has w_j = n_j / b_j
steps an epoch. Its t-th step (t from 0) is due at the time (t + 1/2) / w_j in epochs,
that of bucket 0, the most expensive one, at t / w_0: it comes first, so that a run that
does not fit fails at once. Steps come in the order of these
times, so every bucket is near its fair share at all times. The samples of a bucket,
counted from the first step on, go through one permutation of its windows after the
other. A bucket with a weight q has q n_j / b_j steps an epoch instead.

If datasets come or go during the run, its steps have phases. Each phase has buckets of
its own, which take their turns as if the run began with it.

And which expert a step trains: turns of steps, dealt out by the experts' shares, also a
pure function of the step.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.rng import generator_for


@dataclass(frozen=True)
class Schedule:
    """The buckets and how many samples a step takes of each.

    Bucket 0 is the most expensive of the first phase; the first step takes it.
    """

    seed: int
    window_counts: tuple[int, ...]
    """Windows of each bucket.

    A window that is shown r times an epoch counts r times.
    """
    batch_sizes: tuple[int, ...]
    """Samples of a step, for each bucket."""
    shuffle: bool = True
    """False keeps each bucket's own order."""
    weights: tuple[Fraction, ...] = ()
    """Factor of how often each bucket has a step. Empty: 1 for all."""
    phases: tuple[tuple[int, int], ...] = ()
    """First step and number of buckets of each phase. Empty: one phase."""

    def __post_init__(self) -> None:
        if not self.window_counts or min(self.window_counts) < 1:
            raise VideotuneError(
                f"there is nothing to train on: the buckets hold {list(self.window_counts)} windows, and each needs at least "
                "one. `videotune check` says why clips were not used."
            )
        assert len(self.batch_sizes) == len(self.window_counts), (
            f"{len(self.batch_sizes)} batches for {len(self.window_counts)} buckets"
        )
        if min(self.batch_sizes) < 1:
            raise VideotuneError(
                f"batch_size: the samples of a step are {list(self.batch_sizes)}, bucket by bucket. Set at least 1."
            )


@dataclass(frozen=True)
class Phase:
    """The schedule from one step to another."""

    schedule: Schedule
    """Its buckets, as if there were no others."""
    first_step: int
    last_step: int | None
    """None: it does not end."""

    def steps_until(self, step: int) -> int:
        """Return how many of the steps 1 … ``step`` it has."""
        last_step = step if self.last_step is None else min(step, self.last_step)
        return max(0, last_step - self.first_step + 1)


@lru_cache(maxsize=64)
def phases_of(schedule: Schedule) -> tuple[Phase, ...]:
    """Return the phases of a schedule, at least one."""
    if not schedule.phases:
        return (Phase(schedule, first_step=1, last_step=None),)

    phases = []
    first_bucket = 0
    for number, (first_step, bucket_count) in enumerate(schedule.phases):
        buckets = slice(first_bucket, first_bucket + bucket_count)
        first_bucket += bucket_count
        part = replace(
            schedule,
            window_counts=schedule.window_counts[buckets],
            batch_sizes=schedule.batch_sizes[buckets],
            weights=schedule.weights[buckets],
            phases=(),
        )
        later_phases = schedule.phases[number + 1 :]
        last_step = later_phases[0][0] - 1 if later_phases else None
        phases.append(Phase(part, first_step, last_step))
    return tuple(phases)


def weights_of(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return the factor of how often each bucket has a step."""
    return schedule.weights or (Fraction(1),) * len(schedule.window_counts)


def steps_per_epoch(schedule: Schedule) -> Fraction:
    """Return how many steps show every window once on average: Σ q_j n_j / b_j.

    If the schedule has phases, the windows and steps are those of its last phase.
    """
    last_phase = phases_of(schedule)[-1].schedule
    steps = Fraction(0)
    for windows, batch, weight in zip(
        last_phase.window_counts,
        last_phase.batch_sizes,
        weights_of(last_phase),
        strict=True,
    ):
        steps += weight * Fraction(windows, batch)
    return steps


def shown_windows(schedule: Schedule) -> int:
    """Return how many windows an epoch shows, repeats and weights counted.

    If the schedule has phases, the windows are those of its last phase.
    """
    last_phase = phases_of(schedule)[-1].schedule
    count = Fraction(0)
    for windows, weight in zip(
        last_phase.window_counts, weights_of(last_phase), strict=True
    ):
        count += windows * weight
    return round(count)


@lru_cache(maxsize=256)
def bucket_steps_until(schedule: Schedule, steps: int) -> tuple[int, ...]:
    """Return how many of the steps 1 … ``steps`` each bucket has: those with the
    earliest due times, ties by bucket.
    """
    if schedule.phases:
        phase_counts: list[int] = []
        for phase in phases_of(schedule):
            phase_steps = phase.steps_until(steps)
            phase_counts += bucket_steps_until(phase.schedule, phase_steps)
        return tuple(phase_counts)

    half_intervals, time_per_step = _half_intervals(schedule)

    def due(bucket: int, turn: int) -> tuple[int, int]:
        # Its time, and the bucket, which decides between equal times. As integers, the
        # t-th step of bucket j is due at (2t + 1)·half_interval_j, of
        # bucket 0 at 2t·half_interval_0.
        offset = 1 if bucket > 0 else 0
        return (2 * turn + offset) * half_intervals[bucket], bucket

    # Start from the time at which about ``steps`` steps are due, and correct one step at
    # a time. With half intervals of 1 and 3, bucket 0 is due at 0, 2, 4, 6 …, bucket 1 at
    # 3, 9 …: by the time 6, bucket 0 has had 4 steps and bucket 1 one.
    now = int(steps * time_per_step)
    counts = []
    for bucket, half_interval in enumerate(half_intervals):
        # The turns t = 0, 1 … with (2t + offset)·half_interval <= now.
        offset = 1 if bucket > 0 else 0
        counts.append(max(0, (now // half_interval - offset) // 2 + 1))
    buckets = range(len(counts))
    while sum(counts) < steps:
        next_bucket = min(buckets, key=lambda bucket: due(bucket, counts[bucket]))
        counts[next_bucket] += 1
    while sum(counts) > steps:
        nonempty = [bucket for bucket in buckets if counts[bucket]]
        latest_bucket = max(
            nonempty, key=lambda bucket: due(bucket, counts[bucket] - 1)
        )
        counts[latest_bucket] -= 1
    return tuple(counts)


def bucket_of(schedule: Schedule, step: int) -> int:
    """Return the bucket of a step, counted from 1."""
    assert step >= 1, "steps count from 1"
    counts_before = bucket_steps_until(schedule, step - 1)
    counts_after = bucket_steps_until(schedule, step)
    differs = [
        before != after
        for before, after in zip(counts_before, counts_after, strict=True)
    ]
    return differs.index(True)


def sample_indices(
    schedule: Schedule, step: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return a step's bucket, and for each of its samples (index of the window, epoch
    of the bucket from 0).
    """
    bucket = bucket_of(schedule, step)
    windows = schedule.window_counts[bucket]
    batch = schedule.batch_sizes[bucket]

    first_sample = bucket_steps_until(schedule, step - 1)[bucket] * batch
    indices = []
    for sample in range(first_sample, first_sample + batch):
        epoch, position = divmod(sample, windows)
        window = int(epoch_order(schedule, bucket, epoch)[position])
        indices.append((window, epoch))
    return bucket, tuple(indices)


def times_seen(schedule: Schedule, steps: int) -> list[list[int]]:
    """Return how often each window of each bucket is sampled in ``steps`` steps,
    without going through them.
    """
    return [counts.tolist() for counts in views_by_position(schedule, steps)]


def views_by_position(schedule: Schedule, steps: int) -> list[NDArray[np.int64]]:
    """Return what ``times_seen`` does, as arrays: for each bucket the views of each of its
    positions, of which a repeated window has several.
    """
    counts = []
    for bucket, bucket_steps in enumerate(bucket_steps_until(schedule, steps)):
        windows = schedule.window_counts[bucket]
        full_epochs, remainder = divmod(
            bucket_steps * schedule.batch_sizes[bucket], windows
        )
        views = np.full(windows, full_epochs, np.int64)
        if remainder:
            views[epoch_order(schedule, bucket, full_epochs)[:remainder]] += 1
        counts.append(views)
    return counts


ORDER_BYTES = 200_000_000
"""Bytes of the orders of epochs that are kept; the latest one is kept in any case."""


class _Orders:
    """The orders of epochs that were used last. Safe from many threads."""

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[Schedule, int, int], NDArray[np.int64]] = (
            OrderedDict()
        )
        self._num_bytes = 0
        self._lock = Lock()

    def get(self, name: tuple[Schedule, int, int]) -> NDArray[np.int64]:
        """Return the order of an epoch; draw it if it is not kept."""
        with self._lock:
            if name in self._orders:
                self._orders.move_to_end(name)
                return self._orders[name]
        order = _draw_order(*name)
        with self._lock:
            if name not in self._orders:  # another thread may have drawn it
                self._orders[name] = order
                self._num_bytes += order.nbytes
            while len(self._orders) > 1 and self._num_bytes > ORDER_BYTES:
                _, oldest = self._orders.popitem(last=False)
                self._num_bytes -= oldest.nbytes
        return order


_orders = _Orders()


def epoch_order(schedule: Schedule, bucket: int, epoch: int) -> NDArray[np.int64]:
    """Return the windows of a bucket in the order of an epoch (from 0): a permutation
    drawn for (seed, bucket, epoch).
    """
    return _orders.get((schedule, bucket, epoch))


def _draw_order(schedule: Schedule, bucket: int, epoch: int) -> NDArray[np.int64]:
    windows = schedule.window_counts[bucket]
    if not schedule.shuffle:
        return np.arange(windows)
    generator = generator_for(schedule.seed, "stream", bucket, epoch)
    return generator.random(windows).argsort(kind="stable")


@lru_cache(maxsize=64)
def _half_intervals(schedule: Schedule) -> tuple[tuple[int, ...], Fraction]:
    """Return half the time between two steps of each bucket, and the time of a step.

    Times are counted in a unit that makes all of them integers. A bucket of n windows
    with b samples a step and weight q has a step every b / (q n) epochs. An epoch has
    2 · common_multiple · scale units, so half of that time is
    b / (q n) · common_multiple · scale units.
    """
    common_multiple = lcm(*schedule.window_counts)
    intervals = []
    for windows, batch, weight in zip(
        schedule.window_counts,
        schedule.batch_sizes,
        weights_of(schedule),
        strict=True,
    ):
        intervals.append(batch * (common_multiple // windows) / weight)

    scale = lcm(*(interval.denominator for interval in intervals))
    half_intervals = tuple(int(interval * scale) for interval in intervals)
    return half_intervals, 2 * common_multiple * scale / steps_per_epoch(schedule)


@dataclass(frozen=True)
class ExpertSchedule:
    """One or two experts that train in turn.

    The first has ``share`` of the turns, of ``turn_length`` steps each, spread evenly.

    Turn p (from 0) is the first one's where ⌊(p + 1)·share + ½⌋ > ⌊p·share + ½⌋
    (Bresenham's line), so after P turns it has had P·share of them to within one half.
    """

    names: tuple[str, ...]
    share: Fraction = Fraction(1)
    turn_length: int = 1

    def __post_init__(self) -> None:
        assert 1 <= len(self.names) <= 2, self.names
        assert 0 <= self.share <= 1, self.share
        assert self.turn_length >= 1, self.turn_length

    def at(self, step: int) -> str:
        """Return the expert of a step, counted from 1."""
        if len(self.names) == 1:
            return self.names[0]
        turn = (step - 1) // self.turn_length
        is_first = self._turns_of_first(turn + 1) > self._turns_of_first(turn)
        return self.names[0] if is_first else self.names[1]

    def count(self, step: int, name: str) -> int:
        """Return how many of the steps 1 … ``step`` train an expert."""
        if len(self.names) == 1:
            return step if name == self.names[0] else 0

        full_turns, remainder = divmod(step, self.turn_length)
        first_count = self._turns_of_first(full_turns) * self.turn_length
        if remainder and self.at(step) == self.names[0]:
            first_count += remainder
        return first_count if name == self.names[0] else step - first_count

    def _turns_of_first(self, turns: int) -> int:
        """Return how many of the first ``turns`` turns train the first expert."""
        return floor(turns * self.share + Fraction(1, 2))


def exact(share: float) -> Fraction:
    """Return a share as a fraction of small numbers, so that no rounding moves a run."""
    return Fraction(share).limit_denominator(10_000)
