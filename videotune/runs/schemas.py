"""A run's JSON files: what each must hold, and the one place that reads and checks
them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval, Len
from typing_extensions import TypedDict

from videotune.bounds import (
    EXPORT_ENTRIES,
    RECORD_BYTES,
    RECORD_DEPTH,
    read_limited,
    too_deep,
)
from videotune.config.aliases import renamed_run
from videotune.errors import VideotuneError
from videotune.files import Count, PathText, checked, hash_path
from videotune.text import as_argument

Seconds = Annotated[float, Interval(ge=0, le=2.5e11)]
"""A time since 1970, before the year 9999."""

Step = Annotated[int, Interval(ge=0, lt=2**32)]
"""The number of a step; sums over steps keep it in 32 bits."""

Finite = Annotated[float, Interval(ge=-1e300, le=1e300)]
"""A number whose sums are finite; a run writes null for others."""


class FileEntry(TypedDict):
    """A file of a checkpoint: its length and its hash (``files.hash_file``)."""

    bytes: int
    hash: str


def _object(**keys: Any) -> Any:
    """The type of a JSON object with these keys; it may have others."""
    return TypedDict("Object", keys)  # type: ignore[operator]


def _list(**keys: Any) -> Any:
    """The type of a JSON list of such objects."""
    return list[_object(**keys)]  # type: ignore[misc]


_SETTINGS = _object(base_model_name=str | None, family=NotRequired[str | None])
_BASE = _object(name=str, fingerprints=dict[str, str], scheduler=NotRequired[str])
_VIEWS = _object(
    per_window=_object(min=Count, mean=float, max=Count),
    steps_for=dict[str, Count],  # by the number of views
    advice=str,
)
_CLIPS = _list(
    id=str | None,
    path=PathText,
    used=bool,
    held_out=bool,
    captions=NotRequired[list[str] | None],
    mask=NotRequired[PathText | None],
    start_image=NotRequired[PathText | None],
    shape=NotRequired[str | None],
    source_fps=NotRequired[float | None],
    repeats_share=NotRequired[float | None],
    serious=NotRequired[list[str]],
    warnings=NotRequired[list[str]],
    notes=NotRequired[list[str]],
)
_CONFIG = _object(
    settings=_SETTINGS,
    origins=dict[str, str],
    base=_BASE,
    data=str,
    steps=Count,
    digest=str,
    processes=NotRequired[Count],
    past=NotRequired[_object(step=Count, views=dict[str, int])],
    versions=NotRequired[dict[str, str]],
    asked=NotRequired[dict[str, Any]],
)
_EXPORTS = _list(
    format=str,
    path=PathText,
    hash=str,  # ``files.hash_path`` of the file or folder
    use=NotRequired[str],
    verified=NotRequired[_object(reader=NotRequired[str])],
)

SHAPES: Mapping[str, Any] = {
    "COMPLETE": _object(
        step=Count, kind=Literal["save", "backup"], files=dict[str, FileEntry]
    ),
    "state": _object(step=Count, without_state=NotRequired[list[str]]),
    "config": _CONFIG,  # of the settings what is read of them before they are parsed
    "plan": _object(
        views=_VIEWS,
        buckets=_list(shape=str, windows=Count, batch=NotRequired[Count]),
        effective_batch=Count,
    ),
    "check": _object(clips=_CLIPS, skipped=NotRequired[Count]),
    "exports": Annotated[_EXPORTS, Len(0, EXPORT_ENTRIES)],
    "compare": _list(
        prompt=str,
        seed=int,
        steps=NotRequired[list[Step]],
        video=PathText,
        sheet=PathText,
    ),
    "demo": dict[str, Any],
}
"""What is read of each file. It may hold anything else."""

_RESTORE = "restore a copy of it (RUN/before and RUN/branches may hold one), or start a new run with another --out"
REMEDIES = {
    **dict.fromkeys(("config", "plan", "check"), _RESTORE),
    **dict.fromkeys(("COMPLETE", "state"), "use another checkpoint"),
    "exports": "remove it, and `videotune export RUN` writes it again",
    "demo": "remove it, and `videotune demo` writes it again",
    "compare": "remove it, and `videotune compare RUN` writes it again",
}


def read_record(path: Path, name: str | None = None, *, partial: bool = False) -> Any:
    """Read a run's JSON file and check it.

    Args:
        path: the file.
        name: its key in SHAPES. None: the file's own name.
        partial: keys may be missing; those that exist must have their shape.

    Raises:
        VideotuneError: if the content is not valid; it names the file, the key and what
            to do.
        OSError: if the file cannot be opened.
    """
    if name is None:
        name = path.name.removesuffix(".json")
    value = load_json(path, REMEDIES[name])
    try:
        checked(SHAPES[name], value, partial=partial)
    except ValueError as error:
        raise VideotuneError(f"{path}: {error}: {REMEDIES[name]}") from error
    if name == "demo":
        return renamed(value)
    return renamed_run(value) if name == "config" else value


def load_json(path: Path, remedy: str) -> Any:
    """Read any JSON file.

    Raises VideotuneError with a remedy if it is not valid JSON.
    """
    content = read_limited(path, RECORD_BYTES, "a record of a run")
    try:
        value = json.loads(content.decode())
        deep_key = too_deep(value, RECORD_DEPTH)
        if deep_key is not None:
            raise ValueError(f"it is nested more than {RECORD_DEPTH} deep")
        return value
    except (ValueError, RecursionError) as error:
        raise VideotuneError(f"{path} is not valid JSON ({error}): {remedy}") from error


RENAMED = {"ruler": "validation", "probe": "sample_metrics"}
"""Kinds of lines and keys of earlier versions, with today's names."""


