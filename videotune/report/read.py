"""Reads a run folder as it lies: a finished run, one still going, or one that died in the middle of a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import life
from videotune.records import parse_line, read_record
from videotune.train.logging.step_sums import Steps, regularization

Record = Mapping[str, Any]

MOST = 1e300
"""A larger number is taken for none: sums of such are not finite."""

OF_A_STEP = ("step", "ruler", "verdict", "sample", "probe")
"""Kinds that a resume from an earlier step supersedes; saves and warnings stay, since their files and causes do."""


@dataclass(frozen=True)
class Run:
    """What a run folder says. A file that is not there (yet) is None.

    ``journal`` holds its events, the records that are no step's, in order, and ``steps`` what the others say together, both
    without those that a resume left behind; ``notes`` says in words what could
    not be read or was left out; ``written`` is when the journal last grew and ``read`` when all this was read, in seconds
    since 1970; ``life`` is the last heartbeat (``videotune.files.life``).
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
    exports: tuple[Record, ...] | None
    compared: tuple[Record, ...] = ()


def read_run(folder: Path, known: tuple[Sequence[Record], Steps] | None = None) -> Run:
    """Read a run folder. ``known``: the journal's events and steps, where they were read already.

    What is damaged, a line of the journal or a whole file, is left out and noted. Raises VideotuneError where the folder is
    not a run's.
    """
    journal_file = folder / "journal.jsonl"
    if not journal_file.is_file() and not (folder / "config.json").is_file():
        raise VideotuneError(
            f"{folder} is not a run folder: it holds neither config.json nor journal.jsonl; "
            "name the folder that a training run wrote"
        )
    now, notes = time.time(), list[str]()
    names = ("config", "check", "plan", "demo", "exports", "compare/compare")
    config, check, plan, demo, exports, compared = (_read_json(folder / f"{name}.json", notes) for name in names)
    events, steps = known or ((), Steps(regularization(check)))
    if known is None and journal_file.is_file():
        events, damaged = _parse(journal_file, steps)
        notes = [*damaged, *notes]
    return Run(
        folder=folder,
        journal=tuple(events),
        steps=steps,
        written=journal_file.stat().st_mtime if journal_file.is_file() else None,
        read=now,
        life=life(folder, now),
        config=config,
        check=check,
        plan=plan,
        demo=demo,
        exports=None if exports is None else tuple(exports),
        compared=tuple(compared or ()),
        notes=tuple(notes),
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
    return value if abs(value) <= MOST else None


def mapping(value: Any) -> Record:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def setting(run: Run, key: str) -> Any:
    """A resolved setting of the run, or None where config.json does not say it."""
    return mapping(mapping(run.config).get("settings")).get(key)


def regularization_clips(run: Run) -> dict[str, Record]:
    """The account's rows of regularization clips that are used, by the beginning of the clip's id, as windows name it."""
    return regularization(run.check)


def _parse(journal: Path, steps: Steps) -> tuple[list[Record], list[str]]:
    """The journal's events, its steps into ``steps``, and a note for each line that is none.

    What happened after the step from which a later resume went on is left out.
    """
    events: list[Record] = []
    notes: list[str] = []
    resumes = _resumes(journal)
    least = [min((start for _, start in resumes[i:]), default=None) for i in range(len(resumes) + 1)]
    left = Counter[int]()
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
            kind, step = record["kind"], record.get("step", 0)
            later = sum(at <= place for at, _ in resumes) if resumes else 0
            start = least[later]
            if start is not None and (kind == "end" or (kind in OF_A_STEP and step > start)):
                if kind == "step":
                    left[next(start for _, start in resumes[later:] if step > start)] += 1
            elif kind == "step":
                steps.add(record)
            else:
                events.append(record)
    for start, num in sorted(left.items()):
        count = "1 step" if num == 1 else f"{num} steps"
        notes.append(f"{count} after step {start} left behind when the run went on from there")
    return events, notes


def _resumes(journal: Path) -> list[tuple[int, int]]:
    """The line of each resume, and the step from which it went on."""
    found = []
    with journal.open("rb") as file:
        for place, line in enumerate(file, start=1):
            if b'"resume"' in line:
                try:
                    record = parse_line(line)
                except ValueError:
                    continue
                if record["kind"] == "resume":
                    found.append((place, record["from_step"]))
    return found


def _read_json(path: Path, notes: list[str]) -> Any:
    """The file's content, of which keys may be missing; None, with a note, where it is damaged, and where there is none."""
    try:
        return read_record(path, partial=True) if path.is_file() else None
    except VideotuneError as error:
        notes.append(f"left out: {error}")
        return None
