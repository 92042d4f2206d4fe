"""Which notes on a dataset a person has been shown, so that a training repeats none of
the last day.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from videotune.files import digest, read_typed, write_json

FILE = "shown-notes.json"
"""In the cache folder: the time at which each note was shown, by its digest."""

DAY = 24 * 3600.0
"""Seconds after which a note is shown again."""

MAX_NOTES = 1000
"""Notes that are remembered, at most; the newest ones."""


def remember(cache: Path, notes: Sequence[str]) -> None:
    """Remember that notes were shown. Without a cache folder they are shown again."""
    if not notes or not cache.is_dir():
        return
    now = time.time()
    times = _times(cache) | {digest(note): now for note in notes}
    newest = sorted(times.items(), key=lambda entry: entry[1])[-MAX_NOTES:]
    with suppress(OSError):  # a disk that is full or read-only: they are shown again
        write_json(cache / FILE, dict(newest))


def unseen(cache: Path, notes: Sequence[str]) -> list[str]:
    """Return the notes that were not shown within the last day."""
    times = _times(cache)
    now = time.time()
    new = []
    for note in notes:
        age = now - times.get(digest(note), 0.0)
        if not 0 <= age < DAY:
            new.append(note)
    return new


def _times(cache: Path) -> dict[str, float]:
    """Return when each note was shown; nothing if the file is missing or damaged."""
    try:
        times: dict[str, float] = read_typed(cache / FILE, dict[str, float])
        return times
    except (OSError, ValueError):
        return {}
