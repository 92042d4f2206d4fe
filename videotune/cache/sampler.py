"""The stream: which windows a step takes, a pure function of (seed, step), endless, one bucket a step.

A step takes b_j samples where its bucket is j. With L the least common multiple of all b_j, bucket j of n_j windows owns an
interval of n_j·L/b_j out of [0, N), N their sum: step k + 1 looks at x = k·a mod N, and the interval in which x lies names
the bucket. After every N steps each x came once, so each window was drawn exactly L times. How many turns a bucket had
before a step is a floor sum, so nothing is kept, counted up or listed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import gcd, isqrt, lcm

from videotune.errors import VideotuneError
from videotune.rng import key

ROUNDS = 12
"""Feistel rounds: 4 pass for random on large buckets (Luby & Rackoff 1988), but five windows need 10 and six 12 before
all their orders come equally often (chi squared); a round costs 0.3 µs."""

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Schedule:
    """The seed; for each bucket its windows (a window shown r times counts r times) and the samples of its steps.

    Bucket 0 is the dearest: the first step takes it. ``shuffle`` False keeps each bucket's own order. Raises
    VideotuneError where there is nothing to draw from.
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
        assert len(self.batches) == len(self.sizes), f"{len(self.batches)} batches for {len(self.sizes)} buckets"
        if min(self.batches) < 1:
            raise VideotuneError(
                f"The samples of a step are {list(self.batches)}, bucket by bucket; batch_size must be at least 1."
            )


def steps_a_pass(schedule: Schedule) -> Fraction:
    """How many steps show every window once on average: Σ n_j / b_j; after ``round_of`` steps it is exact."""
    return sum((Fraction(n, b) for n, b in zip(schedule.sizes, schedule.batches, strict=True)), Fraction(0))


def round_of(schedule: Schedule) -> tuple[int, int]:
    """(N, L): after every N steps each window has been drawn exactly L times."""
    return _ends(schedule)[-1], lcm(*schedule.batches)


def bucket_of(schedule: Schedule, step: int) -> int:
    """The bucket of a step; steps count from 1."""
    assert step >= 1, "steps count from 1"
    ends = _ends(schedule)
    return bisect_right(ends, (step - 1) * _stride(ends[-1]) % ends[-1])


def turns(schedule: Schedule, bucket: int, steps: int) -> int:
    """How many of the steps 1 … ``steps`` are the bucket's."""
    ends = _ends(schedule)
    total, hi = ends[-1], ends[bucket]
    lo = ends[bucket - 1] if bucket else 0
    a = _stride(total)
    # x mod N lies in [lo, hi) exactly when floor((x - lo)/N) - floor((x - hi)/N) is 1 and not 0.
    return _floor_sum(steps, total, a, -lo) - _floor_sum(steps, total, a, -hi)


