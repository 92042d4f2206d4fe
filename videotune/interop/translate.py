"""A config of another trainer -> videotune's, with a row for every key of theirs; the rules are in JSON files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from videotune.config.resolve import resolve
from videotune.config.schema import leaves
from videotune.config.suggestions import other_values
from videotune.errors import VideotuneError
from videotune.interop.command_line import typed
from videotune.interop.theirs import Theirs, plain
from videotune.models.base_model import published, spec_for
from videotune.types import BasePlace, ModelSpec

VERDICTS = ("same", "translated", "none", "differs", "unknown", "missing")
"""same: taken as it is; translated: under another name or with another value; none: no counterpart; differs: the key does
there something other than its name says; unknown: no rule knows the key; missing: a file that is not there."""


LATE = ("", "transformer.weight_dtype", "layer_offload_fraction", "compile")
"""Keys that are left out where they do not go with others."""


@dataclass(frozen=True)
class Row:
    """One key of theirs: its value, what becomes of the key, and why; not ``given``: their default, not in the file."""

    key: str
    theirs: Any
    verdict: str
    ours: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    source: str = ""
    given: bool = True


@dataclass(frozen=True)
class Imported:
    """A config that resolves, by videotune's keys, and a row for each key of theirs."""

    trainer: str
    config: dict[str, Any]
    rows: tuple[Row, ...]


@lru_cache
def rules(name: str) -> dict[str, Any]:
    """The rules for a trainer, from its JSON file."""
    return dict(json.loads((resources.files("videotune") / "interop" / f"{name}.json").read_text(encoding="utf-8")))


def translate(theirs: Theirs) -> Imported:
    """The config of theirs in videotune's keys; values that videotune refuses are rows, not errors."""
    table, folder = rules(theirs.trainer), theirs.files[0].parent
    given = _with_args(theirs.values, table.get("args", ()))
    defaults = _defaults(given, table.get("defaults", {}))
    values = given | {key: default["value"] for key, default in defaults.items()}
    found = {key: _rule(table, key, values) for key in values}
    base = _base([values[key] for key, rule in found.items() if "base" in rule], folder)
    rows = []
    for key, value in values.items():
        row = _row(key, value, found[key], base, folder)
        source = defaults[key].get("source", "") if key in defaults else ""
        rows.append(replace(row, given=key in given, source=row.source or source))
    rows += [
        Row(key, path, "missing", note="the file is not there: its keys are not read") for key, path in theirs.missing
    ]
    config, settled = _accepted(rows, base)
    return Imported(theirs.trainer, config, tuple(settled))


def _with_args(values: Mapping[str, Any], lists: list[str]) -> dict[str, Any]:
    """The leaves, where the KEY=VALUE words of options such as optimizer_args are leaves of their own."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        words = [str(word).partition("=") for word in (value if isinstance(value, list) else [value])]
        apart = plain(key) in lists and all(equals for _, equals, _ in words)
        out |= {f"{key}.{name.strip()}": typed(text.strip()) for name, _, text in words} if apart else {key: value}
    return out


def _defaults(values: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Their defaults that matter, for each key, or each entry of a list, that is not in the config."""
    out = {}
    for pattern, default in table.items():
        head, dot, last = pattern.rpartition("N.")
        start = re.compile(re.escape(head + dot).replace("N", r"\d+"))
        for place in sorted({found[0] for key in values if (found := start.match(key))}):
            if place + last not in values and _holds(default.get("when", {}), place, values):
                out[place + last] = default
    return out


