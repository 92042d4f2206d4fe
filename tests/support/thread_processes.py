"""Processes of a run as threads of one process, for what they tell each other on the
host. Sums of gradients need real processes (``launcher``).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

from videotune.distributed import DistributedContext

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a thread that waits for the others gives up."""


@dataclass
class Meeting:
    """Where the threads leave their values for each other."""

    size: int
    values: list[Any] = field(init=False)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        self.barrier = Barrier(self.size, timeout=PATIENCE)


@dataclass(frozen=True)
class ThreadProcess(DistributedContext):
    """One of the processes."""

    meeting: Meeting | None = None

    def all_gather(self, value: T) -> list[T]:
        assert self.meeting is not None
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def any_process(self, *flags: bool) -> tuple[bool, ...]:
        of_each = self.all_gather(flags)
        return tuple(any(flag) for flag in zip(*of_each, strict=True))


def in_threads(size: int, work: Callable[[DistributedContext], T]) -> list[T]:
    """Do work in each of several processes, and return their results by rank."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadProcess(rank, size, meeting=meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
