"""The seconds of the latest steps, by bucket, and when a run is told that it waits."""

import pytest

from videotune.trainer.throughput import RECENT, Throughput, time_left


def test_the_seconds_of_a_bucket_are_the_mean_of_its_latest_steps() -> None:
    """The first step of a process, which warms up, counts until its bucket has another;
    those of other buckets count beside it.
    """
    throughput = Throughput()
    assert throughput.by_bucket == {}
    assert throughput.seconds_a_step == 0.0
    assert throughput.took == {}
    throughput.add(3, {"forward": 90.0, "data": 1.0})
    assert throughput.by_bucket == {3: 91.0}
    assert throughput.seconds_a_step == 91.0
    throughput.add(5, {"forward": 2.0})
    throughput.add(5, {"forward": 4.0})
    assert throughput.by_bucket == {3: 91.0, 5: 3.0}
    assert throughput.seconds_a_step == 3.0
    throughput.add(3, {"forward": 6.0})
    assert throughput.by_bucket == {3: 6.0, 5: 3.0}
    throughput.add(3, {"forward": 10.0, "data": 2.0})
    assert throughput.by_bucket == {3: 9.0, 5: 3.0}
    assert throughput.seconds_a_step == 6.0

    for _ in range(RECENT):
        throughput.add(5, {"forward": 1.0})
    assert throughput.by_bucket == {3: 9.0, 5: 1.0}
    assert throughput.seconds_a_step == 1.0


@pytest.mark.parametrize("waited", [0.25, 0.2500001])
def test_a_run_that_waits_too_long_is_told_once(waited: float) -> None:
    """A fifth of the time is not too long; the share is that of the latest steps."""
    throughput = Throughput()
    told = [throughput.add(0, {"data": 90.0, "forward": 1.0})]
    for _ in range(RECENT - 1):
        told.append(throughput.add(0, {"data": waited, "forward": 1.0}))
    assert told == [None] * RECENT
    expected = None if waited == 0.25 else pytest.approx(waited / (1 + waited))
    assert throughput.add(0, {"data": waited, "forward": 1.0}) == expected
    assert throughput.waiting() == expected
    if expected is None:
        assert throughput.add(0, {"data": 9.0, "forward": 1.0}) is not None
    assert throughput.add(0, {"data": 9.0, "forward": 1.0}) is None
    assert throughput.waiting() is not None


def test_steps_that_read_no_data_or_take_no_time_do_not_wait() -> None:
    for seconds in ({"forward": 1.0}, {"data": 0.0}, {}):
        throughput = Throughput()
        told = [throughput.add(0, seconds) for _ in range(RECENT + 1)]
        assert told == [None] * len(told)
        assert throughput.waiting() is None


def test_the_time_left_is_that_of_each_bucket() -> None:
    """One without a step takes as long for its tokens as the others together."""
    seconds = {0: 2.0, 2: 6.0}
    tokens = [1.0, 5.0, 7.0]
    left = {0: 10, 1: 1, 2: 100}
    assert time_left(seconds, left, tokens) == 20 + 1.0 * 5 + 600
    assert time_left(seconds, {}, tokens) == 0
    assert time_left({}, left, tokens) is None
