"""What a run says of itself while it goes on: its journal read on from where the last look ended."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from videotune.files import life, read_json
from videotune.report.read import Run

MOST_OPEN = 8
"""Runs whose journals are kept in memory."""

RECENT = 50
"""Steps over which the pace is measured."""


@dataclass
class Followed:
    """A journal as far as it was read: its records, the byte to go on at, and which file that is."""

    records: list[Mapping[str, Any]] = field(default_factory=list)
    offset: int = 0
    inode: int = 0
    lock: Lock = field(default_factory=Lock)


_open: dict[Path, Followed] = {}
_files: dict[Path, tuple[tuple[int, int], Any]] = {}


def follow(run: Path) -> list[Mapping[str, Any]]:
    """The journal's records so far. Only what was added since the last look is read; a journal written anew, as a resume
    does, is read from its beginning, and a last line that is not whole waits for the next look."""
    if run not in _open and len(_open) >= MOST_OPEN:
        _open.pop(next(iter(_open)))
    known = _open.setdefault(run, Followed())
    path = run / "journal.jsonl"
    with known.lock:
        try:
            about = path.stat()
        except OSError:
            known.records, known.offset, known.inode = [], 0, 0
            return known.records
        if about.st_ino != known.inode or about.st_size < known.offset:
            known.records, known.offset, known.inode = [], 0, about.st_ino
        if about.st_size > known.offset:
            with path.open("rb") as file:
                file.seek(known.offset)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            known.offset += len(whole)
            known.records = known.records + [one for line in whole.split(b"\n") if (one := _record(line)) is not None]
        return known.records


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def remembered(path: Path) -> Any:
    """A JSON file's value, read again only where the file has changed; None where there is none, or it is torn."""
    try:
        about = path.stat()
    except OSError:
        return None
    mark = (about.st_mtime_ns, about.st_size)
    if _files.get(path, (None,))[0] != mark:
        if len(_files) > 64:
            _files.clear()
        try:
            _files[path] = mark, read_json(path)
        except (OSError, ValueError):
            return None
    return _files[path][1]


def read_live(folder: Path) -> Run:
    """The run as the report's sections take it, from what is in memory."""
    records = follow(folder)
    path = folder / "journal.jsonl"
    exports = remembered(folder / "exports.json")
    return Run(
        folder=folder,
        journal=tuple(records),
        notes=(),
        written=path.stat().st_mtime if path.is_file() else None,
        read=time.time(),
        life=life(folder),
        config=_object(remembered(folder / "config.json")),
        check=_object(remembered(folder / "check.json")),
        plan=_object(remembered(folder / "plan.json")),
        demo=None,
        exports=tuple(exports) if isinstance(exports, list) else None,
    )


def _object(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done of all, seconds left at the pace of the last steps (None: not known), the last error."""

    done: int
    total: int | None
    left: float | None
    pace: float | None
    loss: float | None


def progress(run: Run) -> Progress:
    """How far the run is and how long it will take on."""
    last: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
    for record in reversed(run.journal):
        if record["kind"] == "step":
            last.append(record)
            if len(last) == RECENT:
                break
    total = (run.config or {}).get("steps") or (run.plan or {}).get("steps")
    if not last:
        return Progress(0, total, None, None, None)
    done = int(last[0].get("step") or 0)
    spent = [sum(v for v in (one.get("seconds") or {}).values() if isinstance(v, (int, float))) for one in last]
    pace = sum(spent) / len(spent) if any(spent) else None
    left = pace * (total - done) if pace and total else None
    losses = [one["mse"] for one in last if isinstance(one.get("mse"), (int, float))]
    return Progress(done, total, left, pace, sum(losses) / len(losses) if losses else None)
