"""Measure the seconds of steps and callbacks: for the time left, and to see whether the
steps wait for data.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT = 20
"""Latest steps, of each bucket, whose seconds are averaged."""

WAITING = 0.2
"""Share of the steps' time from which they are said to wait for data.

Below it, waiting is not what costs.
"""


class Throughput:
    """Seconds of the latest steps: by bucket for the time left, of all of them for the
    share of waiting.
    """

    def __init__(self) -> None:
        self._seconds_by_bucket: dict[int, deque[float]] = {}
        self._waited_and_total: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._has_warned = False
        self.took: dict[Any, float] = {}
        """Seconds of the latest run of each callback."""

    def add(self, bucket: int, seconds: Mapping[str, float]) -> float | None:
        """Add a step.

        A process's first step warms everything up, so the next step of its bucket replaces
        it.

        Args:
            bucket: the step's bucket.
            seconds: of the step, by phase.

        Returns:
            What to warn of: the share of the time spent waiting for data, the first time
            that it is too large. None in all other steps.
        """
        total = sum(seconds.values())
        if not self._seconds_by_bucket:
            # maxlen 1 marks the seconds of the warm-up, which the next ones replace.
            self._seconds_by_bucket[bucket] = deque([total], maxlen=1)
            return None

        latest = self._seconds_by_bucket.get(bucket)
        if latest is None or latest.maxlen == 1:
            latest = deque(maxlen=RECENT)
            self._seconds_by_bucket[bucket] = latest
        latest.append(total)
        self._waited_and_total.append((seconds.get("data", 0.0), total))

        if self._has_warned:
            return None
        share = self.waiting()
        self._has_warned = share is not None
        return share

    @property
    def by_bucket(self) -> dict[int, float]:
        """Mean seconds of the latest steps of each bucket that has had a step."""
        return {
            bucket: sum(latest) / len(latest)
            for bucket, latest in self._seconds_by_bucket.items()
        }

    @property
    def seconds_a_step(self) -> float:
        """Mean seconds of the latest steps, 0 before the first."""
        totals = [total for _, total in self._waited_and_total]
        if not totals:
            for latest in self._seconds_by_bucket.values():
                totals += latest
        return sum(totals) / len(totals) if totals else 0.0

    def waiting(self) -> float | None:
        """Return the share of the latest steps' time spent waiting for data.

        None if it is small, or there are too few steps to say.
        """
        total = sum(total for _, total in self._waited_and_total)
        if len(self._waited_and_total) < RECENT or not total:
            return None
        share = sum(waited for waited, _ in self._waited_and_total) / total
        return share if share > WAITING else None


def time_left(
    seconds: Mapping[int, float], steps_left: Mapping[int, int], tokens: Sequence[float]
) -> float | None:
    """Estimate the seconds of the remaining steps.

    A bucket without a step so far is taken to cost as much for its tokens as the
    others.

    Args:
        seconds: of a step, by bucket.
        steps_left: by bucket.
        tokens: of a step of each bucket.

    Returns:
        The seconds, or None if no step has been measured yet.
    """
    if not seconds:
        return None
    seconds_per_token = sum(seconds.values()) / sum(
        tokens[bucket] for bucket in seconds
    )
    return sum(
        count * seconds.get(bucket, seconds_per_token * tokens[bucket])
        for bucket, count in steps_left.items()
    )
