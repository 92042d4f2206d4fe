"""The JSON files that pages read, each with its type.

A page reads such a file once, into its type. The file may be damaged, edited by hand, or
made by a stranger: sizes, depths, types and numbers are checked then, so no template
meets a value that it does not expect.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval, Len
from typing_extensions import TypedDict

from videotune.errors import VideotuneError
from videotune.files import (
    MAX_JSON_BYTES,
    Count,
    Moment,
    Number,
    PathText,
    read_typed,
)

ShortText = Annotated[str, Len(0, 500)]

Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]

OTHER_KEYS = {"extra": "allow"}
"""``__pydantic_config__`` of an object whose other keys are kept as they are."""


class SourceFacts(TypedDict):
    """A dataset outside of the project."""

    path: PathText
    kind: NotRequired[ShortText]

    settings: NotRequired[dict[ShortText, Any]]
    """Its own settings, by the names of a dataset's keys."""


class EarlierValue(TypedDict):
    """A setting of the user that was set before the model changed."""

    preset: ShortText
    """The preset for which it was set."""

    value: Any


MOST_LEFT_SOURCES = 20
"""Folders and datasets of an imported project that are named."""


class ProjectFacts(TypedDict, total=False):
    """``project.json``."""

    title: ShortText
    created: Moment
    archived: bool
    preset: ShortText
    card: ShortText
    vram: Number
    allow_skips: bool

    sources: list[SourceFacts]
    """Datasets outside of the project."""

    left_sources: Annotated[list[ShortText], Len(0, MOST_LEFT_SOURCES)]
    """Names of those that it had on the computer where it was exported."""

    captioning: dict[ShortText, Annotated[str, Len(0, 5000)]]
    """The options of the last captioning."""

    earlier_values: dict[ShortText, EarlierValue]
    """The user's settings that were set for an earlier model, by dotted name."""

    folder: PathText
    """The folder from which the project was exported."""


class ClipSound(TypedDict, total=False):
    """The sound of a clip, in the account of a check. What only decoding tells is null if
    the run reads no sound.
    """

    problem: str | None
    codec: str | None
    start: Finite | None
    seconds: Finite | None
    windows: Count
    loudness: Finite | None
    silent: Finite | None
    clipped: Finite | None


class CheckedClip(TypedDict):
    """A row of the account of a check."""

    path: PathText
    used: bool
    held_out: bool
    reason: str | None
    detail: str | None
    source_seconds: Number | None
    captions: list[str]
    warnings: list[str]
    notes: list[str]
    warning_codes: NotRequired[list[str]]
    note_codes: NotRequired[list[str]]
    source_fps: NotRequired[Number | None]
    source_frames: NotRequired[Count | None]
    width: NotRequired[Count | None]
    height: NotRequired[Count | None]
    windows: NotRequired[Count]
    spans: NotRequired[list[tuple[Number, Number]]]
    shape: NotRequired[str | None]
    seconds_cut: NotRequired[Number]
    mask: NotRequired[PathText | None]
    start_image: NotRequired[PathText | None]
    reference: NotRequired[PathText | None]
    control: NotRequired[PathText | None]
    sound: NotRequired[ClipSound | None]


class CheckAccount(TypedDict):
    """What ``videotune check --json`` prints."""

    clips: list[CheckedClip]
    notes: list[str]
    note_codes: NotRequired[list[str]]
    blockers: NotRequired[list[str]]


class SweepRecord(TypedDict):
    """``.studio/sweeps/NAME.json``: the values of each run of a sweep."""

    runs: Annotated[dict[str, Annotated[dict[str, str], Len(1)]], Len(1)]


class OwnPreset(TypedDict):
    """``presets/NAME.json``: a preset with the user's settings."""

    preset: ShortText
    keys: dict[str, Any]


class CaptionChange(TypedDict):
    """A line of ``history.jsonl``: a change of a caption."""

    batch: str
    """Joins the changes of one action."""

    by: str
    name: str
    before: str
    after: str
    undoes: NotRequired[str]
    """The batch that this action undoes."""

    redoes: NotRequired[str]
    """The batch that this action does again."""

    time: NotRequired[Moment]


