"""A run's JSON files: what each must hold, and the one place that reads and checks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from typing_extensions import TypedDict

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Count = Annotated[int, Interval(ge=0, lt=2**32)]
"""A step, or how many there are of something."""

Seconds = Annotated[float, Interval(ge=0, le=2.5e11)]
"""A time since 1970, before the year 9999."""

# ---- files that are written whole


class FileEntry(TypedDict):
    """A file of a checkpoint: its length and its ``files.hash_file``."""

    bytes: int
    hash: str


class Marker(TypedDict):
    """COMPLETE of a checkpoint."""

    step: Count
    kind: Literal["save", "backup"]
    files: dict[str, FileEntry]


class State(TypedDict):
    """state.json of a checkpoint."""

    step: Count
    without_state: NotRequired[list[str]]


class Settings(TypedDict):
    """Of a run's settings what is read before they are parsed."""

    base_model_name: str | None
    family: NotRequired[str | None]


class Base(TypedDict):
    """The base model of a run. ``scheduler``: ``files.hash_file`` of its scheduler's config."""

    name: str
    fingerprints: dict[str, str]
    scheduler: NotRequired[str]


class PastViews(TypedDict):
    """What was shown before the data last changed."""

    step: Count
    views: dict[str, int]


class RunConfig(TypedDict):
    """config.json."""

    settings: Settings
    origins: dict[str, str]
    base: Base
    data: str
    steps: Count
    processes: NotRequired[Count]
    past: NotRequired[PastViews]
    versions: NotRequired[dict[str, str]]
    asked: NotRequired[dict[str, Any]]
    digest: str


class PerWindow(TypedDict):
    """Views of a window by the end."""

    min: Count
    mean: float
    max: Count


class PlannedViews(TypedDict):
    """Views by the end, and the step at which each number of views is reached."""

    per_window: PerWindow
    steps_for: dict[str, Count]
    advice: str


class Bucket(TypedDict):
    """Windows of one shape."""

    shape: str
    windows: Count


class Plan(TypedDict):
    """plan.json."""

    views: PlannedViews
    buckets: list[Bucket]
    effective_batch: Count


class CheckedClip(TypedDict):
    """A clip of check.json."""

    id: str | None
    path: str
    used: bool
    held_out: bool
    captions: NotRequired[list[str] | None]
    shape: NotRequired[str | None]
    source_fps: NotRequired[float | None]
    repeats_share: NotRequired[float | None]
    warnings: NotRequired[list[str]]
    notes: NotRequired[list[str]]


class Check(TypedDict):
    """check.json."""

    clips: list[CheckedClip]
    skipped: NotRequired[Count]


class ExportEntry(TypedDict):
    """A line of exports.json. ``hash``: ``files.hash_path`` of the file or folder."""

    format: str
    path: str
    hash: str


class Comparison(TypedDict):
    """A line of compare.json."""

    prompt: str
    seed: int
    video: str
    sheet: str


SHAPES: Mapping[str, Any] = {
    "COMPLETE": Marker,
    "state": State,
    "config": RunConfig,
    "plan": Plan,
    "check": Check,
    "exports": list[ExportEntry],
    "compare": list[Comparison],
    "demo": dict[str, Any],
}

REMEDIES = {
    "config": "put back a copy of it (RUN/before and RUN/branches may hold one), or start a new run with another --out",
    "plan": "put back a copy of it (RUN/before and RUN/branches may hold one), or start a new run with another --out",
    "check": "put back a copy of it (RUN/before and RUN/branches may hold one), or start a new run with another --out",
    "exports": "remove it, and `videotune export RUN` writes it again",
    "demo": "remove it, and `videotune demo` writes it again",
    "compare": "remove it, and `videotune compare RUN` writes it again",
    "COMPLETE": "use another checkpoint",
    "state": "use another checkpoint",
}


