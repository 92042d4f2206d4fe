"""A config of another trainer -> videotune's, with a row for every key of theirs; the rules are in JSON files."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.config import load, suggestions
from videotune.config.resolve import resolve
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.interop.foreign_config import ForeignConfig, parse_scalar
from videotune.models.base_model import published, spec_for
from videotune.types import BasePlace

RETRIED_LAST = ("", "transformer.weight_dtype", "layer_offload_fraction", "compile")
"""Keys that are left out where they do not go with others."""


@dataclass(frozen=True)
class TranslatedKey:
    """One key of theirs: its value, what becomes of the key, and why; not ``given``: their default, not in the file.

    ``verdict``: same: taken as it is; translated: under another name or with another value; none: no counterpart;
    differs: the key does there something other than its name says; unknown: no rule knows the key; missing: a file that
    is not there.
    """

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
    rows: tuple[TranslatedKey, ...]


@lru_cache
def load_rules(name: str) -> dict[str, Any]:
    """The rules for a trainer, from its JSON file."""
    return dict(read_json(Path(__file__).with_name(f"{name}.json")))


def translate(theirs: ForeignConfig) -> Imported:
    """The config of theirs in videotune's keys; values that videotune refuses are rows, not errors."""
    table = load_rules(theirs.trainer)
    folder = theirs.files[0].parent
    given = _with_args(theirs.values, table.get("args", ()))
    defaults = _defaults(given, table.get("defaults", {}))
    values = given | {key: default["value"] for key, default in defaults.items()}
    found = {key: defaults.get(key, {}) | _rule(table, key, values) for key in values}
    base = _base([values[key] for key in found if "base" in found[key]], folder)
    rows = [
        replace(_row(key, values, rule, base, folder), given=key in given)
        for key, rule in found.items()
    ]
    gone = [
        TranslatedKey(key, path, "missing", note="its keys are not read")
        for key, path in theirs.missing
    ]
    return Imported(theirs.trainer, *_accepted([*rows, *gone], base))


