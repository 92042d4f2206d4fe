"""Read a run folder in whatever state it is.

The run may be finished, in progress, or killed in the middle of a journal line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError, did_you_mean
from videotune.files import near_paths
from videotune.runs.journal import readings_of, sound_of, with_mean_of_modalities
from videotune.runs.run_life import life
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.start_state import StartState, start_state
from videotune.runs.step_sums import StepErrors, Steps, regularization
from videotune.validation.verdict_words import ErrorReference, step_of_change

Record = Mapping[str, Any]
Point = tuple[float, float]

MAX_NUMBER = 1e300
"""A larger number counts as missing: a sum of such numbers is not finite."""

SWITCHED_OFF = "Switched off"
"""The beginning of why a chapter is empty, if a setting is 0."""

FINISHED_STATES = ("done", "early")
"""States of a run that has ended as it should."""

FILES = {
    name: f"{name}.json" for name in ("config", "check", "plan", "demo", "exports")
}
FILES["compared"] = "compare/compare.json"
"""The JSON files of a run folder by their field of ``Run``."""


@dataclass(frozen=True)
class LearntPart:
    """The losses of what a run learns, or of one part of it."""

    name: str
    """"video" or "sound"; empty if the run learns only one of them."""

    errors: StepErrors
    validations: Sequence[Record]
    """The validations of the same set as the latest."""


@dataclass(frozen=True)
class Run:
    """The contents of a run folder. A file that does not exist (yet) is None."""

    folder: Path

    journal: tuple[Record, ...]
    """All records but steps, in order. A resume removes those after its step."""

    steps: Steps
    """Sums over the step records."""

    notes: tuple[str, ...]
    """Messages on what could not be read."""

    written: float | None
    """When the journal was last written, in seconds since 1970."""

    read: float
    """When the folder was read, in seconds since 1970."""

    life: Record | None
    """The last heartbeat, see ``videotune.runs.run_life.life``."""

    config: Record | None
    check: Record | None
    """The account of clips."""

    plan: Record | None
    demo: Record | None
    exports: Sequence[Record] | None
    compared: Sequence[Record] | None = None

    def of_kind(self, kind: str) -> list[Record]:
        """Return the journal's records of a kind, in order."""
        return [record for record in self.journal if record["kind"] == kind]

    def last(self, kind: str) -> Fields:
        """Return the latest record of a kind, or an empty one."""
        for record in reversed(self.journal):
            if record["kind"] == kind:
                return mapping(record)
        return mapping(None)

    def setting(self, *keys: str) -> Any:
        """Return a resolved setting, or None if config.json does not have it."""
        return at(self.config, "settings", *keys)

    @property
    def is_toy(self) -> bool:
        """Whether it trained the toy, which no other program has."""
        return str(self.setting("base_model_name")).startswith("asset:")

    @cached_property
    def has_finished(self) -> bool:
        """Whether it has ended as it should, so that nothing more comes by itself."""
        is_alive = bool(mapping(self.life)["alive"])
        return self.last("end")["why"] in FINISHED_STATES and not is_alive

    @cached_property
    def start(self) -> StartState:
        """What the run began with."""
        return start_state(self.setting("init_from"), self.setting("training_method"))

    @cached_property
    def error_reference(self) -> ErrorReference:
        """What the errors of the validations are shares of."""
        return ErrorReference(self.start, step_of_change(self.validations))

    @cached_property
    def clips(self) -> list[Fields]:
        """The rows of the account of clips."""
        return [mapping(clip) for clip in items(at(self.check, "clips"))]

    @cached_property
    def validations(self) -> list[Record]:
        """The validations of the same set as the latest."""
        return readings_of(self.journal)

    @cached_property
    def parts(self) -> list[LearntPart]:
        """What the run learns, each with its losses: video and sound, or one part."""
        sound_errors = self.steps.sound_errors
        sound_validations = sound_of(self.validations)
        has_sound = bool(sound_errors.mse[0] or sound_validations)
        whole_name = "video" if has_sound else ""
        parts = [LearntPart(whole_name, self.steps.errors, self.validations)]
        if has_sound:
            parts.append(LearntPart("sound", sound_errors, sound_validations))
        return parts

    @cached_property
    def held_out_losses(self) -> list[Point]:
        """Steps and errors on held-out clips, relative to the first validation; of video
        and sound the mean.
        """
        return points(
            with_mean_of_modalities(self.validations), "held_out", "normalised"
        )

    def absent(self, event: str, key: str = "") -> str:
        """Return why a chapter is empty.

        Args:
            event: what fills the chapter.
            key: the setting that switches the chapter off with 0.
        """
        if key and number(self.setting(*key.split("."))) == 0:
            return f"{SWITCHED_OFF} ({key} is 0)."
        if self.has_finished:
            return f"Not in this run: {event}."
        return f"Not there yet: {event}."