class ClipMove(TypedDict):
    """A line of ``history.jsonl``: clips that were moved, or removed to the bin."""

    batch: str

    kind: Literal["clip", "scene"]

    names: list[str]
    """The clips, as the page names them."""

    files: list[PathText]
    """Their files before the move, relative to the project."""

    targets: list[PathText]
    """The same files after it; empty if they are in the bin."""

    item: str
    """The item of the bin; empty if they are not in it."""

    undoes: NotRequired[str]
    redoes: NotRequired[str]
    time: NotRequired[Moment]


class Try(TypedDict):
    """``try.json``: a tried prompt."""

    prompt: str
    entry: NotRequired[str]
    asked: NotRequired[Moment]
    step: NotRequired[ShortText]
    seed: NotRequired[ShortText]
    strength: NotRequired[ShortText]
    negative: NotRequired[str]


class PlanDevice(TypedDict):
    """Memory of the GPU in a plan."""

    card: str | None
    measured: str | None
    vram_bytes: Number | None
    memory_from: str | None
    spare_bytes: Number
    unstreamed_bytes: Number
    need_bytes: Number
    phase: str
    parts: dict[str, Number]


class PlanClips(TypedDict):
    """The numbers of clips in a plan."""

    used: Count
    held_out: Count
    skipped: Count


class PlanViewsPerWindow(TypedDict):
    """How often a window is shown."""

    min: Count
    max: Count
    band: str


class PlanViews(TypedDict):
    """How often clips are shown."""

    per_window: PlanViewsPerWindow
    advice: str


class PlanExample(TypedDict):
    """The time of a run on an example card."""

    card: str
    hours: Number
    hours_beside: Number
    seconds_a_step: Number


class Plan(TypedDict):
    """What ``videotune plan`` calculates, as far as the page Setup shows it."""

    __pydantic_config__ = OTHER_KEYS  # type: ignore[misc]

    fits: bool | None
    verdict: str | None
    hours: Number | None
    hours_beside: Number | None
    hours_encoding: NotRequired[Number | None]
    seconds_a_step: Number | None
    device: PlanDevice | None
    disk: dict[str, Finite | None]
    steps: Count
    clips: PlanClips
    views: PlanViews
    remedies: list[str]
    notes: list[str]
    note_codes: NotRequired[list[str]]
    examples: NotRequired[list[PlanExample]]
    takes: NotRequired[list[str]]


class PresetHours(TypedDict, total=False):
    """Whether a preset fits the GPU and how long it takes, or why that is not known."""

    fits: bool | None
    verdict: str | None
    hours: Number | None
    examples: list[PlanExample]
    need_bytes: Number | None
    words: str


class ImportedKey(TypedDict):
    """A key of another trainer's config, and what becomes of it."""

    __pydantic_config__ = OTHER_KEYS  # type: ignore[misc]

    key: str
    verdict: str
    given: bool
    theirs: Any
    ours: dict[str, Any]
    note: str


class Answer(TypedDict, total=False):
    """An answer of the plan server, as far as it is computed."""

    key: str
    """The question that it answers."""

    code: int
    words: str
    part: str

    died_in: str
    """The start of the studio in which the calculation died, of one that did."""

    plan: Plan | None
    presets: dict[str, PresetHours]

    card: str
    """The card of the hours."""

    total: int
    """Presets whose hours are calculated."""

    trainer: str
    config: dict[str, Any]
    rows: list[ImportedKey]


def read_record(
    path: Path, kind: Any, remedy: str, max_bytes: int = MAX_JSON_BYTES
) -> Any:
    """Read a JSON file as its type.

    Args:
        path: the file.
        kind: its type.
        remedy: what the user can do if it is damaged.
        max_bytes: size from which it is not read.

    Raises:
        VideotuneError: if it is missing, damaged or too large.
    """
    try:
        return read_typed(path, kind, max_bytes)
    except OSError as error:
        raise VideotuneError(
            f"{path} cannot be read ({error.strerror}): {remedy}"
        ) from error
    except ValueError as error:
        raise VideotuneError(f"{path} is damaged ({error}): {remedy}") from error