def _with_args(values: Mapping[str, Any], lists: Sequence[str]) -> dict[str, Any]:
    """The leaves, where the KEY=VALUE words of options such as optimizer_args are leaves of their own."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        words = [
            str(word).partition("=") for word in (value if isinstance(value, list) else [value])
        ]
        apart = (
            suggestions.plain(key) in lists and words and all(equals for _, equals, _ in words)
        )
        out |= (
            {f"{key}.{name.strip()}": parse_scalar(text.strip()) for name, _, text in words}
            if apart
            else {key: value}
        )
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
    name = suggestions.plain(key)
    notes = {
        pattern: {"note": note}
        for note, patterns in table.get("none", {}).items()
        for pattern in patterns
    }
    known = {
        pattern: rule
        for pattern, rule in (notes | table["rules"]).items()
        if fnmatchcase(name, pattern)
    }
    fits: Any = table["rules"].get(name) or next(
        iter(known.values()), {"unknown": 1, "note": "no rule knows this key"}
    )
    for rule in fits if isinstance(fits, list) else [fits]:
        if isinstance(rule, str) or _holds(rule.get("when", {}), key, values):
            return {"to": rule} if isinstance(rule, str) else dict(rule)
    return {"note": "it has no effect with the other values of this config"}


def _indices(key: str) -> list[str]:
    return [part for part in key.split(".") if part.isdecimal()]


def _beside(pattern: str, key: str, values: Mapping[str, Any]) -> Any:
    """The value of another key; N in its name stands for the index that ``key`` has there."""
    numbers = iter(_indices(key))
    return values.get(
        ".".join(next(numbers, "0") if part == "N" else part for part in pattern.split("."))
    )


def _holds(conditions: Mapping[str, str], key: str, values: Mapping[str, Any]) -> bool:
    """Whether other keys of theirs have such values: patterns apart by |, where nothing stands for no value."""
    found = ((pattern, _beside(pattern, key, values)) for pattern in conditions)
    texts = {pattern: "" if value is None else str(value).lower() for pattern, value in found}
    return all(
        any(fnmatchcase(texts[key], one) for one in conditions[key].split("|")) for key in texts
    )


def _row(
    key: str,
    values: Mapping[str, Any],
    rule: Mapping[str, Any],
    base: Mapping[str, str],
    folder: Path,
) -> TranslatedKey:
    value = values[key]
    notes = [rule.get("differs", rule.get("note", ""))]
    ours = {}
    if "to" in rule and (value not in (None, "", [], {}) or "empty" in rule):
        try:
            over = _beside(rule["over"], key, values) if "over" in rule else None
            ours = _placed(key, -(-value // over) if over else value, rule, folder)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            notes.append(
                str(error)
                if isinstance(error, VideotuneError)
                else f"videotune has no {value!r} for it"
            )
    if "base" in rule:
        ours |= base
        notes.append(
            "" if base else "it names no base model that videotune trains: set base_model_name"
        )
    same = all(
        name.split(".")[-1] == key.split(".")[-1] and one == value for name, one in ours.items()
    )
    verdict = next(
        (word for word in ("differs", "unknown") if word in rule),
        "same" if same else "translated",
    )
    verdict = verdict if ours or verdict in rule else "none"
    return TranslatedKey(
        key, value, verdict, ours, "; ".join(filter(None, notes)), rule.get("source", "")
    )


def _placed(key: str, value: Any, rule: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Our keys with their values; those of a dataset have the indices of theirs: ``datasets.0_2.path``."""
    how = rule.get("as")
    names = rule["to"] if isinstance(rule["to"], list) else [rule["to"]]
    word = str(value).lower()
    value = (
        how[word if word in how else "*"]
        if isinstance(how, dict)
        else _CONVERSIONS[how](value, folder)
    )
    several = [] if value is None else value if len(names) > 1 else [value]
    whole = [
        int(one) if isinstance(one, float) and one.is_integer() else one for one in several
    ]
    start = f"datasets.{'_'.join(_indices(key))}."
    return {
        name.replace("datasets.", start): one for name, one in zip(names, whole, strict=False)
    }


def _size(value: Any, _: Path) -> Any:
    """One size or a list of sizes, width before height, as videotune writes them: R, or "HxW"."""
    if isinstance(value, str) and "," in value:
        return [_size(one, _) for one in value.split(",")]
    sides = [
        int(one)
        for one in (value if isinstance(value, list) else re.findall(r"\d+", str(value)))
    ]
    return sides[0] if len(sides) == 1 else f"{sides[1]}x{sides[0]}"


def _is_weights(path: Path) -> bool:
    # Path.is_file raises OSError for a name that is too long
    return path.suffix == ".safetensors" and os.path.isfile(path)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) and isinstance(value[0], list) else [value]


def _buckets(value: Any, _: Path) -> list[Any]:
    """Frame counts with sizes, [F, H, W] or "FxHxW", -> the most frames, and the sizes."""
    shapes = [[int(one) for one in re.findall(r"\d+", str(shape))] for shape in _listed(value)]
    sizes = list(dict.fromkeys(f"{height}x{width}" for _, height, width in shapes))
    return [max(shape[0] for shape in shapes), sizes[0] if len(sizes) == 1 else sizes]


_CONVERSIONS: dict[Any, Any] = {
    None: lambda value, _: parse_scalar(value) if isinstance(value, str) else value,
    "size": _size,
    "area": lambda value, _: (
        round(math.sqrt(value[0] * value[1])) if isinstance(value, list) else int(value)
    ),
    "megapixels": lambda value, _: round(math.sqrt(value * 1e6)),
    "buckets": _buckets,
    "path": lambda value, folder: str((folder / value).absolute()),
    "path or id": lambda value, folder: (
        str((folder / value).absolute()) if (folder / value).exists() else value
    ),
    "weights": lambda value, folder: (
        str((folder / value).absolute()) if _is_weights(folder / value) else None
    ),
    "sides": lambda value, _: [
        round(math.sqrt(one[0] * one[1])) if isinstance(one, list) else one for one in value
    ],
    "sizes with frames": lambda value, _: _buckets([one[::-1] for one in _listed(value)], _)[
        ::-1
    ],
    "one more": lambda value, _: value + 1,
    "thousandths": lambda value, _: value / 1000,
    "numbers": lambda value, _: [float(one) for one in re.findall(r"[\d.eE+-]+", str(value))],
    "most": lambda value, _: max(value) if isinstance(value, list) else value,
    "word": lambda value, _: suggestions.others()["values"].get(
        str(value).upper(), str(value).upper()
    ),
}


