"""The journal: one JSON object a line, only ever appended.

Pages, plots and reports read nothing else of the steps.

The process of a run reads it once, as ``History``, and from then on adds what it writes
itself.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import (
    append_whole,
    is_disk_full,
    read_lines,
    write_bytes,
    write_whole,
)
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.step_sums import Steps, regularization
from videotune.text import as_argument

NAME = "journal.jsonl"


class History:
    """What a run's journal says, in little memory: some 90 bytes a step, and every
    other line.
    """

    def __init__(self, run: Path | None) -> None:
        """Read the whole journal; without a run it is empty.

        A line that a kill has torn at the end is left out. Raises VideotuneError that
        names the first damaged line.
        """
        self._path = run / NAME if run else None
        self._regularization = _regularization(run)
        self._load()

    def _load(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        """The lines that are not steps, in order.

        Of a ``views`` line only the step is kept.
        """
        self.largest_step = 0
        """The largest step that any line names, such as a warning's."""
        self.last_step = 0
        """The last step that has a line of its own."""
        self.steps = Steps(self._regularization)
        self._size = 0
        self._is_torn = False
        for _, line in self._read():
            self.add(line)

    def _read(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield each line, as it is in the file and parsed."""
        if self._path is None or not self._path.is_file():
            return

        size = 0
        with self._path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                self._is_torn = not content.endswith(b"\n")
                try:
                    line = parse_line(content)
                except ValueError as error:
                    if self._is_torn:
                        break
                    raise VideotuneError(
                        f"{self._path}: line {number} is damaged: {error}. Restore a copy of the file, or remove the "
                        f"line: videotune doctor {as_argument(self._path.parent)} --repair-journal"
                    ) from error
                yield content, line
                size += len(content)
        self._size = size

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the next line."""
        step = line.get("step", 0)
        self.largest_step = max(self.largest_step, step)

        if line["kind"] == "step":
            self.last_step = step
            self.steps.add(line)
        elif line["kind"] == "views":
            self.events.append({"kind": "views", "step": step})
        else:
            self.events.append(line)

    def is_current(self) -> bool:
        """Return whether no other process has written to the file since it was read."""
        size = 0
        if self._path is not None and self._path.is_file():
            size = self._path.stat().st_size
        return size == self._size or self._is_torn

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind, in order."""
        return [line for line in self.events if line["kind"] == kind]

    @property
    def skipped_at_the_end(self) -> int:
        """How many of the last steps were not applied, without those that only looked
        for float16's loss scale.
        """
        step = self.last_step
        count = 0
        while step in self.steps.skipped:
            count += step not in self.steps.scale_searches
            step -= 1
        return count

    def read_steps(self, until: int) -> Iterator[Mapping[str, Any]]:
        """Read the lines of the steps until ``until`` from the file again."""
        for _, line in self._read():
            if line["kind"] == "step" and line["step"] <= until:
                yield line

    def cut(self, step: int) -> None:
        """Remove what happened after ``step`` from the file, so that a resumed run has
        each step once.

        A line that names no step stays. Call it before this process writes lines of its
        own.
        """
        has_ended = any(line["kind"] == "end" for line in self.events)
        has_later_lines = self.largest_step > step or has_ended or self._is_torn
        if self._path is not None and has_later_lines:
            write_whole(
                self._path, lambda temporary: self._write_until(temporary, step)
            )
            self._load()

    def _write_until(self, path: Path, step: int) -> None:
        with path.open("wb") as file:
            for content, line in self._read():
                if line.get("step", 0) <= step and line["kind"] != "end":
                    file.write(_with_newline(content))


def _with_newline(content: bytes) -> bytes:
    return content if content.endswith(b"\n") else content + b"\n"


def readings_of(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the journal's validations of the latest validation set, in order; only
    those compare.
    """
    validations = [line for line in lines if line["kind"] == "validation"]
    if not validations:
        return []
    latest_set = validations[-1].get("validation")
    return [line for line in validations if line.get("validation") == latest_set]


def shown_verdict(line: Mapping[str, Any]) -> str:
    """Return the word for the verdict of a journal's line.

    A line that an older videotune wrote has only the verdict.
    """
    if line["verdict"] is None:
        return "no verdict"
    return str(line.get("shown") or line["verdict"])


def sound_of(readings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the readings of the sound, in the form of those of the video; empty unless
    both are learnt.
    """
    readings_of_sound: list[Mapping[str, Any]] = []
    for reading in readings:
        sound = reading.get("sound")
        if sound:
            live = (reading.get("live") or {}).get("sound")
            readings_of_sound.append({**reading, **sound, "live": live})
    return readings_of_sound


def with_mean_of_modalities(
    readings: Iterable[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return readings with the mean of video and sound as the value of the held-out
    clips, where both are learnt.
    """
    means: list[Mapping[str, Any]] = []
    for reading in readings:
        video = reading.get("held_out")
        sound = (reading.get("sound") or {}).get("held_out")
        if not video or not sound:
            means.append(reading)
            continue
        values = (video["normalised"], sound["normalised"])
        mean = None if None in values else sum(values) / 2
        means.append({**reading, "held_out": {**video, "normalised": mean}})
    return means


def _open_to_append(path: Path) -> FileIO:
    """Open a journal, unless it would be written through a link.

    Raises:
        VideotuneError: if it is a link, which a run folder from elsewhere may have.
    """
    if path.is_symlink():
        raise VideotuneError(
            f"{path} is a link to {os.path.realpath(path)}, and the run would write there. "
            "Put the file itself in its place"
        )
    return path.open("ab", buffering=0)


class Journal:
    """Append lines to ``journal.jsonl``.

    Each is flushed, and ``sync`` makes all of them durable.

    While the disk is full, lines wait in memory and are written, in order, with the
    first write that succeeds. What a failed write left of a line is cut off again, so
    the file always ends with a whole line.
    """

    def __init__(self, run: Path | None, history: History | None = None) -> None:
        """Open the journal.

        Args:
            run: the run folder. None: nothing is written, and the history stays empty.
                Of several processes only the main one keeps the journal; what all must
                know is broadcast, or counted by each (``Trainer.last_step``).
            history: what was read of it already.
        """
        if run is None or history is None or not history.is_current():
            history = History(run)
        self.history = history
        """What the journal says, with what was written here."""
        self.followers: list[Callable[[Mapping[str, Any]], None]] = []
        """Called with each line."""
        self._file = _open_to_append(run / NAME) if run else None
        self._waiting: list[bytes] = []
        self._lock = Lock()  # the thread that writes a checkpoint syncs the journal

    @property
    def waiting(self) -> int:
        """How many lines the disk has not taken yet."""
        return len(self._waiting)

    def cut(self, step: int) -> None:
        """Remove what happened after ``step``; see ``History.cut``."""
        if self._file is not None:
            self.history.cut(step)
            self._file.close()
            self._file = _open_to_append(Path(self._file.name))

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line.

        NaN and infinity are written as null, because JSON has no word for them.
        """
        if self._file is None:
            return

        text = json.dumps(line, ensure_ascii=False, allow_nan=True)
        if "NaN" in text or "Infinity" in text:
            line = _finite(line)
            text = json.dumps(line, ensure_ascii=False)
        self._waiting.append(f"{text}\n".encode())
        # An event may hold tuples and numbers as names: it is kept as a reader gets it.
        self.history.add(line if line["kind"] == "step" else json.loads(text))

        try:
            self.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
        # Last, so that nothing that followers do with a line can lose it.
        for follower in self.followers:
            follower(line)

    def flush(self) -> None:
        """Write the lines that wait.

        Raises OSError if the disk does not take them; they stay.
        """
        with self._lock:
            while self._file is not None and self._waiting:
                append_whole(self._file, self._waiting[0])
                self._waiting.pop(0)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line that is not a step, with the time."""
        self.write({"kind": kind, "time": round(time.time(), 3), **fields})

    def warn(self, step: int, text: str) -> None:
        """Write a warning into the journal and print it."""
        self.event("warning", step=step, text=text)
        echo(f"warning: {text}")

    def sync(self) -> None:
        """Write everything to the disk. Raises OSError if it cannot be written."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _regularization(run: Path | None) -> frozenset[str]:
    """Return the regularization clips of a run; none if check.json cannot be read, which
    others report.
    """
    if run is None:
        return frozenset()
    try:
        return frozenset(regularization(read_record(run / "check.json", partial=True)))
    except (OSError, VideotuneError):
        return frozenset()


def read_journal(run: Path) -> list[dict[str, Any]]:
    """Return all lines that are JSON objects, for scripts and tests: they take some 3
    kB of memory each.
    """
    return read_lines(run / NAME)


def repair(run: Path, step: int) -> str:
    """Remove the damaged lines from a run's journal, keep the old file beside it, and
    say what was done.

    Args:
        run: the run folder.
        step: of the newest checkpoint. The journal then reaches it, with a warning that
            says what is missing.
    """
    path = run / NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    intact = []
    newest = 0
    for content in lines:
        try:
            newest = max(newest, parse_line(content).get("step", 0))
        except ValueError:
            continue
        intact.append(_with_newline(content))

    damaged = len(lines) - len(intact)
    if not damaged and newest >= step:
        return f"{path}: every line is intact"

    text = f"the journal was repaired: {damaged} damaged lines were removed"
    if newest < step:
        text += f", and its lines on the steps after {newest} are missing"
    if lines:
        copies = len(list(run.glob(f"{NAME}.damaged-*")))
        write_bytes(path.with_name(f"{NAME}.damaged-{copies + 1}"), b"".join(lines))
    warning = {
        "kind": "warning",
        "time": round(time.time(), 3),
        "step": max(step, newest),
        "text": text,
    }
    write_bytes(path, b"".join([*intact, json.dumps(warning).encode() + b"\n"]))
    return f"{path}: {text}"


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
