"""The settings form, built from the config schema: help, bounds and default of each
key.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from videotune.config.applies import Facts, unused
from videotune.config.data_schema import Dataset
from videotune.config.explain import advice, default, values
from videotune.config.load import EPOCH_KEYS, checked_keys
from videotune.config.nested_keys import flatten, merge, unflatten
from videotune.config.resolve import parse
from videotune.config.schema import leaves
from videotune.data.captions import split_variants
from videotune.data.clip_file import CAPTION_SUFFIXES
from videotune.data.clip_sizes import parse_size
from videotune.errors import VideotuneError
from videotune.presets.shipped import read_preset
from videotune.studio.clip_keys import CLIP_KEYS
from videotune.studio.field_kinds import SUGGESTIONS, UNUSED_WHEN_EMPTY
from videotune.studio.projects import CLIPS, MANAGED_KEYS, texts
from videotune.text import without_thousands_marks

WidgetKind = Literal["choice", "switch", "whole", "number", "text", "json"]

WIDGET_KINDS: dict[Any, WidgetKind] = {
    bool: "switch",
    int: "whole",
    float: "number",
    str: "text",
}
"""The control of each plain type; all other types are typed in as JSON."""


@dataclass(frozen=True)
class Field:
    """A config key as the form shows it."""

    key: str
    section: str

    kind: WidgetKind
    """The control to show."""

    choices: tuple[str, ...]
    """The options of a choice."""
    suggestions: tuple[str, ...]
    """What may be typed, of a text that takes other values too."""

    low: float | None
    """The smallest value, as an HTML input takes it."""

    high: float | None
    """The largest value."""

    help: str
    values: str

    default: str
    """Describes the value that applies while the field is empty."""

    reason: str
    """Why the default is what it is; empty if no reason is given."""

    unit: str
    guide: str

    @property
    def label(self) -> str:
        """The key in plain words."""
        return self.key.rpartition(".")[2].replace("_", " ")

    @property
    def name(self) -> str:
        """The name in texts.json, or the label as a title."""
        label = self.label[:1].upper() + self.label[1:]
        return str(texts()["names"].get(self.key, label))

    @property
    def words(self) -> Mapping[str, str]:
        """What each value is called, by its text; that of "" is the usual value's."""
        words: Mapping[str, str] = texts()["choices"].get(self.key, {})
        return words

    @property
    def options(self) -> tuple[str, ...]:
        """The texts to choose from; empty if the value is typed."""
        if self.kind == "switch":
            return ("true", "false")
        if self.kind == "json":
            return tuple(text for text in self.words if text)
        return self.choices

    @property
    def without_value(self) -> str:
        """What an empty field means that has no default."""
        return "not set" if self.key in UNUSED_WHEN_EMPTY else "automatic"

    def reason_for(self, text: str) -> str:
        """Return the reason of the default if that is the value of the text, else ""."""
        return self.reason if text == self.default else ""


@cache
def fields() -> list[Field]:
    """Return every key that the user may set, in the order of the schema."""
    return [
        _field(key, schema_field)
        for key, schema_field in leaves().items()
        if key not in MANAGED_KEYS and _is_offered(key)
    ]


def _is_offered(key: str) -> bool:
    """Return whether a key is of the run, or one of those of its clips."""
    section, _, name = key.rpartition(".")
    return section != "datasets" or name in CLIP_KEYS


def _field(key: str, schema_field: Any) -> Field:
    kind, choices = _widget(schema_field.annotation)
    bounds = _bounds(schema_field)

    notes = advice()
    default_text = default(schema_field).strip("`")

    return Field(
        key=key,
        section=key.rpartition(".")[0],
        kind=kind,
        choices=choices,
        suggestions=SUGGESTIONS.get(key, ()),
        low=bounds.get("ge", bounds.get("gt")),
        high=bounds.get("le", bounds.get("lt")),
        help=str(schema_field.description),
        values=values(schema_field).replace("`", ""),
        default=default_text,
        reason=notes["reasons"].get(key, ""),
        unit=notes["units"].get(key, ""),
        guide=notes["advice"].get(key, ""),
    )


def _bounds(schema_field: Any) -> dict[str, float]:
    """Return the bounds of a field by the names that pydantic gives them: ge, gt, le,
    lt.
    """
    bounds = {}
    for item in _metadata(schema_field):
        for name in ("ge", "gt", "le", "lt"):
            if hasattr(item, name):
                bounds[name] = getattr(item, name)
    return bounds


def _metadata(schema_field: Any) -> list[Any]:
    """Return the annotations of a field and of the types inside it."""
    annotations = list(schema_field.metadata)
    for inner_type in (schema_field.annotation, *get_args(schema_field.annotation)):
        if get_origin(inner_type) is Annotated:
            annotations += get_args(inner_type)[1:]

    items: list[Any] = []
    for annotation in annotations:
        items += getattr(annotation, "metadata", [annotation])
    return items