@cache  # building one takes milliseconds
def _adapter(shape: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def read_record(path: Path, name: str | None = None, *, partial: bool = False) -> Any:
    """The content of a run's JSON file, checked; ``name``: which of SHAPES, where the file's own name does not say it.

    ``partial``: keys may be missing; those that are there must be of their shape.

    Raises VideotuneError that names the file, the key and what to do; OSError where the file cannot be opened.
    """
    from pydantic import ValidationError

    name = name or path.name.removesuffix(".json")
    value = load_json(path, REMEDIES[name])
    try:
        _adapter(SHAPES[name]).validate_python(value, strict=True)
    except ValidationError as error:
        if not partial or any(one["type"] != "missing" for one in error.errors(include_url=False, include_input=False)):
            raise VideotuneError(f"{path}: {told(error)}: {REMEDIES[name]}") from error
    return value


def load_json(path: Path, remedy: str) -> Any:
    """Any JSON file; VideotuneError with a remedy where it is none."""
    try:
        return json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise VideotuneError(f"{path} is not JSON ({error}): {remedy}") from error


def told(error: ValidationError) -> str:
    """The first key that is wrong, and why."""
    first = sorted(error.errors(include_url=False, include_input=False), key=lambda one: one["type"] == "missing")[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']}" if key else str(first["msg"])


# ---- the journal


class Line(TypedDict):
    """Any line of the journal."""

    kind: str
    step: NotRequired[Count]
    from_step: NotRequired[Count]
    time: NotRequired[Seconds]


class AtStep(TypedDict):
    """A line about a step."""

    kind: str
    step: Count
    time: NotRequired[Seconds]


class StepLine(AtStep):
    """A training step."""

    loss: float | None
    mse: float | None
    by_t: list[float | None]
    lr: dict[str, float]
    grad_norm: float | None
    window_ids: list[str]
    seconds: dict[str, float]
    captions: NotRequired[list[int | None]]
    skipped: NotRequired[bool]


class Reading(TypedDict):
    """What the ruler read over some clips."""

    normalised: float | None
    clips: NotRequired[dict[str, float | None]]
    by_quantile: NotRequired[list[float | None]]


class RulerLine(AtStep):
    """A reading of the ruler."""

    train: Reading | None
    held_out: NotRequired[Reading | None]
    ruler: NotRequired[str]


class VerdictLine(AtStep):
    """A verdict."""

    verdict: str | None
    reason: str


class SampleLine(AtStep):
    """A preview."""

    prompt: str
    path: str


class WarningLine(TypedDict):
    """A warning."""

    kind: str
    step: NotRequired[Count]
    text: str
    time: NotRequired[Seconds]


class EndLine(AtStep):
    """The end of a process's training."""

    why: str


class ResumeLine(TypedDict):
    """The begin of a process that continues the run."""

    kind: str
    from_step: Count
    time: NotRequired[Seconds]


LINES: Mapping[str, Any] = {
    "step": StepLine,
    "ruler": RulerLine,
    "verdict": VerdictLine,
    "sample": SampleLine,
    "warning": WarningLine,
    "end": EndLine,
    "resume": ResumeLine,
    "save": AtStep,
    "views": AtStep,
    "probe": AtStep,
}


@cache  # an import statement in each line's reading takes a tenth of it
def _reader() -> tuple[Callable[..., Any], type[ValidationError]]:
    from pydantic import ValidationError
    from pydantic_core import from_json

    return from_json, ValidationError


def parse_line(line: bytes) -> dict[str, Any]:
    """A line of the journal, checked.

    Raises ValueError, in words, where it is none.
    """
    from_json, ValidationError = _reader()
    try:
        value = from_json(line, cache_strings="all")  # keys and names of windows are the same objects in all lines
    except ValueError:
        try:
            value = json.loads(line)  # which also takes half of a letter (a lone surrogate)
        except RecursionError as error:
            raise ValueError(str(error)) from error
    kind = value.get("kind") if isinstance(value, dict) else None
    try:
        _adapter(LINES.get(kind, Line) if isinstance(kind, str) else Line).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(told(error)) from error
    found: dict[str, Any] = value
    return found