def _rule(table: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The rule for a key, by its name or the first pattern that fits; of a list the first whose conditions hold."""
    name, known = plain(key), table["rules"]
    for note, keys in table.get("none", {}).items():
        if name not in known and any(fnmatchcase(name, pattern) for pattern in keys):
            return {"note": note}
    fits = known.get(name) or next((known[pattern] for pattern in known if fnmatchcase(name, pattern)), None)
    if fits is None:
        return {"unknown": True, "note": "no rule knows this key"}
    for rule in fits if isinstance(fits, list) else [fits]:
        if isinstance(rule, str) or _holds(rule.get("when", {}), key, values):
            return {"to": rule} if isinstance(rule, str) else dict(rule)
    return {"note": "it has no effect with the other values of this config"}


def _holds(conditions: Mapping[str, str], key: str, values: Mapping[str, Any]) -> bool:
    """Whether other keys of theirs have such values; N stands for the index that the key itself has there."""
    for pattern, wanted in conditions.items():
        numbers = iter(re.findall(r"(?<![^.])\d+(?![^.])", key))
        value = values.get(".".join(next(numbers, "0") if part == "N" else part for part in pattern.split(".")))
        text = "" if value is None else str(value).lower()
        if not any(fnmatchcase(text, one) for one in wanted.split("|")):
            return False
    return True


def _row(key: str, value: Any, rule: Mapping[str, Any], base: Mapping[str, str], folder: Path) -> Row:
    notes, ours = [rule.get("differs", rule.get("note", ""))], {}
    if "to" in rule and value not in (None, "", [], {}):
        try:
            ours = _placed(key, value, rule, folder)
        except (TypeError, ValueError, LookupError, OverflowError, OSError) as error:
            notes.append(str(error) if isinstance(error, VideotuneError) else f"videotune has no {value!r} for it")
    if "base" in rule:
        ours |= base
        notes.append("" if base else "it names no base model that videotune trains: set base_model_name")
    last = key.rpartition(".")[2]
    same = all(name.rpartition(".")[2] == last and one == value for name, one in ours.items())
    verdict = "same" if same else "translated"
    verdict = next((word for word in ("differs", "unknown") if word in rule), verdict if ours else "none")
    return Row(key, value, verdict, ours, "; ".join(filter(None, notes)), rule.get("source", ""))


def _placed(key: str, value: Any, rule: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Our keys with their values; those of a dataset have the indices of theirs: ``datasets.0_2.path``."""
    how, names = rule.get("as"), rule["to"] if isinstance(rule["to"], list) else [rule["to"]]
    if isinstance(how, dict):
        value = how[str(value).lower() if str(value).lower() in how else "*"]
    else:
        value = _CONVERSIONS[how](value, folder) if how else typed(value) if isinstance(value, str) else value
    if not leaves().keys() >= set(names):
        raise VideotuneError(f"videotune has no key {' and '.join(names)}")
    several = [] if value is None else value if len(names) > 1 else [value]
    whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in several]
    place = "_".join(re.findall(r"(?<![^.])\d+(?![^.])", key))
    return {re.sub(r"^datasets\.", f"datasets.{place}.", name): one for name, one in zip(names, whole, strict=False)}


def _size(value: Any, _: Path) -> Any:
    """One size or a list of sizes, width before height, as videotune writes them: R, or "HxW"."""
    if isinstance(value, list) and (len(value) != 2 or isinstance(value[0], list)):
        sizes = [_size(one, _) for one in value]
        return sizes[0] if len(sizes) == 1 else sizes
    sides = [int(one) for one in (value if isinstance(value, list) else re.findall(r"\d+", str(value)))]
    return sides[0] if len(sides) == 1 else f"{sides[1]}x{sides[0]}"


def _buckets(value: Any, _: Path) -> list[Any]:
    """Frame counts with sizes, [F, H, W] or "FxHxW", -> the most frames, and the sizes."""
    some = value if isinstance(value, list) and isinstance(value[0], list | str) else [value]
    shapes = [[int(one) for one in re.findall(r"\d+", str(shape))] for shape in some]
    sizes = list(dict.fromkeys(f"{height}x{width}" for _, height, width in shapes))
    return [max(shape[0] for shape in shapes), sizes[0] if len(sizes) == 1 else sizes]


def _weights(value: Any, folder: Path) -> str:
    if not str(value).endswith(".safetensors") or not (folder / str(value)).is_file():
        raise VideotuneError("no .safetensors file lies there: the weights of base_model_name are taken")
    return str((folder / str(value)).absolute())


