"""The progress bar of the trainings that a queue runs, read from their heartbeats."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from videotune.commands.status import describe_activity
from videotune.console import Bar, bar
from videotune.files import read_json
from videotune.queue.entries import QueueEntry
from videotune.reporter.read import mapping, number
from videotune.runs.run_life import life

ACTIVE_STATES = ("running", "paused")
"""States of an entry that has a process."""


class QueueProgress:
    """A bar for the trainings that run at the moment; a new one when others begin."""

    def __init__(self) -> None:
        self._open_bars = ExitStack()
        self._names: tuple[str, ...] = ()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def update(self, entries: Sequence[QueueEntry]) -> None:
        """Show how far the running trainings are.

        Args:
            entries: all entries of the queue.
        """
        running = [entry for entry in entries if entry.state in ACTIVE_STATES]
        names = tuple(entry.name for entry in running)
        if names != self._names:
            self._close()
            self._names = names
        if not running:
            return

        done = 0
        total = 0
        seconds_left = []
        activities = []
        for entry in running:
            steps = _steps_of(entry.run)
            beat = mapping(life(entry.run))
            step = int(number(beat["step"]) or 0)
            done += step
            total += steps
            seconds_left.append(_seconds_left(beat, step, steps))
            activities.append(describe_activity(entry.run))

        if not total:
            return  # no run has a config yet
        if self._bar is None:
            self._bar = self._open_bars.enter_context(bar(_title(names)))
        waits = [seconds for seconds in seconds_left if seconds is not None]
        longest = max(waits) if len(waits) == len(running) else None
        self._bar.update(done, total, [*filter(None, activities)], longest)

    def _close(self) -> None:
        self._open_bars.close()
        self._names = ()
        self._bar = None


def _title(names: Sequence[str]) -> str:
    """Return the title of the bar of these trainings."""
    if len(names) == 1:
        return f"{names[0]}: steps"
    return f"{len(names)} trainings: steps"


def _steps_of(run: Path) -> int:
    """Return the steps of a run; 0 before its config is there, or if it is damaged."""
    config = run / "config.json"
    if not config.is_file():
        return 0
    try:
        return int(number(mapping(read_json(config))["steps"]) or 0)
    except (OSError, ValueError):
        return 0


def _seconds_left(beat: Any, step: int, steps: int) -> float | None:
    """Return the time left by the seconds of the steps so far; None before a step."""
    training = number(mapping(beat["seconds"])["training"])
    if training is None or not step:
        return None
    return training / step * (steps - step)
