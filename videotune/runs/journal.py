"""The journal: one JSON object a line, only ever appended; the one thing that pages, plots and reports read.

The process of a run reads it once, as ``History``, and from then on knows what it writes itself.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import append_whole, is_disk_full, read_lines, write_bytes, write_whole
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.step_sums import Steps, regularization

NAME = "journal.jsonl"


class History:
    """What a run's journal says, in little memory: some 90 bytes a step, and every other line.

    ``events``: the lines that are no step's, in order; of a ``views`` line the step alone. ``steps``: what the others say.
    ``newest``: the largest step that a line names; ``last``: that of the last
    step's line.
    """

    def __init__(self, run: Path | None) -> None:
        """Read the whole journal; without one it is empty.

        Raises VideotuneError that names the first damaged line. One that a kill has torn at the end is left out.
        """
        self._path = run / NAME if run else None
        self._aside = _regularization(run)
        self._load()

    def _load(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.newest = self.last = 0
        self.steps = Steps(self._aside)
        self._size = 0
        self._torn = False
        for _, line in self._read():
            self.add(line)

    def _read(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Each line, as it is in the file and parsed."""
        if self._path is None or not self._path.is_file():
            return
        with self._path.open("rb") as file:
            size = 0
            for number, content in enumerate(file, 1):
                self._torn = not content.endswith(b"\n")
                try:
                    line = parse_line(content)
                except ValueError as error:
                    if self._torn:
                        break
                    repair = f"videotune doctor {self._path.parent} --repair-journal"
                    remedy = f"Put back a copy of the file, or take the line out: {repair}"
                    raise VideotuneError(
                        f"{self._path}: line {number} is damaged: {error}. {remedy}"
                    ) from error
                yield content, line
                size += len(content)
        self._size = size

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in the next line."""
        step = line.get("step", 0)
        if step > self.newest:
            self.newest = step
        if line["kind"] == "step":
            self.last = step
            self.steps.add(line)
        else:
            self.events.append(
                {"kind": "views", "step": step} if line["kind"] == "views" else line
            )

    def is_current(self) -> bool:
        """Whether nobody else has written to the file since it was read."""
        there = self._path is not None and self._path.is_file()
        return (
            self._path.stat().st_size if there and self._path else 0
        ) == self._size or self._torn

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The events of a kind, in order."""
        return [line for line in self.events if line["kind"] == kind]

    @property
    def skipped_at_the_end(self) -> int:
        """How many of the last steps were not applied."""
        step = self.last
        while step in self.steps.skipped:
            step -= 1
        return self.last - step

    def read_steps(self, until: int) -> Iterator[Mapping[str, Any]]:
        """The lines of the steps up to one, read from the file once more."""
        return (
            line for _, line in self._read() if line["kind"] == "step" and line["step"] <= until
        )

    def cut(self, step: int) -> None:
        """Take out of the file what happened after ``step``, so that a resumed run has each step once.

        A line that names no step stays. Only before this process writes lines of its own.
        """
        ended = any(line["kind"] == "end" for line in self.events)
        if self._path is not None and (self.newest > step or ended or self._torn):
            write_whole(self._path, lambda aside: self._write_kept(aside, step))
            self._load()

    def _write_kept(self, aside: Path, step: int) -> None:
        with aside.open("wb") as file:
            for content, line in self._read():
                if line.get("step", 0) <= step and line["kind"] != "end":
                    file.write(content if content.endswith(b"\n") else content + b"\n")


