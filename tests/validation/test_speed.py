"""The time left knows the buckets that are to come; waiting for data is said where it is too much."""

import pytest

from videotune.latent_cache.sampler import Schedule, bucket_of, turns
from videotune.trainer.logging.speed import RECENT, Throughput, share_of_waiting, time_left


def test_the_time_left_knows_the_buckets_that_are_to_come() -> None:
    """A dear bucket of 9 s a step and a cheap one of 1 s: after any step the rest is exactly what is still to come."""
    schedule, cost, throughput = Schedule(0, (3, 7), (1, 1)), {0: 9.0, 1: 1.0}, Throughput()
    for step in range(1, 41):
        bucket = bucket_of(schedule, step)
        throughput.add(bucket, {"data": 0.0, "forward": cost[bucket]})
        left = {b: turns(schedule, 40)[b] - turns(schedule, step)[b] for b in (0, 1)}
        truth = sum(cost[bucket_of(schedule, later)] for later in range(step + 1, 41))
        found = time_left(throughput.by_bucket, left, [9.0, 1.0])
        assert found == pytest.approx(truth), step
    plain = 40 * sum(cost.values()) / 2  # what a mean over the buckets would say of the whole run
    assert abs(plain - sum(cost[bucket_of(schedule, step)] for step in range(1, 41))) > 50


def test_a_bucket_without_a_step_is_as_dear_for_its_size_as_the_others() -> None:
    assert time_left({1: 2.0}, {0: 3, 1: 5}, [40.0, 10.0]) == pytest.approx(3 * 8.0 + 5 * 2.0)
    assert time_left({}, {0: 3}, [40.0]) is None


def test_the_first_step_of_a_process_counts_until_there_is_another() -> None:
    throughput = Throughput()
    throughput.add(0, {"forward": 30.0})
    assert throughput.by_bucket == {0: 30.0}
    throughput.add(0, {"forward": 1.0})
    assert throughput.by_bucket == {0: 1.0}


def test_waiting_for_data_is_said_where_it_is_more_than_a_tenth() -> None:
    assert share_of_waiting([(0.2, 1.0)] * RECENT) == pytest.approx(0.2)
    assert share_of_waiting([(0.05, 1.0)] * RECENT) is None
    assert share_of_waiting([(0.9, 1.0)] * (RECENT - 1)) is None, "too few steps to say"
    throughput = Throughput()
    for _ in range(RECENT + 1):
        throughput.add(0, {"data": 3.0, "forward": 1.0})
    assert throughput.waiting() == pytest.approx(0.75)
    for _ in range(RECENT):
        throughput.add(0, {"data": 0.0, "forward": 1.0})
    assert throughput.waiting() is None, "it is about the latest steps"
