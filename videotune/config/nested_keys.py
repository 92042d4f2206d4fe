"""Keys of a config as nested dicts, and by dotted names."""

from collections.abc import Mapping
from typing import Any

from videotune.errors import VideotuneError


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts. The last one wins, and lists are replaced whole."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            # An optimizer's name is short for the section; its other keys stay as they
            # are.
            if name == "optimizer" and isinstance(value, str):
                value = {"name": value}
            are_sections = isinstance(value, Mapping) and isinstance(
                merged.get(name), Mapping
            )
            merged[name] = merge(merged[name], value) if are_sections else value
    return merged


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested dicts.

    Raises VideotuneError for a name that is a value and a section.
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise VideotuneError(
                    f"{name}: {section} is a value and holds no keys. Leave one of them out"
                )
        inner[last] = value
    return nested


OPEN_KEYS = frozenset(("optimizer.args",))
"""Keys whose value is an object with any names."""


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn a nested dict into one by dotted names. Lists are values."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping) and f"{prefix}{name}" not in OPEN_KEYS:
            flat |= flatten(inner, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = inner
    return flat