def readings_of(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The journal's validations of the latest set, in order; only those compare."""
    found = [line for line in lines if line["kind"] == "validation"]
    return [line for line in found if line.get("validation") == found[-1].get("validation")]


class Journal:
    """Appends lines to ``journal.jsonl``; each is flushed, and ``sync`` makes all of them durable.

    Where the disk takes no more, lines wait in memory, in order, and go out with the first write that succeeds; ``waiting``
    says how many. What a failed write left of a line is cut off again, so the file always ends with a whole one.
    ``history``: what it says, with what was written here. ``followers`` are handed each line too.
    """

    def __init__(self, run: Path | None, history: History | None = None) -> None:
        """Without a run nothing is written: of several processes the first alone keeps the journal.

        ``history``: what was read of it already.
        """
        self.history = (
            history if run and history is not None and history.is_current() else History(run)
        )
        self._file = (run / NAME).open("ab", buffering=0) if run else None
        self._waiting: list[bytes] = []
        self._one_at_a_time = Lock()  # the thread that writes a checkpoint syncs the journal
        self.followers: list[Callable[[Mapping[str, Any]], None]] = []

    @property
    def waiting(self) -> int:
        """Lines that the disk has not taken yet."""
        return len(self._waiting)

    def cut(self, step: int) -> None:
        """``History.cut``; what is written next follows what is left."""
        if self._file is not None:
            self.history.cut(step)
            self._file.close()
            self._file = Path(self._file.name).open("ab", buffering=0)  # noqa: SIM115  (closed by close)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinity are written as null, since JSON has no word for them."""
        if self._file is None:
            return
        text = json.dumps(line, ensure_ascii=False, allow_nan=True)
        if "NaN" in text or "Infinity" in text:
            line = _finite(line)
            text = json.dumps(line, ensure_ascii=False)
        self._waiting.append(f"{text}\n".encode())
        self.history.add(line if line["kind"] == "step" else json.loads(text))
        try:
            self.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
        for follower in self.followers:  # after it: what they do with a line must not cost it
            follower(line)

    def flush(self) -> None:
        """Write what waits.

        Raises OSError where the disk takes no more; nothing is lost then.
        """
        with self._one_at_a_time:
            while self._file is not None and self._waiting:
                append_whole(self._file, self._waiting[0])
                self._waiting.pop(0)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line of another kind than a step, with the time."""
        self.write({"kind": kind, "time": round(time.time(), 3), **fields})

    def warn(self, step: int, text: str) -> None:
        """What is wrong and does not end the run, in the journal and on the screen."""
        self.event("warning", step=step, text=text)
        echo(f"warning: {text}")

    def sync(self) -> None:
        """Everything is on the disk when this returns; OSError where it cannot be."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _regularization(run: Path | None) -> frozenset[str]:
    """The regularization clips of a run; none where check.json does not say them, which others refuse."""
    try:
        return frozenset(
            regularization(read_record(run / "check.json", partial=True)) if run else ()
        )
    except (OSError, VideotuneError):
        return frozenset()


def read_journal(run: Path) -> list[dict[str, Any]]:
    """All lines that are JSON objects, for scripts and tests: they cost some 3 kB of memory each."""
    return read_lines(run / NAME)


def repair(run: Path, step: int) -> str:
    """Take the damaged lines out of a run's journal; the whole file is kept beside it. What was done, in words.

    ``step``: the newest checkpoint's, up to which the journal then reaches, with a warning that says what is missing.
    """
    path = run / NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    good = []
    damaged = []
    newest = 0
    for number, content in enumerate(lines, 1):
        try:
            newest = max(newest, parse_line(content).get("step", 0))
            good.append(content if content.endswith(b"\n") else content + b"\n")
        except ValueError:
            damaged.append(number)
    if not damaged and newest >= step:
        return f"{path}: every line is whole"
    text = f"the journal was repaired: {len(damaged)} damaged lines were taken out"
    if newest < step:
        text += f", and what it said of the steps after {newest} is missing"
    if lines:
        copies = len(list(run.glob(f"{NAME}.damaged-*")))
        write_bytes(path.with_name(f"{NAME}.damaged-{copies + 1}"), b"".join(lines))
    warning = {
        "kind": "warning",
        "time": round(time.time(), 3),
        "step": max(step, newest),
        "text": text,
    }
    write_bytes(path, b"".join([*good, json.dumps(warning).encode() + b"\n"]))
    return f"{path}: {text}"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
