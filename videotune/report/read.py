"""Reads a run folder as it lies: a finished run, one still going, or one that died in the middle of a line."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import life
from videotune.records import load_json, parse_line

Record = Mapping[str, Any]

OF_A_STEP = ("step", "ruler", "verdict", "sample", "probe")
"""Kinds that a resume from an earlier step supersedes; saves and warnings stay, since their files and causes do."""


READ = ("kind", "step", "loss", "mse", "by_t", "grad_norm", "window_ids", "seconds", "skipped")
"""What is kept of a step's record: of a million steps the rest would take a gigabyte."""


@dataclass(frozen=True)
class Run:
    """What a run folder says. A file that is not there (yet) is None.

    ``journal`` holds the records in order, without those that a resume left behind; ``notes`` says in words what could
    not be read or was left out; ``written`` is when the journal last grew and ``read`` when all this was read, in seconds
    since 1970; ``life`` is the last heartbeat (``videotune.files.life``).
    """

    folder: Path
    journal: tuple[Record, ...]
    notes: tuple[str, ...]
    written: float | None
    read: float
    life: Record | None
    config: Record | None
    check: Record | None
    plan: Record | None
    demo: Record | None
    exports: tuple[Record, ...] | None
    compared: tuple[Record, ...] = ()


def read_run(folder: Path) -> Run:
    """Read a run folder.

    A torn or foreign line of the journal is left out and noted. Raises VideotuneError where the folder is not a run's,
    or one of its files that are written whole is not JSON.
    """
    journal_file = folder / "journal.jsonl"
    if not journal_file.is_file() and not (folder / "config.json").is_file():
        raise VideotuneError(
            f"{folder} is not a run folder: it holds neither config.json nor journal.jsonl; "
            "name the folder that a training run wrote"
        )
    now = time.time()
    records, torn = _parse(journal_file) if journal_file.is_file() else ([], [])
    journal, left = _without_left_branches(records)
    exports = _read_json(folder / "exports.json", list)
    compared = _read_json(folder / "compare" / "compare.json", list) or []
    return Run(
        folder=folder,
        journal=journal,
        notes=(*torn, *left),
        written=journal_file.stat().st_mtime if journal_file.is_file() else None,
        read=now,
        life=life(folder, now),
        config=_read_json(folder / "config.json", dict),
        check=_read_json(folder / "check.json", dict),
        plan=_read_json(folder / "plan.json", dict),
        demo=_read_json(folder / "demo.json", dict),
        exports=None if exports is None else tuple(entry for entry in exports if isinstance(entry, Mapping)),
        compared=tuple(entry for entry in compared if isinstance(entry, Mapping)),
    )


def of_kind(run: Run, kind: str) -> list[Record]:
    """The journal's records of a kind, in order."""
    return [record for record in run.journal if record["kind"] == kind]


def last_of_kind(run: Run, kind: str) -> Record:
    """The latest record of a kind, or an empty one."""
    return next((record for record in reversed(run.journal) if record["kind"] == kind), {})


def number(value: Any) -> float | None:
    """The value as a finite number, or None: a journal writes null for what was not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def mapping(value: Any) -> Record:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def setting(run: Run, key: str) -> Any:
    """A resolved setting of the run, or None where config.json does not say it."""
    return mapping(mapping(run.config).get("settings")).get(key)


def clip_of(window: str) -> str:
    """The beginning of a window's id is its clip's."""
    return window.partition("@")[0]


def regularization_clips(run: Run) -> dict[str, Record]:
    """The account's rows of regularization clips that are used, by the beginning of the clip's id, as windows name it.

    Empty where the account gives no kinds: then all clips count as training clips.
    """
    rows = (mapping(clip) for clip in items(mapping(run.check).get("clips")))
    return {
        str(row["id"])[:12]: row
        for row in rows
        if row.get("used") and row.get("kind") == "regularization" and row.get("id")
    }


def _parse(journal: Path) -> tuple[list[Record], list[str]]:
    """The journal's records, and a note for each line that is none."""
    records: list[Record] = []
    notes: list[str] = []
    with journal.open("rb") as file:
        for place, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parse_line(line)
            except ValueError as error:
                note = f"line {place} of the journal is not a record and was left out: {error}"
                torn = f"the journal's last line ({place}) is torn and was left out: the run ended while writing it"
                notes.append(note if line.endswith(b"\n") else torn)
                continue
            records.append(record if record["kind"] != "step" else {key: record[key] for key in READ if key in record})
    return records, notes


def _without_left_branches(records: list[Record]) -> tuple[tuple[Record, ...], list[str]]:
    """Take out what happened after the step from which a later resume went on."""
    kept: list[Record] = []
    notes = []
    for record in records:
        start = number(record.get("from_step")) if record["kind"] == "resume" else None
        if start is not None:
            before = [old for old in kept if old["kind"] != "end"]
            kept = [old for old in before if old["kind"] not in OF_A_STEP or (number(old.get("step")) or 0) <= start]
            num = sum(old["kind"] == "step" for old in before) - sum(old["kind"] == "step" for old in kept)
            if num:
                steps = "1 step" if num == 1 else f"{num} steps"
                notes.append(f"{steps} after step {start:g} left behind when the run went on from there")
        kept.append(record)
    return tuple(kept), notes


def _read_json(path: Path, kind: type) -> Any:
    """The file's content, or None where there is no such file."""
    if not path.is_file():
        return None
    value = load_json(path, "write it anew, or remove it to report without")
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise VideotuneError(f"{path} should hold {wanted}; write it anew, or remove it to report without")
    return value
