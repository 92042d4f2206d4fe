"""The worker of a queue: starts waiting entries as GPUs become free."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from videotune.errors import DONE, FAILED, INTERRUPTED, VideotuneError
from videotune.queue import jobs
from videotune.queue.cards import ANY_CARD, Cards, assign_cards
from videotune.queue.entries import (
    POLL_SECONDS,
    EntryState,
    QueueEntry,
    change_records,
    entries,
    start,
)
from videotune.queue.jobs import QueuedJob

WORKER_LOCK = ".lock"

ProgressFn = Callable[[Sequence[QueueEntry]], Any]
"""Shows how far the entries of a queue are."""


class StateReporter:
    """Reports an entry whenever its state has changed, and how far all of them are."""

    def __init__(
        self,
        report: Callable[[QueueEntry], Any],
        show_progress: ProgressFn = lambda entries: None,
    ) -> None:
        self._report = report
        self._show_progress = show_progress
        self._last_states: dict[str, EntryState] = {}

    def update(self, entry: QueueEntry) -> None:
        """Report the entry if its state is another than the last time."""
        if self._last_states.get(entry.name) != entry.state:
            self._last_states[entry.name] = entry.state
            self._report(entry)

    def update_all(self, all_entries: Sequence[QueueEntry]) -> None:
        """Report the entries whose state has changed, and the progress of all."""
        for entry in all_entries:
            self.update(entry)
        self._show_progress(all_entries)


def run_queue(
    queue: Path,
    cards: Cards = ANY_CARD,
    watch: bool = False,
    report: Callable[[QueueEntry], Any] = print,
    show_progress: ProgressFn = lambda entries: None,
) -> int:
    """Run the waiting entries, each on as many GPUs as it asks for, until none waits.

    Entries that stopped before this worker started are resumed. Ctrl-C asks the
    trainings to save and end, and waits for that. If the worker is killed they
    continue, and the next worker waits for them.

    Args:
        queue: folder of the queue.
        cards: numbers of the GPUs; None for one without a choice.
        watch: whether to wait for further entries at the end.
        report: gets each entry whose state has changed.
        show_progress: gets all entries, twice a second.

    Returns:
        The exit code.

    Raises:
        VideotuneError: if there is no such queue, or another worker runs on it.
    """
    if not queue.is_dir():
        raise VideotuneError(
            f"{queue} is not a queue: `videotune queue add` creates one"
        )
    reporter = StateReporter(report, show_progress)

    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(queue / WORKER_LOCK).acquire(timeout=0))
        except Timeout as error:
            raise VideotuneError(
                f"another `videotune queue run` is working on {queue}"
            ) from error

        # This worker may have more GPUs than the last one.
        refused = [entry.name for entry in entries(queue) if entry.refused]
        if refused:
            change_records(queue, {name: {"refused": ""} for name in refused})
        # By their folders and not by their times, which a step of the clock may move.
        ended_before = {
            entry.job.folder
            for entry in entries(queue)
            if entry.job is not None and entry.state == "stopped"
        }
        try:
            while _start_ready(queue, cards, ended_before, reporter) or watch:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            return _stop_all(queue, reporter)

    has_failures = any(entry.state == "failed" for entry in entries(queue))
    return FAILED if has_failures else DONE


def _start_ready(
    queue: Path,
    cards: Cards,
    ended_before: Collection[Path],
    reporter: StateReporter,
) -> bool:
    """Start the entries for which a GPU is free; return whether any runs or waits.

    Args:
        queue: folder of the queue.
        cards: numbers of the GPUs.
        ended_before: jobs that were stopped before this worker began.
        reporter: gets the present state of all entries.
    """
    all_entries = entries(queue)
    reporter.update_all(all_entries)

    running = [entry for entry in all_entries if entry.state in ("running", "paused")]
    ready = [
        entry
        for entry in all_entries
        if entry.state == "waiting" or _was_interrupted(entry, ended_before)
    ]

    assignment = assign_cards(cards, running, ready)
    changes: dict[str, dict[str, Any]] = {}
    for name, sentence in assignment.refused.items():
        changes[name] = {"refused": sentence}
    for name, count in assignment.overtaken.items():
        changes[name] = {"overtaken": count}
    if changes:
        change_records(queue, changes)

    for entry, names in assignment.starts:
        start(queue, entry, names)
    return bool(running or ready)


def _was_interrupted(entry: QueueEntry, ended_before: Collection[Path]) -> bool:
    """Return whether an entry stopped before the worker began, and not by the user."""
    if entry.state != "stopped" or entry.is_held or entry.job is None:
        return False
    return entry.job.folder in ended_before


def _stop_all(queue: Path, reporter: StateReporter) -> int:
    """Ask all trainings to save and end, wait until they have, and report that.

    Each is asked once: a second signal would end it before it has saved.
    """
    asked: set[Path] = set()
    running_jobs = _running_jobs(queue)
    while running_jobs:
        for job in running_jobs:
            if job.folder not in asked and jobs.stop(job):
                asked.add(job.folder)
        time.sleep(POLL_SECONDS)
        running_jobs = _running_jobs(queue)
    reporter.update_all(entries(queue))
    return INTERRUPTED


def _running_jobs(queue: Path) -> list[QueuedJob]:
    return [
        entry.job
        for entry in entries(queue)
        if entry.job is not None and entry.job.is_running
    ]
