"""Which windows a step takes: a pure function of the step, fair to buckets and windows
at every moment.
"""

from collections import Counter
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videotune.errors import VideotuneError
from videotune.latent_cache.sampler import (
    ExpertSchedule,
    Schedule,
    bucket_of,
    bucket_steps_until,
    epoch_order,
    exact,
    sample_indices,
    shown_windows,
    steps_per_epoch,
    times_seen,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    batches = draw(
        st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))
    )
    return Schedule(
        draw(st.integers(0, 9)), tuple(sizes), tuple(batches), draw(st.booleans())
    )


@given(schedules())
def test_steps_come_in_the_order_of_their_due_times(schedule: Schedule) -> None:
    """Against the definition: all due times of two epochs, sorted."""
    due = []
    for j, (n, b) in enumerate(
        zip(schedule.window_counts, schedule.batch_sizes, strict=True)
    ):
        rate = Fraction(n, b)
        due += [
            ((turn + (Fraction(1, 2) if j else 0)) / rate, j)
            for turn in range(int(2 * rate) + 2)
        ]
    wanted = [j for _, j in sorted(due)][: int(2 * steps_per_epoch(schedule))]
    assert [bucket_of(schedule, step) for step in range(1, len(wanted) + 1)] == wanted
    assert bucket_of(schedule, 1) == 0, "the dearest bucket comes first"


@given(schedules(), st.integers(0, 300))
def test_counts_are_what_was_taken(schedule: Schedule, steps: int) -> None:
    seen: list[Counter[int]] = [Counter() for _ in schedule.window_counts]
    taken = Counter[int]()
    for step in range(1, steps + 1):
        bucket, samples = sample_indices(schedule, step)
        taken[bucket] += 1
        for window, epoch in samples:
            assert epoch == seen[bucket][window], "one permutation after the other"
            seen[bucket][window] += 1
    assert bucket_steps_until(schedule, steps) == tuple(
        taken[j] for j in range(len(schedule.window_counts))
    )
    wanted = [
        [counts[window] for window in range(n)]
        for counts, n in zip(seen, schedule.window_counts, strict=True)
    ]
    assert times_seen(schedule, steps) == wanted


@given(schedules(), st.integers(1, 10**9))
def test_every_bucket_has_its_share_and_every_window_of_it(
    schedule: Schedule, steps: int
) -> None:
    epochs = steps / steps_per_epoch(schedule)
    for count, n, b in zip(
        bucket_steps_until(schedule, steps),
        schedule.window_counts,
        schedule.batch_sizes,
        strict=True,
    ):
        assert abs(count - epochs * Fraction(n, b)) <= 1 + len(schedule.window_counts)
    for counts in times_seen(schedule, steps):
        assert max(counts) - min(counts) <= 1


def test_an_epoch_of_phases_is_that_of_the_last_one() -> None:
    """Windows and steps are both of the buckets that train from now on."""
    phases = Schedule(0, (10, 12, 3), (1, 1, 1), phases=((1, 1), (8, 2)))
    alone = Schedule(0, (12, 3), (1, 1))
    assert shown_windows(phases) == shown_windows(alone) == 15
    assert steps_per_epoch(phases) == steps_per_epoch(alone) == 15


def test_small_orders_are_all_about_equally_likely() -> None:
    """24 orders of four windows in 4,800 epochs: chi squared of 23 degrees of freedom,
    below its 99.99 % point.
    """
    found = Counter(
        tuple(epoch_order(Schedule(3, (4,), (1,)), 0, epoch)) for epoch in range(4800)
    )
    assert len(found) == 24
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 56


def test_the_stream_is_pinned() -> None:
    """A resumed run depends on it: where this changes, runs of before cannot be
    resumed.
    """
    schedule = Schedule(7, (5, 3), (2, 1))
    buckets, samples = zip(
        *(sample_indices(schedule, step) for step in range(1, 7)), strict=True
    )
    assert buckets == (0, 1, 0, 1, 0, 1)
    assert samples == (
        ((4, 0), (1, 0)),
        ((2, 0),),
        ((0, 0), (3, 0)),
        ((1, 0),),
        ((2, 0), (0, 1)),
        ((0, 0),),
    )


@pytest.mark.parametrize(
    ("sizes", "batches"), [((), ()), ((3, 0), (1, 1)), ((3,), (0,))]
)
def test_empty_schedules_are_refused(
    sizes: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    with pytest.raises(VideotuneError):
        Schedule(0, sizes, batches)


@pytest.mark.parametrize("share", [0.37, 0.02, 0.985, 0.5])
@pytest.mark.parametrize("run_length", [1, 7])
def test_an_expert_has_its_share_of_the_steps(share: float, run_length: int) -> None:
    schedule = ExpertSchedule(("high", "low"), exact(share), run_length)
    steps = 1000 * run_length
    high = sum(schedule.at(step) == "high" for step in range(1, steps + 1))
    assert high == schedule.count(steps, "high")
    assert abs(high - share * steps) <= run_length / 2


@pytest.mark.parametrize(
    "share", [Fraction(37, 100), Fraction(1, 50), Fraction(0), Fraction(1)]
)
@pytest.mark.parametrize("run_length", [1, 7])
def test_runs_are_dealt_out_along_bresenhams_line(
    share: Fraction, run_length: int
) -> None:
    schedule = ExpertSchedule(("high", "low"), share, run_length)
    counts = Counter[str]()
    for step in range(1, 300):
        run = (step - 1) // run_length
        passed = floor((run + 1) * share + Fraction(1, 2)) - floor(
            run * share + Fraction(1, 2)
        )
        name = schedule.at(step)
        assert name == ("high" if passed else "low")
        counts[name] += 1
        for expert in ("high", "low"):
            assert schedule.count(step, expert) == counts[expert]


def test_a_single_expert_has_every_step() -> None:
    schedule = ExpertSchedule(("high",))
    assert {schedule.at(step) for step in range(1, 9)} == {"high"}
    assert (schedule.count(8, "high"), schedule.count(8, "low")) == (8, 0)


@pytest.mark.parametrize(
    ("names", "share", "run_length"),
    [
        ((), Fraction(1), 1),
        (("a", "b", "c"), Fraction(1), 1),
        (("a", "b"), Fraction(-1, 9), 1),
        (("a", "b"), Fraction(10, 9), 1),
        (("a", "b"), Fraction(1, 2), 0),
    ],
)
def test_an_impossible_expert_schedule_is_an_error(
    names: tuple[str, ...], share: Fraction, run_length: int
) -> None:
    with pytest.raises(AssertionError):
        ExpertSchedule(names, share, run_length)


def test_a_share_is_the_nearest_fraction_of_small_numbers() -> None:
    assert exact(0.37) == Fraction(37, 100)
    assert exact(1 / 3) == Fraction(1, 3)
    assert exact(1 / 10_001) == Fraction(1, 10_000)
