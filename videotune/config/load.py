"""Read config files and ``--set`` options into nested dicts.

An unknown key is an error with the nearest name.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from videotune.bounds import (
    CONFIG_BYTES,
    CONFIG_DEPTH,
    CONFIG_NODES,
    KEY_PARTS,
    has_more_values,
    read_limited,
    too_deep,
)
from videotune.config.aliases import renamed
from videotune.config.nested_keys import flatten
from videotune.config.schema import leaves
from videotune.config.suggestions import nearest_key, other_trainer
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import walk_json
from videotune.pages import docs_page
from videotune.text import as_argument, shortened

MOST_LETTERS = 100_000
"""Letters of one value, at most."""

MOST_TOLD = 8
"""Faults that one message names, at most."""


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
    """Return the text of a config file.

    Raises VideotuneError if it is missing, too large or not UTF-8.
    """
    if not path.is_file():
        raise VideotuneError(f"config file not found: {path}")
    try:
        text = read_limited(path, CONFIG_BYTES, "a config").decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise VideotuneError(
            f"{path} is not UTF-8 text (byte {error.start}). Save the file as UTF-8"
        ) from error


def checked_keys(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys by today's names.

    Raises VideotuneError for an unknown key, and for values that cannot be used.
    """
    refuse_unreadable(value, where)
    value = renamed(value, where, warn)
    check_keys(value, where)
    return value


def _refuse_other_trainer(value: Any, path: Path) -> None:
    """Raise VideotuneError for another trainer's config, and for TOML, which only other
    trainers use.
    """
    trainer = other_trainer(value)
    if trainer and not _is_mostly_ours(value, trainer):
        raise VideotuneError(
            f"{path} looks like one of {trainer['trainer']}: `videotune import {as_argument(path)}` translates it"
        )
    if path.suffix.lower() == ".toml":
        raise VideotuneError(
            f"{path} is TOML; videotune reads JSON and YAML, with the keys that {docs_page('options')} lists"
        )


def _is_mostly_ours(value: Any, trainer: Mapping[str, Any]) -> bool:
    """Return whether a config has our keys, and only one of another trainer's by
    mistake.
    """
    if not isinstance(value, dict) or len(trainer["keys"]) >= 2:
        return False
    our_sections = {name.partition(".")[0] for name in leaves()}
    return 2 * sum(key in our_sections for key in value) > len(value)


def refuse_unreadable(value: Any, where: str) -> None:
    """Raise VideotuneError for values that cannot be used: texts that no file can hold,
    absurd sizes and depths.
    """
    for path, inner in walk_json(value):
        if len(path) > CONFIG_DEPTH:
            problem: str | None = f"is nested more than {CONFIG_DEPTH} deep"
        else:
            problem = _unreadable(inner)
        if problem:
            key = ".".join(map(str, path))[:200] or "the config"
            raise VideotuneError(f"{where}: {key} {problem}")

        key_problem = _unreadable(path[-1]) if path else None
        if key_problem:
            raise VideotuneError(f"{where}: a key {key_problem}")


def _unreadable(value: Any) -> str | None:
    """Return what is wrong with a text or a number, or None."""
    if isinstance(value, str):
        has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in value)
        if "\0" in value or has_surrogate:
            return "holds a character that no file name can hold"
        if len(value) > MOST_LETTERS:
            return f"has {len(value):,} letters; at most {MOST_LETTERS:,} are read"
    if isinstance(value, int) and abs(value) > 2**63:
        return "is a number of more than 64 bits"
    return None


def parsed(text: str, path: Path) -> Any:
    """Parse a text in YAML, TOML or JSON, as the name of its file says.

    Raises VideotuneError if it is not valid, has too many values or is nested too deep.
    """
    value = _parsed_value(text, path)
    if has_more_values(value, CONFIG_NODES):
        raise VideotuneError(
            f"{path} has more than {CONFIG_NODES:,} values: leave out what is no setting"
        )
    deep_key = too_deep(value, CONFIG_DEPTH)
    if deep_key is not None:
        raise VideotuneError(
            f"{path}: {shortened(deep_key)} is nested more than {CONFIG_DEPTH} deep"
        )
    return value


