from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import factorial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from videotune.cache.schedule import (
    ROUNDS,
    Schedule,
    _stride,
    _sum_of_quotients,
    bucket_of,
    permute,
    picks,
    turns,
    views,
    visit,
    window_at,
)
from videotune.errors import VideotuneError

SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    batch=st.integers(1, 9),
    shuffle=st.booleans(),
)
LONE = Schedule(seed=0, sizes=(1,), batch=1)
SMALL_BUCKET = Schedule(seed=0, sizes=(3, 50, 1), batch=8)


def counted(schedule: Schedule, steps: int) -> list[list[int]]:
    """Views by brute force."""
    counts = [[0] * size for size in schedule.sizes]
    for step in range(1, steps + 1):
        bucket, windows = picks(schedule, step)
        for window in windows:
            counts[bucket][window] += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(SCHEDULES, st.integers(1, 3))
@example(LONE, 3)
@example(SMALL_BUCKET, 2)
def test_every_n_steps_draw_each_window_batch_times(schedule: Schedule, rounds: int) -> None:
    steps = rounds * sum(schedule.sizes)
    expected = [[rounds * schedule.batch] * size for size in schedule.sizes]
    assert counted(schedule, steps) == expected
    assert views(schedule, steps) == expected


@settings(max_examples=60, deadline=None)
@given(SCHEDULES, st.integers(0, 150))
@example(LONE, 0)
@example(SMALL_BUCKET, 41)
def test_views_are_what_was_drawn(schedule: Schedule, steps: int) -> None:
    assert views(schedule, steps) == counted(schedule, steps)


@settings(max_examples=60, deadline=None)
@given(SCHEDULES)
@example(SMALL_BUCKET)
def test_within_a_bucket_views_never_differ_by_more_than_one(schedule: Schedule) -> None:
    counts = [[0] * size for size in schedule.sizes]
    for step in range(1, 2 * sum(schedule.sizes) + 1):
        bucket, windows = picks(schedule, step)
        assert len(windows) == schedule.batch
        assert bucket == bucket_of(schedule, step)
        seen_before = visit(schedule, step)
        for window, before in zip(windows, seen_before, strict=True):
            assert counts[bucket][window] == before  # `visit` numbers this view of this window
            counts[bucket][window] += 1
            assert max(counts[bucket]) - min(counts[bucket]) <= 1


@settings(max_examples=60, deadline=None)
@given(SCHEDULES)
def test_turns_count_the_steps_and_the_dearest_bucket_is_first(schedule: Schedule) -> None:
    assert bucket_of(schedule, 1) == 0
    met: Counter[int] = Counter()
    total = sum(schedule.sizes)
    for steps in range(1, total + 20):
        met[bucket_of(schedule, steps)] += 1
        for bucket, size in enumerate(schedule.sizes):
            assert turns(schedule, bucket, steps) == met[bucket]
            assert abs(met[bucket] - steps * size / total) <= 10
    assert [turns(schedule, b, total) for b in range(len(schedule.sizes))] == list(schedule.sizes)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 200_000), min_size=2, max_size=8).map(tuple), st.integers(0, 2 * 10**6))
def test_large_buckets_stay_within_ten_turns_of_their_share(sizes: tuple[int, ...], steps: int) -> None:
    schedule = Schedule(seed=0, sizes=sizes, batch=1)
    for bucket, size in enumerate(sizes):
        assert abs(turns(schedule, bucket, steps) - steps * size / sum(sizes)) <= 10