def _base(names: list[Any], folder: Path) -> dict[str, str]:
    """The base model that names of theirs tell, as videotune's keys; nothing where they tell none."""
    for name in names:
        if isinstance(name, str) and os.path.isfile(folder / name / "model_index.json"):
            return {"base_model_name": str((folder / name).absolute())}
    text = re.sub(r"[-_ /\\]", "", " ".join(str(name) for name in names).lower())
    for one in load_rules("bases")["bases"]:
        if all(word in text for word in one["words"]) and not any(
            word in text for word in one.get("not", ())
        ):
            return dict(one["ours"])
    return {}


def _accepted(
    rows: list[TranslatedKey], base: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[TranslatedKey, ...]]:
    """The config of what videotune takes, and the rows as they came out; of two values for a key the first is taken."""
    wanted = {key: value for row in reversed(rows) for key, value in row.ours.items()}
    spread = {key: key for row in rows for key in row.ours if not key.startswith("datasets.")}
    inner = sorted(
        (key for key in wanted if key not in spread), key=lambda key: (len(key), key)
    )
    paths = [key for key in reversed(inner) if key.endswith(".path")]
    folders = {str(wanted[key]): key.split(".")[1] for key in paths}  # each folder once
    for path in sorted(folders.values(), key=lambda place: (len(place), place)):
        for key in inner:  # what is said of all datasets, or of some, is said of each
            _, place, name = key.split(".")
            if not place or f"{path}_".startswith(f"{place}_"):
                spread[f"datasets.{path}.{name}"] = key
    name = base.get("base_model_name", "")
    folder = published(name)  # what is known of the base model without asking for it
    spec = (
        spec_for(base["family"], BasePlace(name, folder) if folder else None)
        if "family" in base
        else None
    )
    taken = dict[str, Any]()
    why = dict.fromkeys(inner, "no folder of clips goes with it, or one named before")
    singles = sorted(
        ([key] for key in spread),
        key=lambda group: RETRIED_LAST.index(group[0]) if group[0] in RETRIED_LAST else 0,
    )
    for group in [
        list(spread),
        *singles,
        *singles,
        *singles,
    ]:  # more than once: a key may need another one
        new = taken | {key: wanted[spread[key]] for key in group}
        if len(new) == len(taken):
            continue
        try:
            resolve(_nested(new), {}, spec)
            taken = new
        except VideotuneError as error:
            why |= {
                spread[key]: f"videotune refuses it: {str(error).splitlines()[0]}"
                for key in group
            }
    why = {
        key: text for key, text in why.items() if not any(spread[one] == key for one in taken)
    }
    return _nested(taken), tuple(_settled(row, wanted, why) for row in rows)


def _settled(
    row: TranslatedKey, wanted: Mapping[str, Any], why: Mapping[str, str]
) -> TranslatedKey:
    """A row without what was not taken, and with the reason."""
    lost = {
        key: f"videotune has one: {wanted[key]!r}"
        for key, value in row.ours.items()
        if wanted[key] != value
    }
    lost |= {key: why[key] for key in row.ours if key in why}
    ours = {key: value for key, value in row.ours.items() if key not in lost}
    verdict = row.verdict if ours or not lost or row.verdict == "differs" else "none"
    return replace(
        row,
        ours=ours,
        verdict=verdict,
        note="; ".join(filter(None, [row.note, *lost.values()])),
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    out = load.unflatten(flat)
    return out | ({"datasets": list(out["datasets"].values())} if "datasets" in out else {})