def renamed(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a run with its keys, and its kind, by today's names."""
    content = {RENAMED.get(key, key): inner for key, inner in value.items()}
    kind = content.get("kind")
    if isinstance(kind, str):
        content["kind"] = RENAMED.get(kind, kind)
    return content


_MAYBE = Finite | None
_ANY: dict[str, Any] = {"kind": str, "time": NotRequired[Seconds]}
_AT_STEP = _ANY | {"step": Step}
_READING = _object(
    normalised=_MAYBE,
    clips=NotRequired[dict[str, _MAYBE]],
    by_quantile=NotRequired[list[_MAYBE]],
)  # over some clips

_LINE = _object(**_ANY, step=NotRequired[Step], from_step=NotRequired[Step])
_STEP = _object(
    **_AT_STEP,
    loss=_MAYBE,
    mse=_MAYBE,
    by_t=list[_MAYBE],
    lr=dict[str, Finite],
    grad_norm=_MAYBE,
    window_ids=list[str],
    seconds=dict[str, Seconds],
    captions=NotRequired[list[int | None]],
    skipped=NotRequired[bool],
    sound=NotRequired[_object(mse=_MAYBE, by_t=list[_MAYBE])],
)
_TAKE = _object(step=NotRequired[Step], why=NotRequired[str])
_PARTS_READ: Any = _object(train=_READING | None, held_out=NotRequired[_READING | None])
_VALIDATION = _object(
    **_AT_STEP,
    train=_READING | None,
    held_out=NotRequired[_READING | None],
    validation=NotRequired[str],
    sound=NotRequired[_PARTS_READ],
    plain=NotRequired[_PARTS_READ],
)
_PART: Any = _object(numbers=Step, change=_MAYBE, moved=bool, gradient=_MAYBE)
_FORGETTING = _object(
    **_AT_STEP,
    not_measured=NotRequired[str],
    levels=NotRequired[list[Finite]],
    distance=NotRequired[_object(mean=_MAYBE, by_level=list[_MAYBE])],
    guidance=NotRequired[_object(mean=_MAYBE, by_level=list[_MAYBE])],
    effect=NotRequired[_object(mean=_MAYBE)],
    few_steps=NotRequired[_object(error=_MAYBE, base=_MAYBE)],
    verdict=NotRequired[str | None],
    reason=NotRequired[str],
)
LINES: Mapping[str, Any] = {
    "step": _STEP,
    "validation": _VALIDATION,
    "verdict": _object(
        **_AT_STEP,
        verdict=str | None,
        reason=str,
        shown=NotRequired[str],
        parts=NotRequired[dict[str, str | None] | None],
    ),
    "sample": _object(
        **_AT_STEP,
        prompt=str,
        path=PathText,
        picture=NotRequired[_object(fault=str | None)],
        sound=NotRequired[_object(loudness=Finite, clipped=Finite)],
    ),
    "parts": _object(**_AT_STEP, parts=dict[str, _PART]),
    "forgetting": _FORGETTING,
    "warning": _object(**_ANY, step=NotRequired[Step], text=str),
    "end": _object(**_AT_STEP, why=str, take=NotRequired[_TAKE]),
    "resume": _object(**_ANY, from_step=Step),
    "views": _object(**_AT_STEP, per_clip=NotRequired[_object(mean=Finite) | None]),
    **dict.fromkeys(("save", "sample_metrics"), _object(**_AT_STEP)),
}
"""What is read of the journal's lines, by their kind; for any other kind it is
``_LINE``.
"""


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line of the journal and check it.

    Raises ValueError that says what is wrong.
    """
    from pydantic_core import from_json

    try:
        # With the cache, keys and window ids are the same objects in all lines.
        value = from_json(line, cache_strings="all")
    except ValueError:
        try:
            value = json.loads(line)  # also accepts half a letter (a lone surrogate)
        except RecursionError as error:
            raise ValueError(str(error)) from error

    kind = None
    if isinstance(value, dict):
        if value.get("kind") != "step":
            value = renamed(value)
        kind = value.get("kind")
    shape = LINES.get(kind, _LINE) if isinstance(kind, str) else _LINE
    checked(shape, value)
    return value


def verified(run: Path, line: Mapping[str, Any]) -> Path:
    """Return the file or folder of a line of exports.json.

    Raises VideotuneError if it is missing or was changed.
    """
    path = run / str(line["path"])
    if not path.exists() or hash_path(path) != line["hash"]:
        raise VideotuneError(
            f"{path} is missing or damaged. Remove it and write it again: videotune export {as_argument(run)}"
        )
    return path
