"""The journal: one JSON object a line, only ever appended; the one thing that pages, plots and reports read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from videotune.files import append_whole, out_of_room, read_lines, write_text


class Journal:
    """Appends lines to ``journal.jsonl``; each is flushed, and ``sync`` makes all of them durable.

    Where the disk takes no more, lines wait in memory, in order, and go out with the first write that succeeds; ``waiting``
    says how many. What a failed write left of a line is cut off again, so the file always ends with a whole one.
    ``followers`` are handed each line too.
    """

    def __init__(self, run: Path | None) -> None:
        """Without a run nothing is written: of several processes the first alone keeps the journal."""
        self._file = (run / "journal.jsonl").open("ab", buffering=0) if run else None
        self._waiting: list[bytes] = []
        self.followers: list[Callable[[Mapping[str, Any]], None]] = []

    @property
    def waiting(self) -> int:
        """Lines that the disk has not taken yet."""
        return len(self._waiting)

    def reopen(self) -> None:
        """Go on at the end of the file that now has the journal's name, after it was written anew."""
        if self._file is not None:
            self._file.close()
            self._file = Path(self._file.name).open("ab", buffering=0)  # noqa: SIM115  (closed by close)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinity are written as null, since JSON has no word for them."""
        if self._file is None:
            return
        text = json.dumps(line, ensure_ascii=False, allow_nan=True)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(_finite(line), ensure_ascii=False)
        self._waiting.append(f"{text}\n".encode())
        try:
            self.flush()
        except OSError as error:
            if not out_of_room(error):
                raise
        for follower in self.followers:  # after it: what they do with a line must not cost it
            follower(line)

    def flush(self) -> None:
        """Write what waits.

        Raises OSError where the disk takes no more; nothing is lost then.
        """
        while self._file is not None and self._waiting:
            append_whole(self._file, self._waiting[0])
            self._waiting.pop(0)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line of another kind than a step, with the time."""
        self.write({"kind": kind, "time": round(time.time(), 3), **fields})

    def sync(self) -> None:
        """Everything is on the disk when this returns; OSError where it cannot be."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_journal(run: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line torn by a kill is left out."""
    return read_lines(run / "journal.jsonl")


def cut_journal(run: Path, step: int) -> int:
    """Take out what happened after ``step``, so that a resumed run has each step once; returns how many lines went."""
    lines = read_journal(run)
    kept = [line for line in lines if line.get("step", 0) <= step and line["kind"] != "end"]
    write_text(run / "journal.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
    return len(lines) - len(kept)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
