"""Explain keys in words that are made from the schema; and the schema itself."""

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from videotune.config.applies import applies_when
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
    """Return by key "units", "reasons" of a default, and "advice" on its value."""
    return read_json(Path(__file__).with_name("advice.json"))


def kinds(annotation: Any) -> Iterator[str]:
    """Yield what a value may be, in words.

    None is left out: it is the same as leaving out the key.
    """
    origin = get_origin(annotation)

    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield _with_limits(inner, metadata)
    elif origin in (Union, UnionType):
        for inner in get_args(annotation):
            yield from kinds(inner)
    elif origin is Literal:
        yield ", ".join(_quoted(value) for value in get_args(annotation))
    elif origin is dict:
        yield "object"
    elif origin is list:
        (item,) = get_args(annotation)
        yield f"list of {' or '.join(kinds(item))}"
    elif annotation is not type(None):
        yield WORDS.get(annotation) or f"{{{', '.join(annotation.model_fields)}}}"


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`"


def limits(metadata: Iterable[Any]) -> list[str]:
    """Return the range that a value must be in."""
    constraints: list[Any] = []
    for item in metadata:
        constraints += getattr(item, "metadata", [item])

    bounds = {}
    for constraint in constraints:
        for name, _ in SIGNS:
            if hasattr(constraint, name):
                bounds[name] = getattr(constraint, name)
    return [f"{sign} {bounds[name]:g}" for name, sign in SIGNS if name in bounds]


def values(field: Any) -> str:
    """Return what a value may be: its type and its range."""
    return _with_limits(field.annotation, field.metadata)


def _with_limits(annotation: Any, metadata: Iterable[Any]) -> str:
    """Return what a value may be, with its range."""
    kind = " or ".join(kinds(annotation))
    return ", ".join([kind, *limits(metadata)])


def default(field: Any) -> str:
    """Return the default as JSON."""
    if field.is_required():
        return "required"
    default_value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(default_value)}`"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file, with which editors complete and check
    keys.
    """
    schema = Config.model_json_schema()
    properties = schema["properties"]
    # These sections may be given as one value.
    name = schema["$defs"]["Optimizer"]["properties"]["name"]
    properties["optimizer"] = {
        "anyOf": [
            properties["optimizer"],
            *name["anyOf"],
        ],
    }
    properties["ema"] = {"anyOf": [properties["ema"], {"type": "number"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def explain(key: str) -> list[tuple[str, str]]:
    """Return (topic, text) pairs about a key, or about every key of a section.

    Raises VideotuneError with the nearest name if there is no such key.
    """
    fields = leaves()
    if key in fields:
        return list(_explain_key(key, fields[key]))
    in_section = [name for name in fields if name.startswith(f"{key}.")]
    if in_section:
        return [(name, str(fields[name].description)) for name in in_section]

    same_ending = [name for name in fields if name.rpartition(".")[2] == key]
    hint = did_you_mean(same_ending) or nearest_key(key, fields)
    raise VideotuneError(f"there is no key {key!r}{hint}")


def _explain_key(key: str, field: Any) -> Iterator[tuple[str, str]]:
    """Yield meaning, values, default and its reason, when it applies, and advice."""
    units = advice()["units"]
    reasons = advice()["reasons"]
    hints = advice()["advice"]

    yield "meaning", str(field.description)
    yield "values", values(field).replace("`", "")
    if key in units:
        yield "unit", units[key]
    reason = f": {reasons[key]}" if key in reasons else ""
    yield "default", default(field).strip("`") + reason

    condition = applies_when(key)
    if condition:
        yield "applies when", condition
    yield "on a resume", ON_RESUME[class_of(key)]
    if key in hints:
        yield "advice", hints[key]
