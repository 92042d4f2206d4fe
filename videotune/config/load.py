"""Config files, presets and ``--set`` words -> one nested dict a layer; unknown keys are errors with the nearest name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from videotune.config.schema import leaves
from videotune.errors import VideotuneError


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML config file.

    Raises VideotuneError naming the file and the line that cannot be read.
    """
    if not path.is_file():
        raise VideotuneError(f"config file not found: {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VideotuneError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    try:
        value = _parsed(text, path)
    except _SaidTwice as error:
        raise VideotuneError(f"{path} says {error} twice: which of them is meant?") from error
    if not isinstance(value, dict):
        raise VideotuneError(f"{path} must hold an object with the config's keys, not a {type(value).__name__}")
    check_keys(value, str(path))
    return value


def _parsed(text: str, path: Path) -> Any:
    """What a file says, YAML or JSON by its name."""
    if path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.load(text, _yaml_loader())
        except yaml.YAMLError as error:
            raise VideotuneError(f"{path} is not valid YAML: {error}") from error
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise VideotuneError(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}"
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


def _yaml_loader() -> Any:
    """PyYAML's safe loader, which takes 1e-4 for text (YAML 1.1 wants a point), with the numbers of YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value if name.tag != "tag:yaml.org,2002:merge"]
            _each_once((str(name), None) for name in names)
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def preset_names() -> list[str]:
    """The presets that come with the package."""
    folder = resources.files("videotune") / "presets"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


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
    for known in classed:
        if known.lower() == wanted:
            return known
    same = [known for known, gb in classed.items() if gb and known.lower().removesuffix(f" {gb}gb") == wanted]
    if same:
        return max(same, key=lambda known: classed[known] or 0)
    near = difflib.get_close_matches(wanted, list(classed), 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise VideotuneError(f"there is no preset {name!r}{hint}  `videotune presets list` shows them all.")


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
    return dict(json.loads((resources.files("videotune") / "presets" / f"{known}.json").read_text(encoding="utf-8")))


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
        *sections, last = name.strip().split(".")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise VideotuneError(f"--set {word}: {section} is already a value")
        place[last] = value
    check_keys(out, "--set")
    return out


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts on top of each other; the last one wins, lists are replaced whole."""
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name == "optimizer" and isinstance(value, str):  # short for its name; the other keys keep what they are
                value = {"name": value}
            both = isinstance(value, Mapping) and isinstance(out.get(name), Mapping)
            out[name] = merge(out[name], value) if both else value
    return out


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict by dotted names; lists are values."""
    out: dict[str, Any] = {}
    for name, inner in value.items():
        out |= flatten(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {f"{prefix}{name}": inner}
    return out


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Raise VideotuneError for the first key that does not exist, with the nearest name in its right section."""
    known = set(leaves())
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    rows = raw["datasets"] if isinstance(raw.get("datasets"), list) else []
    inside = [f"datasets.{key}" for row in rows if isinstance(row, Mapping) for key in row]
    for name in [*flatten(raw), *inside]:
        if name in known or name in sections:
            continue
        raise VideotuneError(f"{where}: unknown key {name!r}{_suggest(name, known)}")


def _suggest(name: str, known: set[str]) -> str:
    """The key of the likest last part, in the section that was named if it is there, else in each that has it."""
    section, _, last = name.rpartition(".")
    inside = [key.rpartition(".")[2] for key in sorted(known) if section and key.rpartition(".")[0] == section]
    everywhere = sorted({key.rpartition(".")[2] for key in known})
    close = difflib.get_close_matches(last, inside, 1, 0.6) or difflib.get_close_matches(last, everywhere, 1, 0.6)
    ending = [key for key in sorted(known) if key.rpartition(".")[2] in close]
    near = [key for key in ending if key.rpartition(".")[0] == section] or ending
    near = near or difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `videotune presets keys` lists every key"
