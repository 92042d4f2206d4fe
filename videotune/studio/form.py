"""The form of settings, made from the config's schema: each key with its help, its bounds and its default."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from videotune.config.explain import advice, default, values
from videotune.config.load import check_keys, flatten, merge, read_preset, unflatten
from videotune.config.resolve import parse
from videotune.config.schema import leaves
from videotune.data.buckets import parse_size
from videotune.data.captions import split_variants
from videotune.errors import VideotuneError
from videotune.studio.projects import ELSEWHERE

WidgetKind = Literal["choice", "switch", "whole", "number", "text", "json"]


@dataclass(frozen=True)
class Field:
    """A key as a form shows it.

    ``kind`` says the control; ``choices`` are those of a choice; ``low`` is the smallest value as an HTML input takes it,
    ``high`` the largest; ``default`` what holds where the field is empty, in words.
    """

    key: str
    section: str
    kind: WidgetKind
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    help: str
    values: str
    default: str
    unit: str
    guide: str

    @property
    def label(self) -> str:
        """The key in plain words."""
        return self.key.rpartition(".")[2].replace("_", " ")


@cache
def fields() -> list[Field]:
    """Every key that a person may set, in the schema's order."""
    known = leaves().items()
    return [
        _field(key, one)
        for key, one in known
        if not key.startswith("datasets.") and key not in ELSEWHERE
    ]


def _field(key: str, field: Any) -> Field:
    kind, choices = _kind(field.annotation)
    names = ("ge", "gt", "le", "lt")
    items = _metadata(field)
    bounds = {
        name: getattr(item, name) for item in items for name in names if hasattr(item, name)
    }
    units, reasons, guide = (advice()[name] for name in ("units", "reasons", "guide"))
    advised, ours = guide.get(key, ("", ""))
    why = f": {reasons[key]}" if key in reasons else ""
    return Field(
        key,
        key.rpartition(".")[0],
        kind,
        choices,
        bounds.get("ge", bounds.get("gt")),
        bounds.get("le", bounds.get("lt")),
        str(field.description),
        values(field).replace("`", ""),
        default(field).strip("`") + why,
        units.get(key, ""),
        f"{advised} {ours}".strip(),
    )


def _metadata(field: Any) -> list[Any]:
    own = list(field.metadata)
    for inner in (field.annotation, *get_args(field.annotation)):
        if get_origin(inner) is Annotated:
            own += get_args(inner)[1:]
    return [part for item in own for part in getattr(item, "metadata", [item])]


def _kind(annotation: Any) -> tuple[WidgetKind, tuple[str, ...]]:
    """The control for a value of this type."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        inner = [one for one in get_args(annotation) if one is not type(None)]
        return _kind(inner[0]) if len(inner) == 1 else ("json", ())
    if get_origin(annotation) is Literal:
        return "choice", tuple(str(value) for value in get_args(annotation))
    plain: dict[Any, WidgetKind] = {bool: "switch", int: "whole", float: "number", str: "text"}
    return plain.get(annotation, "json"), ()


def typed(field: Field, text: str) -> Any:
    """What was typed as the value that it means; None where the field was emptied, so that the default holds.

    Raises VideotuneError where it cannot be read.
    """
    text = text.strip()
    if not text:
        return None
    if field.kind in ("choice", "text"):
        return text
    if field.kind == "switch":
        if text not in ("true", "false"):
            raise VideotuneError(f"{field.label}: true or false, not {text!r}")
        return text == "true"
    if field.kind in ("whole", "number"):
        try:
            return int(text) if field.kind == "whole" else float(text.replace(",", "."))
        except ValueError as error:
            what = "a whole number" if field.kind == "whole" else "a number"
            raise VideotuneError(
                f"{field.label}: {text!r} is not {what} ({field.values})"
            ) from error
    return _loose(field, text)


def _loose(field: Field, text: str) -> Any:
    """A value of several kinds: JSON where it reads as JSON; of several lines a list; else text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        lines = split_variants(text)
        return list(lines) if len(lines) > 1 or field.key == "samples" else text


def shown(value: Any) -> str:
    """A value as its field shows it; the opposite of ``typed``."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return json.dumps(value)


def put(keys: Mapping[str, Any], key: str, text: str, preset: str) -> dict[str, Any]:
    """The person's own keys with one of them as typed; emptied, it is taken out and the preset's holds.

    Raises VideotuneError in words of the schema where the value is out of its bounds.
    """
    known = {one.key: one for one in fields()}
    if key not in known:
        raise VideotuneError(f"{key!r} is not a setting of this form")
    value = typed(known[key], text)
    flat = {name: old for name, old in flatten(keys).items() if name != key}
    if value is not None:
        flat[key] = value
        for one in (
            (value if isinstance(value, list) else [value]) if key == "resolution" else ()
        ):
            parse_size(one)
    nested = unflatten(flat)
    check_keys(nested, "the form")
    parse(merge(read_preset(preset), nested))
    return nested


def standing(preset: str) -> dict[str, Any]:
    """What holds where the person says nothing: the preset's keys over the schema's defaults, by dotted name."""
    return flatten(parse(read_preset(preset)).model_dump(mode="json"))