def refuse_no_run(folder: Path) -> None:
    """Raise VideotuneError if a folder is not a run folder."""
    names = ("journal.jsonl", FILES["config"])
    if not folder.exists():
        near = did_you_mean(
            near_paths(folder), ". Choose a folder that a training run wrote."
        )
        raise VideotuneError(f"{folder} is not a run folder: it does not exist{near}")
    if not any((folder / name).is_file() for name in names):
        raise VideotuneError(
            f"{folder} is not a run folder: it holds neither config.json nor "
            "journal.jsonl. Choose the folder that a training run wrote."
        )


def read_run(
    folder: Path, journal_contents: tuple[Sequence[Record], Steps] | None = None
) -> Run:
    """Read a run folder. A damaged line or file is left out and noted.

    Args:
        folder: the run folder.
        journal_contents: the journal's events and steps, if they were read already.

    Raises:
        VideotuneError: if the folder is not a run folder.
    """
    refuse_no_run(folder)
    journal = folder / "journal.jsonl"
    has_journal = journal.is_file()
    now = time.time()
    notes: list[str] = []
    damaged_lines: list[str] = []
    records = {field: _read_json(folder / name, notes) for field, name in FILES.items()}
    events: Sequence[Record] = ()
    if journal_contents is not None:
        events, steps = journal_contents
    else:
        steps = Steps(regularization(records["check"]))
        if has_journal:
            events, damaged_lines = _read_journal(journal, steps)
    return Run(
        folder=folder,
        journal=tuple(events),
        steps=steps,
        notes=(*damaged_lines, *notes),
        written=journal.stat().st_mtime if has_journal else None,
        read=now,
        life=life(folder, now),
        **records,
    )


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None.

    A journal has null for numbers that were not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= MAX_NUMBER else None


class Fields(dict[str, Any]):
    """An object whose missing keys read as None."""

    def __missing__(self, key: str) -> None:
        return None


def mapping(value: Any) -> Fields:
    """Return the value if it is an object, else an empty one."""
    return Fields(value if isinstance(value, Mapping) else {})


def items(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def at(value: Any, *keys: str) -> Any:
    """Return the value under keys of nested objects, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def points(records: Sequence[Record], *keys: str) -> list[Point]:
    """Return (step, number under the keys) of records that have both, by step."""
    curve = []
    for record in records:
        step = number(record.get("step"))
        value = number(at(record, *keys))
        if step is not None and value is not None:
            curve.append((step, value))
    return sorted(curve)


def _read_journal(journal: Path, steps: Steps) -> tuple[list[Record], list[str]]:
    """Return events and notes on damaged lines; add steps to ``steps``."""
    events: list[Record] = []
    notes: list[str] = []
    with journal.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parse_line(line)
            except ValueError as error:
                notes.append(_damage_note(line_number, line, error))
                continue

            if record["kind"] == "step":
                steps.add(record)
            else:
                events.append(record)
    return events, notes


def _damage_note(line_number: int, line: bytes, error: ValueError) -> str:
    if line.endswith(b"\n"):
        return f"line {line_number} of the journal is not a record and was left out: {error}"
    return (
        f"the journal's last line ({line_number}) is torn and was left out: "
        "the run ended while writing it"
    )


def _read_json(path: Path, notes: list[str]) -> Any:
    """Return a file's content, keys may lack; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return read_record(path, partial=True)
    except VideotuneError as error:
        notes.append(f"left out: {error}")
        return None
