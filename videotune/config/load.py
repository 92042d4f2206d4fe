"""Config files, presets and ``--set`` words -> one nested dict a layer; unknown keys are errors with the nearest name."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from videotune.config.aliases import renamed
from videotune.config.schema import leaves
from videotune.config.suggestions import nearest_key, other_trainer
from videotune.console import echo
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json, walk_json

MOST_LETTERS = 100_000
MOST_TOLD = 8
"""Letters of one value, and how many faults one message names."""

LARGEST = 1 << 20
DEEPEST = 12
"""Bytes of a config file, and how deep its values may be nested: far above what any config needs."""

PRESETS = Path(__file__).parents[1] / "presets"


def warn(text: str) -> None:
    """Print a warning about a config."""
    echo(f"warning: {text}")


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML config file.

    Raises VideotuneError naming the file and the line or key that cannot be read.
    """
    value = parsed(config_text(path), path)
    _refuse_other_trainer(value, path)
    if not isinstance(value, dict):
        raise VideotuneError(
            f"{path} must hold an object with the config's keys, not a {type(value).__name__}"
        )
    return checked_keys(value, str(path))


def config_text(path: Path) -> str:
    """The text of a config file; VideotuneError where it is missing, too large or not UTF-8."""
    if not path.is_file():
        raise VideotuneError(f"config file not found: {path}")
    if path.stat().st_size > LARGEST:
        raise VideotuneError(
            f"{path} has {path.stat().st_size:,} bytes; a config has at most {LARGEST:,}"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VideotuneError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error


def checked_keys(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys by their names of today; VideotuneError for an unknown key and for values that nothing can use."""
    refuse_unreadable(value, where)
    value = renamed(value, where, warn)
    check_keys(value, where)
    return value


def _refuse_other_trainer(value: Any, path: Path) -> None:
    """VideotuneError for another trainer's config, and for TOML, which only other trainers' configs are written in."""
    other = other_trainer(value)
    ours = {name.partition(".")[0] for name in leaves()}
    stray = isinstance(value, dict) and 2 * sum(key in ours for key in value) > len(
        value
    )  # one key of theirs in ours
    if other and not (stray and len(other["keys"]) < 2):
        raise VideotuneError(
            f"{path} looks like one of {other['trainer']}: `videotune import {path}` translates it"
        )
    if path.suffix.lower() == ".toml":
        raise VideotuneError(
            f"{path} is TOML; videotune reads JSON and YAML, with the keys that docs/options.md lists"
        )


def refuse_unreadable(value: Any, where: str) -> None:
    """VideotuneError, by key, for values that nothing can use: texts that no file can hold, absurd sizes and depths."""
    for path, one in walk_json(value):
        problem = (
            f"is nested more than {DEEPEST} deep" if len(path) > DEEPEST else _unreadable(one)
        )
        if problem:
            raise VideotuneError(
                f"{where}: {'.'.join(map(str, path))[:200] or 'the config'} {problem}"
            )
        if path and (problem := _unreadable(path[-1])):
            raise VideotuneError(f"{where}: a key {problem}")


def _unreadable(value: Any) -> str | None:
    """What is wrong with a text or a number; None: nothing."""
    if isinstance(value, str) and (
        "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)
    ):
        return "holds a character that no file name can hold"
    if isinstance(value, str) and len(value) > MOST_LETTERS:
        return f"has {len(value):,} letters; at most {MOST_LETTERS:,} are read"
    return (
        "is a number of more than 64 bits"
        if isinstance(value, int) and abs(value) > 2**63
        else None
    )


def parsed(text: str, path: Path) -> Any:
    """The value of a text in YAML, TOML or JSON, by the name of its file; VideotuneError where the text is none."""
    kind = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}.get(path.suffix.lower(), "JSON")
    try:
        if kind == "YAML":
            return yaml.load(text, _Loader)
        return (
            tomllib.loads(text)
            if kind == "TOML"
            else json.loads(text, object_pairs_hook=_each_once)
        )
    except _SaidTwice as error:
        raise VideotuneError(f"{path} says {error} twice: which of them is meant?") from error
    except RecursionError as error:
        raise VideotuneError(f"{path} is nested more than {DEEPEST} deep") from error
    except json.JSONDecodeError as error:
        raise VideotuneError(
            f"{path} is no JSON: {error.msg}, line {error.lineno}, column {error.colno}"
        ) from error
    except (
        ValueError,
        yaml.YAMLError,
    ) as error:  # also a number of 5,000 digits, or a date that there is not
        raise VideotuneError(
            f"{path} is not valid {kind}: {shortened(' '.join(str(error).split()))}"
        ) from error


class _SaidTwice(ValueError):
    """A key stands twice in one object; readers of JSON and YAML would take the last and say nothing."""


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _SaidTwice(name)
        found[name] = value
    return found


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader for the YAML that a config needs: no tags, no aliases, and the plain words of YAML 1.2.

    A few nested aliases stand for more values than a memory holds. YAML 1.1 takes 1e-4 for text, 017 for 15, 1:30 for
    90, and ``on`` for true: of numbers, the forms of JSON are read.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
            what = (
                "an alias (*name)"
                if isinstance(event, yaml.AliasEvent)
                else f"a tag ({event.tag})"
            )
            raise yaml.YAMLError(
                f"{what} in line {event.start_mark.line + 1}, which is not read: write the value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        _each_once((str(name.value), None) for name, _ in node.value)
        return super().construct_mapping(node, deep)


_FLOAT = r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_Loader.yaml_implicit_resolvers = {}
for _tag, _form in (
    ("null", "~|null|Null|NULL|"),
    ("bool", "true|True|TRUE|false|False|FALSE"),
    ("int", "[-+]?(?:0|[1-9][0-9]*)"),
    ("float", _FLOAT),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_form})$"), None
    )


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_preset(name: str) -> dict[str, Any]:
    """The keys of a preset, by its name as ``preset_named`` takes it."""
    known = preset_named(name)
    value = {key: inner for key, inner in _preset(known).items() if key not in ("about", "why")}
    check_keys(value, f"preset {known}")
    return value


def preset_named(name: str) -> str:
    """A preset's full name; a leading ``#``, the ending ``.json`` and its class of memory (16GB) may be left out.

    Without its class it is the one for the largest cards. Raises VideotuneError with the nearest name.
    """
    wanted = name.removeprefix("#").removesuffix(".json").strip().lower()
    classed = {known: memory_class(known) for known in preset_names()}
    same = [
        known
        for known, gb in classed.items()
        if wanted in (known.lower(), known.lower().removesuffix(f" {gb}gb"))
    ]
    if same:
        return max(same, key=lambda known: (known.lower() == wanted, classed[known] or 0))
    words = re.findall(r"[a-z]+|[\d.]+", wanted)
    holding = [
        known
        for known in classed
        if words and set(words) <= set(re.findall(r"[a-z]+|[\d.]+", known.lower()))
    ]
    near = holding or difflib.get_close_matches(wanted, list(classed), 1, 0.4)
    raise VideotuneError(
        f"there is no preset {name!r}{did_you_mean(near[:6])}  `videotune presets list` shows all."
    )


def memory_class(preset: str) -> int | None:
    """The GB of the cards that a preset is for, as its name ends; None where it says none."""
    found = re.search(r" (\d+)GB$", preset)
    return int(found[1]) if found else None


def preset_about(name: str) -> str:
    """The one line that a preset says of itself."""
    return str(_preset(preset_named(name)).get("about", ""))


def preset_reasons(name: str) -> dict[str, str]:
    """Why each key of a preset has its value, by dotted name."""
    return dict(_preset(preset_named(name)).get("why", {}))


def _preset(known: str) -> dict[str, Any]:
    return dict(read_json(PRESETS / f"{known}.json"))


def parse_sets(words: Iterable[str]) -> dict[str, Any]:
    """``--set key.sub=value`` words -> a nested dict; a value is JSON where it reads as JSON, else text."""
    out: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise VideotuneError(f"--set takes key=value, not {word!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        except (
            ValueError,
            RecursionError,
        ) as error:  # a number of 5,000 digits, or brackets without an end
            raise VideotuneError(f"--set {word[:80]}…: {str(error)[:100]}") from error
        *sections, last = name.strip().split(".")
        if len(sections) > DEEPEST:
            raise VideotuneError(f"--set {word[:80]}…: no key has so many sections")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise VideotuneError(f"--set {word}: {section} is already a value")
        place[last] = value
    return checked_keys(out, "--set")


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts on top of each other; the last one wins, lists are replaced whole."""
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name == "optimizer" and isinstance(
                value, str
            ):  # short for its name; the other keys keep what they are
                value = {"name": value}
            both = isinstance(value, Mapping) and isinstance(out.get(name), Mapping)
            out[name] = merge(out[name], value) if both else value
    return out


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> nested dicts."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return out


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict by dotted names; lists are values."""
    out: dict[str, Any] = {}
    for name, inner in value.items():
        out |= (
            flatten(inner, f"{prefix}{name}.")
            if isinstance(inner, Mapping)
            else {f"{prefix}{name}": inner}
        )
    return out


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Raise VideotuneError for the keys that do not exist, each with the nearest name in its right section."""
    known = set(leaves())
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    rows = raw["datasets"] if isinstance(raw.get("datasets"), list) else []
    inside = [f"datasets.{key}" for row in rows if isinstance(row, Mapping) for key in row]
    names = [re.sub(r"^datasets\.\d+\.", "datasets.", name) for name in flatten(raw)]
    unknown = [
        name
        for name in dict.fromkeys([*names, *inside])
        if name not in known and name not in sections
    ]
    if unknown:
        told = "; ".join(
            f"unknown key {shortened(name)!r}{nearest_key(name, known)}"
            for name in unknown[:MOST_TOLD]
        )
        more = f"; and {len(unknown) - MOST_TOLD} more" if len(unknown) > MOST_TOLD else ""
        raise VideotuneError(f"{where}: {told}{more}")


def shortened(text: str) -> str:
    """A text from outside, short enough to be shown."""
    return text if len(text) <= 80 else f"{text[:79]}…"
