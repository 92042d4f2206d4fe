"""The journal: one JSON object a line, only ever appended; the one thing that pages, plots and reports read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.files import read_lines, write_text


class Journal:
    """Appends lines to ``journal.jsonl``; each line is flushed, and ``sync`` makes all of them durable."""

    def __init__(self, run: Path) -> None:
        self.path = run / "journal.jsonl"
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinity are written as null, since JSON has no word for them."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=True)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(_finite(line), ensure_ascii=False)
        self._file.write(text + "\n")
        self._file.flush()

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line of another kind than a step, with the time."""
        self.write({"kind": kind, "time": round(time.time(), 3), **fields})

    def sync(self) -> None:
        """Flush to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
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