@pytest.mark.parametrize("total", [15_696, 14_994, 14_664])
def test_totals_for_which_the_nearest_stride_is_bad(total: int) -> None:
    # The coprime nearest to N/φ lets a bucket stray by some 70 turns here.
    schedule = Schedule(seed=0, sizes=(total // 2, total - total // 2), batch=1)
    worst = max(abs(turns(schedule, 0, steps) - steps * schedule.sizes[0] / total) for steps in range(0, total, 7))
    assert worst <= 7
    assert _sum_of_quotients(_stride(total), total) <= 25


def test_no_total_has_a_bad_stride() -> None:
    # A prefix strays from any interval's share by less than some quarter of this sum.
    totals = [*range(1, 3000), *range(10**6, 10**6 + 200), 30030, 510510, 9699690]
    assert max(_sum_of_quotients(_stride(total), total) for total in totals) <= 40


def test_unshuffled_steps_follow_the_list() -> None:
    schedule = Schedule(seed=5, sizes=(100,), batch=1, shuffle=False)
    for k in range(1, 451):
        bucket, (window,) = picks(schedule, k)
        assert (bucket, window + 1) == (0, ((k - 1) % 100) + 1)


def test_unshuffled_batches_follow_the_list() -> None:
    schedule = Schedule(seed=5, sizes=(10,), batch=4, shuffle=False)
    drawn = [window for step in range(1, 6) for window in picks(schedule, step)[1]]
    assert drawn == [*range(10), *range(10)]


@pytest.mark.parametrize(("clips", "expected"), [(100, 100), (500, 20), (1000, 10)])
def test_worked_example(clips: int, expected: int) -> None:
    schedule = Schedule(seed=1, sizes=(clips,), batch=1)
    assert views(schedule, 10_000) == [[expected] * clips]


def test_a_batch_of_four_from_a_hundred() -> None:
    schedule = Schedule(seed=1, sizes=(100,), batch=4)
    assert all(len(picks(schedule, step)[1]) == 4 for step in range(1, 30))
    assert views(schedule, 25) == [[1] * 100]


def test_picks_depend_on_nothing_but_the_schedule_and_the_step() -> None:
    schedule = Schedule(seed=3, sizes=(17, 40, 5), batch=3)
    forwards = {step: picks(schedule, step) for step in range(1, 100)}
    backwards = {step: picks(replace(schedule), step) for step in reversed(range(1, 100))}
    assert forwards == backwards


def test_the_stream_is_pinned() -> None:
    # Changing these numbers changes what a resumed run trains on.
    schedule = Schedule(seed=0, sizes=(5, 12, 3), batch=2)
    assert [picks(schedule, step) for step in (1, 2, 3, 20, 21, 1000)] == PINNED


PINNED = [(0, (1, 2)), (1, (0, 10)), (0, (4, 3)), (1, (9, 7)), (0, (4, 2)), (1, (10, 4))]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(num: int, word: int) -> None:
    keys = tuple((word * (2 * i + 1)) % 2**64 for i in range(ROUNDS))
    assert sorted(permute(place, num, keys) for place in range(num)) == list(range(num))


def order(schedule: Schedule, bucket: int, lap: int) -> tuple[int, ...]:
    return tuple(window_at(schedule, bucket, lap, place) for place in range(schedule.sizes[bucket]))


def test_seeds_buckets_and_passes_have_orders_of_their_own() -> None:
    one, two = (Schedule(seed=seed, sizes=(60, 60), batch=1) for seed in (0, 1))
    orders = [order(one, 0, 0), order(one, 0, 1), order(one, 1, 0), order(two, 0, 0)]
    assert len(set(orders)) == 4
    assert order(replace(one, shuffle=False), 0, 1) == tuple(range(60))


@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_small_permutations_are_all_about_equally_likely(num: int) -> None:
    trials = 4000
    schedule = Schedule(seed=0, sizes=(num,), batch=1)
    met = Counter(order(schedule, 0, lap) for lap in range(trials))
    assert len(met) == factorial(num)
    expected = trials / factorial(num)
    chi2 = sum((count - expected) ** 2 / expected for count in met.values())
    degrees = factorial(num) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_places_and_windows_are_independent() -> None:
    # Over many passes every window meets every place, and neighbours in a pass are no neighbours in the list.
    num, laps = 20, 2000
    schedule = Schedule(seed=9, sizes=(num,), batch=1)
    orders = [order(schedule, 0, lap) for lap in range(laps)]
    for table in (
        Counter((place, window) for o in orders for place, window in enumerate(o)),
        Counter((b - a) % num for o in orders for a, b in pairwise(o)),
    ):
        level = sum(table.values()) / len(table)
        chi2 = sum((count - level) ** 2 / level for count in table.values())
        assert chi2 < len(table) + 5 * (2 * len(table)) ** 0.5


def test_a_million_windows_need_no_list() -> None:
    schedule = Schedule(seed=0, sizes=(300_000, 600_000, 100_001), batch=4)
    far = 10**12
    bucket, windows = picks(schedule, far)
    assert all(0 <= window < schedule.sizes[bucket] for window in windows)
    assert len(set(windows)) == 4
    assert sum(turns(schedule, b, far) for b in range(3)) == far


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"sizes": ()}, "nothing to train on"), ({"sizes": (3, 0)}, "at least one"), ({"batch": 0}, "batch_size must be")],
)
def test_empty_schedules_are_refused(wrong: dict, says: str) -> None:
    with pytest.raises(VideotuneError, match=says):
        Schedule(**{"seed": 0, "sizes": (3,), "batch": 1, **wrong})


def test_steps_count_from_one() -> None:
    with pytest.raises(AssertionError, match="count from 1"):
        picks(LONE, 0)