def _parsed_value(text: str, path: Path) -> Any:
    formats = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}
    format = formats.get(path.suffix.lower(), "JSON")
    try:
        if format == "YAML":
            return yaml.load(text, _Loader)
        if format == "TOML":
            _refuse_costly_toml(text)
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_each_once)
    except _DuplicateKey as error:
        raise VideotuneError(
            f"{path} has {error} twice. Leave one of them out"
        ) from error
    except RecursionError as error:
        raise VideotuneError(
            f"{path} is nested more than {CONFIG_DEPTH} deep"
        ) from error
    except json.JSONDecodeError as error:
        raise VideotuneError(
            f"{path} is not valid JSON: {error.msg}, line {error.lineno}, column {error.colno}"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        # Also a number of 5,000 digits, or a date that does not exist.
        reason = shortened(_problem(error))
        raise VideotuneError(f"{path} is not valid {format}: {reason}") from error


def _problem(error: Exception) -> str:
    """Return what is wrong in a file, with the line where a YAML parser names it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        problem = ": ".join(filter(None, [error.context, error.problem]))
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).replace('in "<unicode string>", ', "").split())


_QUOTED = re.compile(r"""'[^'\n]*(?:'|$)|"(?:\\.|[^"\\\n])*+(?:"|$)""", re.MULTILINE)
"""A quoted text of TOML in one line; one that is not closed ends with the line."""


_TOML_MARKS = re.compile(r"[=,.{\[]")
"""What a key, a part of a key, a table or a value of TOML brings with it."""


def _refuse_costly_toml(text: str) -> None:
    """Raise ValueError for a long dotted key, and for more values than a config has,
    either of which would occupy TOML's parser.
    """
    unquoted = _QUOTED.sub("q", text)
    if len(_TOML_MARKS.findall(unquoted)) > CONFIG_NODES:
        raise ValueError(f"it has more than {CONFIG_NODES:,} values")

    for part in re.split(r"[\n=,{}\[\]]", unquoted):
        if part.count(".") >= KEY_PARTS:
            raise ValueError(
                f"a key has more than {KEY_PARTS} parts: {shortened(part.strip())}"
            )


class _DuplicateKey(ValueError):
    """A key that is twice in one object.

    Readers of JSON and YAML would silently take the last.
    """


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict. Raises _DuplicateKey if a key is there twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _DuplicateKey(name)
        values[name] = value
    return values


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader for the YAML that a config needs: no tags, no aliases, and
    the scalars of YAML 1.2.

    A few nested aliases can stand for more values than fit into memory. YAML 1.1 reads
    1e-4 as text, 017 as 15, 1:30 as 90, and ``on`` as true; here numbers are read as in
    JSON.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._nodes += 1
        if self._nodes > CONFIG_NODES:
            raise yaml.YAMLError(f"it has more than {CONFIG_NODES:,} values")
        event = self.peek_event()
        unsupported = None
        if isinstance(event, yaml.AliasEvent):
            unsupported = "an alias (*name)"
        elif getattr(event, "tag", None) not in (None, "!"):
            unsupported = f"a tag ({event.tag})"
        if unsupported:
            line = event.start_mark.line + 1
            raise yaml.YAMLError(
                f"{unsupported} in line {line}, which is not read: write the value out"
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


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """Parse ``--set key.sub=value`` options into a nested dict.

    A value is JSON if it reads as JSON, else text.
    """
    values: dict[str, Any] = {}
    for option in sets:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise VideotuneError(f"--set takes key=value, not {option!r}")
        value = _set_value(option, text)

        # An optimizer's name is short for the section.
        if key.strip() == "optimizer" and isinstance(value, str):
            key = "optimizer.name"

        *sections, last = key.strip().split(".")
        if len(sections) > CONFIG_DEPTH:
            raise VideotuneError(f"--set {option[:80]}…: no key has that many sections")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise VideotuneError(f"--set {option}: {section} is already a value")
        inner[last] = value
    return checked_keys(values, "--set")


def _set_value(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        # A number of 5,000 digits, or brackets without an end.
        raise VideotuneError(f"--set {option[:80]}…: {str(error)[:100]}") from error


EPOCH_KEYS = {
    "steps": "epochs",
    **{
        key: f"{key}_epochs" for key in ("save_every", "validate_every", "sample_after")
    },
}
"""Keys in steps, with the key of the same meaning in passes over the data."""


def without_epochs_overridden(
    below: Mapping[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a layer without the keys in passes over the data (``epochs``, …) whose
    counterparts in steps a later layer sets.

    In one layer, passes over the data decide; a later layer decides over both.
    """
    remaining_keys = dict(below)
    for in_steps, in_epochs in EPOCH_KEYS.items():
        if above.get(in_steps) is not None and above.get(in_epochs) is None:
            remaining_keys.pop(in_epochs, None)
    return remaining_keys


def in_one_unit(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer without the lengths and intervals in steps that it also gives in
    passes over the data, which decide.

    A run records in steps what it was given in passes. On top of a run, the number of
    steps that does not count would look like a change.
    """
    return {
        name: value
        for name, value in layer.items()
        if layer.get(EPOCH_KEYS.get(name, "")) is None
    }


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Raise VideotuneError for keys that do not exist, each with the nearest name in
    its section.
    """
    keys = set(leaves())
    sections = {key.rsplit(".", 1)[0] for key in keys if "." in key}

    names = [re.sub(r"^datasets\.\d+\.", "datasets.", name) for name in flatten(raw)]
    datasets = raw.get("datasets")
    for dataset in datasets if isinstance(datasets, list) else []:
        if isinstance(dataset, Mapping):
            names += [f"datasets.{key}" for key in dataset]

    unknown = [name for name in dict.fromkeys(names) if name not in keys | sections]
    if not unknown:
        return
    faults = [
        f"unknown key {shortened(name)!r}{nearest_key(name, keys)}"
        for name in unknown[:MOST_TOLD]
    ]
    if len(unknown) > MOST_TOLD:
        faults.append(f"and {len(unknown) - MOST_TOLD} more")
    raise VideotuneError(f"{where}: {'; '.join(faults)}")
