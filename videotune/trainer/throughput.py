"""Speed: how long the rest takes, by the seconds of each bucket's steps and of what is done between steps; and whether the
steps wait for data."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT = 20
"""So many of the latest steps, of each bucket, say how fast it is."""

WAITING = 0.2
"""Share of the steps' time above which they are said to wait for data; below it, it is not what costs."""


class Throughput:
    """The seconds of the latest steps: of each bucket for the time left, of all of them for what is waited for.

    ``took``: seconds of the latest run of each callback.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._phases: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._warned = False
        self.took: dict[Any, float] = {}

    def add(self, bucket: int, seconds: Mapping[str, float]) -> float | None:
        """A step of a bucket took so many seconds, by phase; the share of waiting, the first time that it is too much.

        A process's first step warms everything up and counts alone.
        """
        whole = sum(seconds.values())
        if not self._steps:
            self._steps[bucket] = deque([whole], maxlen=1)
            return None
        kept = self._steps.get(bucket)
        if kept is None or kept.maxlen == 1:
            kept = self._steps[bucket] = deque(maxlen=RECENT)
        kept.append(whole)
        self._phases.append((seconds.get("data", 0.0), whole))
        if self._warned or (share := self.waiting()) is None:
            return None
        self._warned = True
        return share

    @property
    def by_bucket(self) -> dict[int, float]:
        """The mean seconds of the latest steps of each bucket that was met."""
        return {bucket: sum(kept) / len(kept) for bucket, kept in self._steps.items()}

    @property
    def seconds_a_step(self) -> float:
        """The mean of the latest steps; 0 before the first."""
        kept = [whole for _, whole in self._phases] or [
            whole for each in self._steps.values() for whole in each
        ]
        return sum(kept) / len(kept) if kept else 0.0

    def waiting(self) -> float | None:
        """The share of the latest steps' time that went into waiting for data.

        None where it is small, or where the steps are too few to say.
        """
        whole = sum(each for _, each in self._phases)
        if len(self._phases) < RECENT or not whole:
            return None
        share = sum(waited for waited, _ in self._phases) / whole
        return share if share > WAITING else None


def time_left(
    seconds: Mapping[int, float], left: Mapping[int, int], sizes: Sequence[float]
) -> float | None:
    """Seconds that the rest of the steps takes: of each bucket its steps times its seconds. None: nothing is known yet.

    A bucket without a step so far is taken to be as dear, for its size, as the others; ``sizes``: tokens of a step.
    """
    if not seconds:
        return None
    rate = sum(seconds.values()) / sum(sizes[bucket] for bucket in seconds)
    return sum(
        count * seconds.get(bucket, rate * sizes[bucket]) for bucket, count in left.items()
    )
