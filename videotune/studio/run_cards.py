"""How many GPUs of this computer a run takes: what a form asks for, and what the run of a
folder had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.queue.cards import cards_of
from videotune.queue.entries import QueueEntry
from videotune.reporter.read import mapping, number
from videotune.studio import gpu
from videotune.studio.gpu import Gpu
from videotune.studio.status import read_cached, read_live
from videotune.studio.web import FormData


def choices() -> range:
    """Return the numbers of GPUs that a run may take."""
    return range(1, max(1, len(gpu.list_gpus())) + 1)


def cards_from(form: FormData) -> int:
    """Return the number of GPUs that a form asks for; 1 where it has no such field.

    Raises:
        VideotuneError: if this computer has fewer.
    """
    cards = int(form.number("gpus") or 1)
    numbers = choices()
    if cards not in numbers:
        raise VideotuneError(
            f"GPUs: {cards} are not to be had; this computer has {numbers[-1]}. Choose from 1 to {numbers[-1]}"
        )
    return cards


def cards_of_run(folder: Path) -> int:
    """Return how many GPUs the last process of a run had, as far as they are here."""
    config = mapping(read_cached(folder / "config.json"))
    groups = number(config["processes"]) or 1
    group_size = number(mapping(config["settings"])["context_parallel"]) or 1
    processes = groups * group_size

    resumes = [
        record for record in read_live(folder).journal if record["kind"] == "resume"
    ]
    if resumes:
        processes = number(resumes[-1].get("processes")) or 1  # one is not written
    return min(int(processes), choices()[-1])


@dataclass(frozen=True)
class CardJobs:
    """The running entries on a GPU."""

    first: Sequence[QueueEntry]
    """Entries of which this is the only GPU, or the first one."""

    further: Sequence[QueueEntry]
    """Entries that are shown at another GPU, and take this one too."""


def jobs_by_card(
    entries: Sequence[QueueEntry], cards: Sequence[Gpu]
) -> tuple[Mapping[int, CardJobs], list[QueueEntry]]:
    """Return the running entries of each GPU, and those that have no GPU of these."""
    names_by_entry = {
        entry.name: cards_of(entry.job) if entry.job is not None else ()
        for entry in entries
    }
    by_card = {}
    shown_names: set[str] = set()
    for card in cards:
        name = str(card.index)
        entries_here = [
            entry for entry in entries if name in names_by_entry[entry.name]
        ]
        first = [entry for entry in entries_here if entry.name not in shown_names]
        further = [entry for entry in entries_here if entry.name in shown_names]
        shown_names.update(entry.name for entry in first)
        by_card[card.index] = CardJobs(first, further)
    return by_card, [entry for entry in entries if entry.name not in shown_names]