def _widget(annotation: Any) -> tuple[WidgetKind, tuple[str, ...]]:
    """Return the control for a value of this type, and its options."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]

    if get_origin(annotation) in (Union, UnionType):
        members = [
            member for member in get_args(annotation) if member is not type(None)
        ]
        return _widget(members[0]) if len(members) == 1 else ("json", ())
    if get_origin(annotation) is Literal:
        return "choice", tuple(str(value) for value in get_args(annotation))
    return WIDGET_KINDS.get(annotation, "json"), ()


def parse_value(field: Field, text: str) -> Any:
    """Return the value that a typed text means; None if the field was emptied.

    Raises:
        VideotuneError: if the text is not a value of the field's kind.
    """
    text = text.strip()
    if not text:
        return None
    if field.kind in ("choice", "text"):
        return text
    if field.kind == "switch":
        return _parse_switch(field, text)
    if field.kind in ("whole", "number"):
        return _parse_number(field, text)
    return _parse_json_or_text(field, text)


def _parse_switch(field: Field, text: str) -> bool:
    if text not in ("true", "false"):
        raise VideotuneError(f"{field.name}: true or false, not {text!r}")
    return text == "true"


def _parse_number(field: Field, text: str) -> int | float:
    is_ambiguous = re.fullmatch(r"-?[1-9][0-9]{0,2},[0-9]{3}", text) is not None
    if field.kind == "number" and is_ambiguous:
        raise VideotuneError(
            f"{field.name}: {text!r} can mean {text.replace(',', '.')} or "
            f"{text.replace(',', '')}. Write one of them"
        )

    try:
        if field.kind == "whole":
            return int(without_thousands_marks(text))
        return float(without_thousands_marks(text).replace(",", "."))
    except ValueError as error:
        expected = "a whole number" if field.kind == "whole" else "a number"
        raise VideotuneError(
            f"{field.name}: {text!r} is not {expected} ({field.values})"
        ) from error


def _parse_json_or_text(field: Field, text: str) -> Any:
    """Return the JSON value of a text; a text of more than one line is a list of its
    lines.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        lines = split_variants(text)
        is_list = len(lines) > 1 or field.key == "samples"
        return list(lines) if is_list else text
    except (RecursionError, ValueError) as error:
        # also a number of thousands of digits
        raise VideotuneError(
            f"{field.name}: the value cannot be read ({error})"
        ) from error


def format_value(value: Any) -> str:
    """Return a value as its field shows it; the inverse of ``parse_value``."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, str) for item in value)
    ):
        return "\n".join(value)
    return json.dumps(value)


def set_key(
    keys: Mapping[str, Any], key: str, text: str, preset: str
) -> dict[str, Any]:
    """Return the user's keys with one of them set as typed.

    Args:
        keys: the keys that the user has set so far.
        key: dotted name of the key to set.
        text: the typed text; empty removes the key, so the preset's value applies.
        preset: name of the preset below the keys.

    Raises:
        VideotuneError: if the value is out of its bounds.
    """
    field_by_key = {field.key: field for field in fields()}
    if key not in field_by_key:
        raise VideotuneError(f"{key!r} is not a setting of this form")

    field = field_by_key[key]
    value = parse_value(field, text)
    flat_keys = flatten(keys)
    flat_keys.pop(key, None)
    if value is not None:
        flat_keys[key] = value

    nested_keys = unflatten(flat_keys)
    try:
        checked_keys(nested_keys, "the form")
        config = parse(merge(preset_keys(preset), as_config(nested_keys)))
        if key == "resolution" and config.resolution is not None:
            _check_sizes(config.resolution)
    except VideotuneError as error:
        lines = str(error).split("\n")
        message = "\n".join(_with_name(field, line) for line in lines)
        raise VideotuneError(message) from error
    return nested_keys


def _with_name(field: Field, message: str) -> str:
    """Return a message on a value with the setting's name, and without its explanation,
    which the page has beside it.
    """
    prefix = f"{field.key}: "
    if not message.startswith(prefix):
        return message
    reason = message.removeprefix(prefix).removesuffix(f" ({field.help})")
    return f"{field.name}: {reason}"


def as_config(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's keys as a config, in which the settings of the clips are those of
    a dataset.

    Raises:
        VideotuneError: if captions would be written to files of another kind.
    """
    clip_keys = keys.get("datasets")
    if not isinstance(clip_keys, Mapping):
        return dict(keys)

    extension = clip_keys.get("caption_extension")
    if isinstance(extension, str) and extension.lower() not in CAPTION_SUFFIXES:
        raise VideotuneError(
            f"caption extension: {extension[:20]!r} is not one of {', '.join(CAPTION_SUFFIXES)}"
        )
    defaults = clip_defaults()
    chosen_keys = {
        key: value
        for key, value in clip_keys.items()
        if key not in defaults or value != defaults[key]
    }
    return {**keys, "datasets": [{"path": CLIPS, **chosen_keys}]}


