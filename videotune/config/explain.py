"""What a key means, in words that are made from the schema; and the schema itself."""

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from videotune.config.config_changes import class_of
from videotune.config.schema import Config, leaves
from videotune.config.suggestions import nearest_key
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json

SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "length ≥"))
WORDS = {bool: "true, false", int: "integer", float: "number", str: "text"}

ON_RESUME: dict[str, str] = read_json(Path(__file__).with_name("on_resume.json"))


@lru_cache
def advice() -> dict[str, dict[str, Any]]:
    """By key: "units", "reasons" (why a default is what it is), "guide" (what a training guide says; our reading of it)."""
    return read_json(Path(__file__).with_name("advice.json"))


def kinds(annotation: Any) -> Iterator[str]:
    """What a value may be, in words; None is left out, since it is the same as leaving out the key."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield ", ".join([" or ".join(kinds(inner)), *limits(metadata)])
    elif origin in (Union, UnionType):
        for inner in get_args(annotation):
            yield from kinds(inner)
    elif origin is Literal:
        yield ", ".join(
            f"`{value if isinstance(value, str) else json.dumps(value)}`"
            for value in get_args(annotation)
        )
    elif origin is list:
        yield f"list of {' or '.join(kinds(get_args(annotation)[0]))}"
    elif annotation is not type(None):
        yield WORDS.get(annotation) or f"{{{', '.join(annotation.model_fields)}}}"


def limits(metadata: Iterable[Any]) -> list[str]:
    """The range that a value must lie in."""
    items = [part for item in metadata for part in getattr(item, "metadata", [item])]
    found = {
        name: getattr(item, name) for item in items for name, _ in SIGNS if hasattr(item, name)
    }
    return [f"{sign} {found[name]:g}" for name, sign in SIGNS if name in found]


def values(field: Any) -> str:
    """What a value may be: its kind and its range."""
    return ", ".join([" or ".join(kinds(field.annotation)), *limits(field.metadata)])


def default(field: Any) -> str:
    """The default as JSON would say it."""
    return (
        "required"
        if field.is_required()
        else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, as editors read it to complete and check keys."""
    schema = Config.model_json_schema()
    names = list(get_args(leaves()["optimizer.name"].annotation))
    for name, short in (
        ("optimizer", {"enum": names}),
        ("ema", {"type": "number"}),
    ):  # one value for the whole section
        schema["properties"][name] = {"anyOf": [schema["properties"][name], short]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def explain(key: str) -> list[tuple[str, str]]:
    """(what, text) about a key, or about every key of a section: meaning, values, default and its reason, advice.

    Raises VideotuneError with the nearest name where there is no such key.
    """
    known = leaves()
    if key in known:
        return list(_one(key, known[key]))
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return [(name, str(known[name].description)) for name in inside]
    ends = [name for name in known if name.rpartition(".")[2] == key]
    raise VideotuneError(
        f"there is no key {key!r}{did_you_mean(ends) or nearest_key(key, known)}"
    )


def _one(key: str, field: Any) -> Iterator[tuple[str, str]]:
    units, reasons, guide = (advice()[name] for name in ("units", "reasons", "guide"))
    yield "meaning", str(field.description)
    yield "values", values(field).replace("`", "")
    if key in units:
        yield "unit", units[key]
    yield "default", default(field).strip("`") + (f": {reasons[key]}" if key in reasons else "")
    if goes_with := field.json_schema_extra.get("goes_with"):
        of, choices = goes_with
        yield "goes with", f"{of} {' or '.join(choices)}; beside another it is refused"
    yield "on a resume", ON_RESUME[class_of(key)]
    if key in guide:
        says, ours = guide[key]
        yield (
            "the guide",
            f"a widely copied training guide for video models (docs/documents.md) says: {says}",
        )
        yield "our reading", ours
