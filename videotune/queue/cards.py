"""Which GPUs the waiting entries of a queue get.

Entries start in the order of the queue. An entry that needs more GPUs than are free lets
later ones go first, but only as often as it needs GPUs. After that, GPUs that become free
are kept for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from videotune.queue.entries import GPU_VARIABLE, QueueEntry
from videotune.queue.jobs import QueuedJob

Cards = Sequence[str | None]
"""Numbers of the GPUs of a worker; [None]: one place, without a choice of GPUs."""

ANY_CARD: Cards = (None,)


def count_cards() -> int:
    """Return the accelerators that a training of this machine sees; 0 without any."""
    import torch

    return torch.accelerator.device_count()


def cards_of(job: QueuedJob) -> tuple[str, ...]:
    """Return the numbers of the GPUs that were given to a job; empty without a choice."""
    names = job.env.get(GPU_VARIABLE, "").split(",")
    return tuple(name for name in names if name)


@dataclass
class Assignment:
    """Which entries start now, and why others do not."""

    starts: list[tuple[QueueEntry, tuple[str, ...]]] = field(default_factory=list)
    """Each with the numbers of its GPUs; empty for one without a choice."""

    overtaken: dict[str, int] = field(default_factory=dict)
    """How often each entry that still waits for several GPUs was overtaken, as far as
    that has changed.
    """

    refused: dict[str, str] = field(default_factory=dict)
    """Entries that ask for more GPUs than there are, each with a sentence."""


def assign_cards(
    cards: Cards,
    running: Sequence[QueueEntry],
    ready: Sequence[QueueEntry],
    count: Callable[[], int] = count_cards,
) -> Assignment:
    """Give free GPUs to the entries that are ready.

    Args:
        cards: the GPUs of the worker.
        running: entries with a process, running or paused.
        ready: entries that may start, in the order of the queue.
        count: returns the accelerators of this machine.
    """
    assignment = Assignment()
    free = free_cards(cards, running)
    paused = [entry for entry in running if entry.state == "paused"]
    reachable = len(cards) - sum(map(slots_of, paused))
    waiting: list[QueueEntry] = []

    for entry in ready:
        refusal = _refusal(cards, entry, count)
        if refusal:
            assignment.refused[entry.name] = refusal
            continue
        if any(
            _keeps_cards(cards, earlier, assignment, reachable) for earlier in waiting
        ):
            break

        slots = slots_needed(cards, entry)
        if slots > len(free):
            waiting.append(entry)
            continue
        names = tuple(card for card in free[:slots] if card is not None)
        assignment.starts.append((entry, names))
        free = free[slots:]
        for earlier in waiting:
            before = assignment.overtaken.get(earlier.name, earlier.overtaken)
            assignment.overtaken[earlier.name] = before + 1
    return assignment


def free_cards(cards: Cards, running: Sequence[QueueEntry]) -> list[str | None]:
    """Return the GPUs that no job has."""
    busy: set[str] = set()
    for entry in running:
        if entry.job is not None:
            busy.update(cards_of(entry.job))
    free = [card for card in cards if card not in busy]
    # A job on a GPU that is not in the list takes one too.
    return free[: max(0, len(cards) - sum(map(slots_of, running)))]


def slots_of(entry: QueueEntry) -> int:
    """Return how many GPUs the job of an entry takes."""
    if entry.job is None:
        return 1
    return max(1, len(cards_of(entry.job)), entry.job.processes)


def slots_needed(cards: Cards, entry: QueueEntry) -> int:
    """Return how many of a worker's GPUs an entry takes.

    The one place without a choice stands for the whole machine.
    """
    return 1 if tuple(cards) == ANY_CARD else entry.cards


def _keeps_cards(
    cards: Cards, entry: QueueEntry, assignment: Assignment, reachable: int
) -> bool:
    """Return whether free GPUs are kept for an entry that waits for several.

    Not while paused trainings have so many that it could not start in any case.
    """
    slots = slots_needed(cards, entry)
    overtaken = assignment.overtaken.get(entry.name, entry.overtaken)
    return overtaken >= slots and slots <= reachable


def _refusal(cards: Cards, entry: QueueEntry, count: Callable[[], int]) -> str:
    """Return why an entry can never start with these GPUs; empty if it can."""
    if entry.cards == 1:
        return ""
    has_choice = tuple(cards) != ANY_CARD
    available = len(cards) if has_choice else count()
    if entry.cards <= available:
        return ""
    owner = "the queue's worker" if has_choice else "this machine"
    return (
        f"it asks for {entry.cards} GPUs, and {owner} has {available}. "
        "Run the queue with more, or add it again with fewer"
    )
