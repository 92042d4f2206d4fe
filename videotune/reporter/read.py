"""Reads a run directory as it lies: a finished run, one still going, or one that died in the middle of a line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import life
from videotune.runs.journal import readings_of
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.step_sums import Steps, regularization

Record = Mapping[str, Any]
Point = tuple[float, float]

MOST = 1e300
"""A larger number is taken for none: sums of such are not finite."""

FILES = {name: f"{name}.json" for name in ("config", "check", "plan", "demo", "exports")}
FILES["compared"] = "compare/compare.json"
"""The JSON files of a run directory by their field of ``Run``."""


@dataclass(frozen=True)
class Run:
    """What a run directory says. A file that is not there (yet) is None.

    ``journal``: its events, the records that are no step's, in order; ``steps``: what the others say together. A resume has
    cut off what came after its step. ``notes``: what could not be read or was left out, in words. ``written``: when the
    journal last grew, ``read``: when all this was read, in seconds since 1970. ``life``: the last heartbeat
    (``videotune.files.life``).
    """

    folder: Path
    journal: tuple[Record, ...]
    steps: Steps
    notes: tuple[str, ...]
    written: float | None
    read: float
    life: Record | None
    config: Record | None
    check: Record | None
    plan: Record | None
    demo: Record | None
    exports: Sequence[Record] | None
    compared: Sequence[Record] | None = None

    def of_kind(self, kind: str) -> list[Record]:
        """The journal's records of a kind, in order."""
        return [record for record in self.journal if record["kind"] == kind]

    def last(self, kind: str) -> Fields:
        """The latest record of a kind, or an empty one."""
        return mapping(
            next((record for record in reversed(self.journal) if record["kind"] == kind), None)
        )

    def setting(self, *keys: str) -> Any:
        """A resolved setting, or None where config.json does not say it."""
        return at(self.config, "settings", *keys)

    @cached_property
    def clips(self) -> list[Fields]:
        """The rows of the account of clips."""
        return [mapping(clip) for clip in items(at(self.check, "clips"))]

    @cached_property
    def validations(self) -> list[Record]:
        """The validations that compare with the latest: over the same clips, noise levels and noise."""
        return readings_of(self.journal)

    def absent(self, what: str, key: str = "") -> str:
        """Why a chapter is empty: its key switches it off, or it is not there yet."""
        off = key and number(self.setting(*key.split("."))) == 0
        return f"Switched off ({key} is 0)." if off else f"Not there yet: {what}."


def read_run(folder: Path, known: tuple[Sequence[Record], Steps] | None = None) -> Run:
    """Read a run directory. ``known``: the journal's events and steps, where they were read already.

    What is damaged, a line of the journal or a whole file, is left out and noted. Raises VideotuneError where the folder is
    not a run's.
    """
    journal = folder / "journal.jsonl"
    there = journal.is_file()
    if not there and not (folder / FILES["config"]).is_file():
        fault = f"{folder} is not a run folder: it holds neither config.json nor journal.jsonl"
        raise VideotuneError(f"{fault}; name the folder that a training run wrote")
    now = time.time()
    notes = list[str]()
    damaged = list[str]()
    found = {field: _read_json(folder / name, notes) for field, name in FILES.items()}
    events, steps = known or ((), Steps(regularization(found["check"])))
    if known is None and there:
        events, damaged = _parse(journal, steps)
    written = journal.stat().st_mtime if there else None
    return Run(
        folder,
        tuple(events),
        steps,
        (*damaged, *notes),
        written,
        now,
        life(folder, now),
        **found,
    )


def number(value: Any) -> float | None:
    """The value as a finite number, or None: a journal writes null for what was not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= MOST else None


class Fields(dict[str, Any]):
    """An object whose missing keys read as None."""

    def __missing__(self, key: str) -> None:
        return None


def mapping(value: Any) -> Fields:
    """The value if it is an object, else an empty one."""
    return Fields(value if isinstance(value, Mapping) else {})


def items(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def at(value: Any, *keys: str) -> Any:
    """What lies in nested objects under the keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def points(records: Sequence[Record], *keys: str) -> list[Point]:
    """(step, number under the keys) of the records that have both, in order of steps."""
    pairs = ((number(record.get("step")), number(at(record, *keys))) for record in records)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def _parse(journal: Path, steps: Steps) -> tuple[list[Record], list[str]]:
    """The journal's events, its steps into ``steps``, and a note for each line that is none."""
    events: list[Record] = []
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
            if record["kind"] == "step":
                steps.add(record)
            else:
                events.append(record)
    return events, notes


def _read_json(path: Path, notes: list[str]) -> Any:
    """The file's content, of which keys may be missing; None, with a note, where it is damaged, and where there is none."""
    try:
        return read_record(path, partial=True) if path.is_file() else None
    except VideotuneError as error:
        notes.append(f"left out: {error}")
        return None