def picks(schedule: Schedule, step: int) -> tuple[int, tuple[int, ...]]:
    """(bucket, the windows of that bucket for each of the step's samples, in order)."""
    bucket, first = _first_sample(schedule, step)
    num = schedule.sizes[bucket]
    samples = range(first, first + schedule.batches[bucket])
    return bucket, tuple(window_at(schedule, bucket, s // num, s % num) for s in samples)


def visit(schedule: Schedule, step: int) -> tuple[int, ...]:
    """For each of the step's samples, how often its window was drawn before: the pass over the bucket, from 0."""
    bucket, first = _first_sample(schedule, step)
    num, batch = schedule.sizes[bucket], schedule.batches[bucket]
    return tuple(s // num for s in range(first, first + batch))


def views(schedule: Schedule, steps: int) -> list[list[int]]:
    """How often each window of each bucket has been drawn after ``steps`` steps, without going through them."""
    counts = []
    for bucket, (num, batch) in enumerate(zip(schedule.sizes, schedule.batches, strict=True)):
        full, rest = divmod(turns(schedule, bucket, steps) * batch, num)
        drawn = [full] * num
        for place in range(rest):
            drawn[window_at(schedule, bucket, full, place)] += 1
        counts.append(drawn)
    return counts


def window_at(schedule: Schedule, bucket: int, epoch: int, place: int) -> int:
    """The window at a place of a bucket's pass (``epoch``, from 0); each pass has a permutation of its own."""
    num = schedule.sizes[bucket]
    if not schedule.shuffle or num == 1:
        return place
    return permute(place, num, _round_keys(schedule.seed, bucket, epoch))


def permute(place: int, num: int, keys: tuple[int, ...]) -> int:
    """A keyed permutation of 0 … num - 1, computed for one place.

    A Feistel network on pairs (left, right) of Z_rows × Z_columns, a grid hardly larger than num, is walked along its
    cycle until the place is back among the num. Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains",
    methods 2 and 3.
    """
    rows = isqrt(num - 1) + 1
    columns = -(-num // rows)
    while True:
        left, right = divmod(place, columns)
        for i in range(0, len(keys), 2):
            left = (left + _mix(right ^ keys[i])) % rows
            right = (right + _mix(left ^ keys[i + 1])) % columns
        place = left * columns + right
        if place < num:
            return place


def _first_sample(schedule: Schedule, step: int) -> tuple[int, int]:
    """The step's bucket, and the number of its first sample among all that the bucket has given."""
    bucket = bucket_of(schedule, step)
    return bucket, turns(schedule, bucket, step - 1) * schedule.batches[bucket]


@lru_cache(maxsize=64)
def _ends(schedule: Schedule) -> tuple[int, ...]:
    """Where each bucket's interval of [0, N) ends. The first step's x is 0, which is bucket 0's."""
    whole = lcm(*schedule.batches)
    return tuple(accumulate(n * (whole // b) for n, b in zip(schedule.sizes, schedule.batches, strict=True)))


@lru_cache(maxsize=64)
def _stride(total: int) -> int:
    """a, coprime to N and near N/φ, whose multiples spread most evenly: the one with the smallest sum of partial quotients.

    Being near the golden ratio is not enough: the nearest coprime a can end in a huge partial quotient, and a bucket then
    strays from its fair share (by 73 turns at N = 15,696; with this choice by 6 around N = 20,000, 8 around a million).
    Partial quotients bound the discrepancy: Kuipers & Niederreiter 1974, chapter 2, section 3.
    """
    centre = (
        isqrt(5 * total * total) - total + 1
    ) // 2  # N/φ to the nearest, exactly: a float is too short above 10^15
    near = range(max(1, centre - 100), min(max(total - 1, 1), centre + 100) + 1)
    coprime = (a for a in near if gcd(a, total) == 1)
    return min(coprime, key=lambda a: (_sum_of_quotients(a, total), abs(a - centre), a))


def _sum_of_quotients(a: int, total: int) -> int:
    """The sum of the partial quotients of a/total's continued fraction."""
    found = 0
    while a:
        found += total // a
        total, a = a, total % a
    return found


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Σ floor((a·i + b)/m) for i = 0 … n - 1, in O(log m) by Euclid's algorithm; b may be negative."""
    total = 0
    while n > 0:
        quotient, a = divmod(a, m)
        total += quotient * (n * (n - 1) // 2)
        quotient, b = divmod(b, m)
        total += quotient * n
        n, b = divmod(a * n + b, m)
        m, a = a, m
    return total


@lru_cache(maxsize=1024)
def _round_keys(seed: int, bucket: int, epoch: int) -> tuple[int, ...]:
    """The words of one pass's permutation, from one key as SplitMix64 would draw them."""
    high, low = divmod(key(seed, "stream", bucket, epoch), 1 << 64)
    return tuple(_mix(low + i * 0x9E3779B97F4A7C15 & _WORD) ^ high for i in range(ROUNDS))


def _mix(x: int) -> int:
    """64 well mixed bits of a 64-bit number. Source: Steele, Lea & Flood 2014, SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)
