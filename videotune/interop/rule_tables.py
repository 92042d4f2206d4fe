"""The rules by which keys of another trainer's config are translated: a JSON file for
each trainer.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.config import suggestions
from videotune.files import read_json


@lru_cache
def load_rules(name: str) -> dict[str, Any]:
    """Read the rules for a trainer from its JSON file."""
    return dict(read_json(Path(__file__).with_name(f"{name}.json")))


def rule_for(
    table: Mapping[str, Any], key: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rule for a key: by its name, or the first pattern that matches.

    Of a list of rules it is the first whose conditions hold.
    """
    candidates = _matching_rules(table, suggestions.plain(key))
    for rule in candidates if isinstance(candidates, list) else [candidates]:
        if isinstance(rule, str):
            return {"to": rule}
        if conditions_hold(rule.get("when", {}), key, values):
            return dict(rule)
    return {"note": "it has no effect with the other values of this config"}


def _matching_rules(table: Mapping[str, Any], name: str) -> Any:
    rules = table["rules"]
    if rules.get(name):
        return rules[name]

    patterns: dict[str, Any] = {}
    for note, note_patterns in table.get("none", {}).items():
        for pattern in note_patterns:
            patterns[pattern] = {"note": note}
    patterns.update(rules)
    for pattern, rule in patterns.items():
        if fnmatchcase(name, pattern):
            return rule
    return {"unknown": 1, "note": "no rule knows this key"}


def indices_in(key: str) -> list[str]:
    """Return the indices of lists in a key, such as ["0"] of "datasets.0.path"."""
    return [part for part in key.split(".") if part.isdecimal()]


def related_value(pattern: str, key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of another key; N in its name stands for the index that ``key``
    has. ".*" at its end stands for any key of that section.
    """
    indices = iter(indices_in(key))
    parts = []
    for part in pattern.split("."):
        parts.append(next(indices, "0") if part == "N" else part)
    if parts[-1] != "*":
        return values.get(".".join(parts))
    section = ".".join(parts[:-1])
    for name, value in values.items():
        if f"{name}.".startswith(f"{section}."):
            return value
    return None


def conditions_hold(
    conditions: Mapping[str, str], key: str, values: Mapping[str, Any]
) -> bool:
    """Return whether other keys have certain values.

    A condition is a list of patterns separated by |; an empty pattern matches a missing
    value. "=KEY" is the value of another key.
    """
    for name, patterns in conditions.items():
        value = related_value(name, key, values)
        if patterns.startswith("="):
            if value != related_value(patterns[1:], key, values):
                return False
            continue
        text = "" if value is None else str(value).lower()
        if not any(fnmatchcase(text, pattern) for pattern in patterns.split("|")):
            return False
    return True