def clip_keys_of(datasets: Any) -> dict[str, Any]:
    """Return the settings of clips that a config has: those that the studio wrote, or
    those of its only dataset. An ending of captions that the studio does not take is left
    out.
    """
    if isinstance(datasets, list) and len(datasets) == 1:
        (datasets,) = datasets
    if not isinstance(datasets, Mapping):
        return {}
    defaults = clip_defaults()
    clip_keys = {
        key: value
        for key, value in datasets.items()
        if key in CLIP_KEYS and value != defaults[key]
    }
    extension = clip_keys.get("caption_extension")
    if extension is not None and str(extension).lower() not in CAPTION_SUFFIXES:
        del clip_keys["caption_extension"]
    return clip_keys


@cache
def clip_defaults() -> dict[str, Any]:
    """Return the defaults of the settings of clips."""
    return {key: Dataset.model_fields[key].default for key in CLIP_KEYS}


def _check_sizes(value: int | str | Sequence[int | str]) -> None:
    sizes = [value] if isinstance(value, int | str) else value
    for size in sizes:
        parse_size(size)


def inactive_reasons(values: Mapping[str, Any]) -> dict[str, str]:
    """Return why keys cannot act beside these values, by key.

    Args:
        values: the values of all keys, by dotted name. If they are not valid together,
            nothing is known.
    """
    try:
        config = parse(as_config(unflatten(values)))
    except VideotuneError:
        return {}
    return {
        key: condition.otherwise for key, condition in unused(Facts(config)).items()
    }


def replaced_lengths(
    values: Mapping[str, Any], inherited: Mapping[str, Any]
) -> dict[str, str]:
    """Return why a length or an interval has no effect beside its twin, by key.

    Each is given in steps or in passes over the data. In one layer the passes decide;
    the user's value decides over the preset's.

    Args:
        values: the user's values, by dotted name.
        inherited: the values of the preset, by dotted name.
    """
    name_by_key = {field.key: field.name for field in fields()}
    reasons = {}
    for in_steps, in_epochs in EPOCH_KEYS.items():
        passes = values.get(in_epochs)
        is_of_preset = passes is None and values.get(in_steps) is None
        if is_of_preset:
            passes = inherited.get(in_epochs)

        if passes is not None:
            number = f"{passes:g}" if isinstance(passes, int | float) else passes
            remedy = "Set this field" if is_of_preset else "Empty that field"
            reasons[in_steps] = (
                f"“{name_by_key[in_epochs]}” is {number} and decides. "
                f"{remedy} to count in steps"
            )
        elif inherited.get(in_epochs) is not None:
            reasons[in_epochs] = f"“{name_by_key[in_steps]}” is set and decides"
    return reasons


def preset_keys(preset: str) -> dict[str, Any]:
    """Return the keys of a preset; none if no preset is chosen."""
    return read_preset(preset) if preset else {}


@dataclass(frozen=True)
class ConditionRow:
    """A condition as the form shows it."""

    type: str
    is_on: bool
    """Whether some samples have it."""

    is_taken: bool
    """Whether the model takes it."""

    probability: str = ""
    """Share of the samples; empty for the default."""

    latent_frames: str = ""

    @property
    def has_frames(self) -> bool:
        """Whether it has a number of latent frames."""
        return self.type in ("prefix", "suffix", "reference")


def condition_rows(value: Any, takes: Sequence[str] | None) -> list[ConditionRow]:
    """Return a row for each condition that the model takes or the value has.

    The first frame has a field of its own.

    Args:
        value: the value of ``conditions``.
        takes: types that the model takes. None: not known, so that all are shown.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping) and isinstance(item.get("type"), str):
            chosen[item["type"]] = item

    known = texts()["conditions"]
    taken = known if takes is None else takes
    names = [name for name in known if name in taken]
    names += [name for name in taken if name not in known]
    offered = [name for name in names if name != "first_frame"]

    rows = []
    for name in dict.fromkeys([*offered, *chosen]):
        item = chosen.get(name, {})
        row = ConditionRow(
            type=name,
            is_on=name in chosen,
            is_taken=takes is None or name in takes,
            probability=format_value(item.get("probability")),
            latent_frames=format_value(item.get("latent_frames")),
        )
        rows.append(row)
    return rows


def inherited_values(preset: str) -> dict[str, Any]:
    """Return the values of a preset over the schema's defaults, by dotted name."""
    values = flatten(parse(preset_keys(preset)).model_dump(mode="json"))
    values.pop("datasets")
    clip_values = {f"datasets.{key}": value for key, value in clip_defaults().items()}
    return {**values, **clip_values}