_CONVERSIONS: dict[Any, Any] = {
    "size": _size,
    "area": lambda value, _: round(math.sqrt(value[0] * value[1])) if isinstance(value, list) else int(value),
    "megapixels": lambda value, _: round(math.sqrt(value * 1e6)),
    "buckets": _buckets,
    "path": lambda value, folder: str((folder / value).absolute()),
    "path or id": lambda value, folder: str((folder / value).absolute()) if (folder / value).exists() else value,
    "weights": _weights,
    "sides": lambda value, _: [round(math.sqrt(one[0] * one[1])) if isinstance(one, list) else one for one in value],
    "sizes with frames": lambda value, _: _buckets([[frames, height, width] for width, height, frames in value], _)[
        ::-1
    ],
    "width, height, frames": lambda value, _: [f"{value[1]:d}x{value[0]:d}", value[2]],
    "default caption": lambda value, _: ["text", str(value)],
    "sigmoid": lambda value, _: ["SIGMOID", value],
    "one more": lambda value, _: value + 1,
    "numbers": lambda value, _: [float(one) for one in re.findall(r"[\d.eE+-]+", str(value))],
    "list": lambda value, _: value if isinstance(value, list) else [value],
    "most": lambda value, _: max(value) if isinstance(value, list) else value,
    "number": lambda value, _: float(value),
    "word": lambda value, _: other_values().get(str(value).upper(), str(value).upper()),
}


def _base(names: list[Any], folder: Path) -> dict[str, str]:
    """The base model that names of theirs tell, as videotune's keys; nothing where they tell none."""
    for name in names:
        if isinstance(name, str) and (folder / name / "model_index.json").is_file():
            return {"base_model_name": str((folder / name).absolute())}
    text = re.sub(r"[-_ /\\]", "", " ".join(str(name) for name in names).lower())
    for one in rules("bases")["bases"]:
        if all(word in text for word in one["words"]) and not any(word in text for word in one.get("not", ())):
            return dict(one["ours"])
    return {}


def _accepted(rows: list[Row], base: Mapping[str, str]) -> tuple[dict[str, Any], list[Row]]:
    """The config of what videotune takes, and the rows as they came out; of two values for a key the first is taken."""
    wanted = dict(reversed({key: value for row in reversed(rows) for key, value in row.ours.items()}.items()))
    inner = sorted((key for key in wanted if key.startswith("datasets.")), key=len)
    spread = {key: (key, value) for key, value in wanted.items() if key not in inner}
    refused = dict.fromkeys(inner, "no folder of clips goes with it")
    for path in sorted(key.split(".")[1] for key in inner if key.endswith(".path")):
        for key in inner:  # what is said of all datasets, or of some, is said of each
            _, place, name = key.split(".")
            if not place or f"{path}_".startswith(f"{place}_"):
                spread[f"datasets.{path}.{name}"] = (key, wanted[key])
                refused.pop(key, None)
    groups = [{key: value for key, (origin, value) in spread.items() if origin in row.ours} for row in rows]
    groups.sort(key=lambda group: max((LATE.index(key) for key in group if key in LATE), default=0))
    spec, taken = _spec(base), dict[str, Any]()
    while groups:  # a key may need another one
        left = []
        for group in groups:
            try:
                resolve(_nested(taken | group), {}, spec)
                taken |= group
            except VideotuneError as error:
                left.append(group)
                refused |= {spread[key][0]: f"videotune refuses it: {str(error).splitlines()[0]}" for key in group}
        alone = all(len(group) == 1 for group in left)
        if len(left) == len(groups):
            left = [] if alone else [{key: value} for group in left for key, value in group.items()]
        groups = left
    refused = {key: why for key, why in refused.items() if not any(spread[one][0] == key for one in taken)}
    return _nested(taken), [_settled(row, refused, wanted) for row in rows]


def _settled(row: Row, refused: Mapping[str, str], wanted: Mapping[str, Any]) -> Row:
    """A row without what was not taken, and with the reason."""
    lost = {key: refused[key] for key in row.ours if key in refused}
    lost |= {key: f"videotune has one: {wanted[key]!r}" for key, value in row.ours.items() if wanted[key] != value}
    ours = {key: value for key, value in row.ours.items() if key not in lost}
    verdict = row.verdict if ours or not lost or row.verdict == "differs" else "none"
    return replace(row, ours=ours, verdict=verdict, note="; ".join(filter(None, [row.note, *lost.values()])))


def _spec(base: Mapping[str, str]) -> ModelSpec | None:
    """What is known of the base model without asking for it."""
    folder = published(base.get("base_model_name", ""))
    place = BasePlace(base["base_model_name"], folder) if folder else None
    return spec_for(base.get("family"), place) if place or "family" in base else None


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    rows = out.get("datasets", {})
    return out | ({"datasets": [rows[place] for place in sorted(rows)]} if rows else {})
