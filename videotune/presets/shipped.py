"""The presets that come with the package, by name."""

import difflib
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json

PRESETS = Path(__file__).parent

DESCRIPTIONS = ("about", "why")
"""Entries of a preset that are no keys of a config."""


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return list(_names())


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def read_preset(name: str) -> dict[str, Any]:
    """Return the keys of a preset, by its name as ``preset_named`` takes it."""
    contents = _preset(preset_named(name))
    keys = {key: value for key, value in contents.items() if key not in DESCRIPTIONS}
    return deepcopy(keys)


@cache
def preset_named(name: str) -> str:
    """Return a preset's full name.

    A leading ``#``, the ending ``.json`` and its class of memory (16GB) may be left
    out. Without its class it is the one for the largest GPUs. Raises VideotuneError
    with the nearest name.
    """
    wanted = name.removeprefix("#").removesuffix(".json").strip().lower()
    memory_classes = {preset: memory_class(preset) for preset in preset_names()}

    matches = []
    for preset, gigabytes in memory_classes.items():
        without_class = preset.lower().removesuffix(f" {gigabytes}gb")
        if wanted in (preset.lower(), without_class):
            matches.append(preset)
    if matches:
        exact_then_largest = [
            (preset.lower() == wanted, memory_classes[preset] or 0, preset)
            for preset in matches
        ]
        return max(exact_then_largest, key=lambda entry: entry[:2])[2]

    wanted_words = set(_words_of(wanted))
    similar = [
        preset
        for preset in memory_classes
        if wanted_words <= set(_words_of(preset.lower()))
    ]
    similar.sort(key=lambda preset: memory_classes[preset] or 0)
    if wanted_words:
        similar = list(dict.fromkeys([*_other_sizes(wanted, memory_classes), *similar]))
    if not wanted_words or not similar:
        similar = difflib.get_close_matches(wanted, list(memory_classes), 1, 0.4)
    raise VideotuneError(
        f"there is no preset {name!r}{did_you_mean(similar[:6])}  `videotune presets list` shows all."
    )


def _other_sizes(wanted: str, memory_classes: Mapping[str, int | None]) -> list[str]:
    """Return the presets of the same model and method for cards of another size.

    Args:
        wanted: a preset's name in lower case.
        memory_classes: GB of each preset's card.
    """
    without_size = re.sub(r" \d+ ?gb$", "", wanted)
    return [
        preset
        for preset, gigabytes in memory_classes.items()
        if preset.lower().removesuffix(f" {gigabytes}gb") == without_size
    ]


def _words_of(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[\d.]+", name)


def memory_class(preset: str) -> int | None:
    """Return the GB of the GPUs that a preset is for, as its name ends, or None if it
    names none.
    """
    ending = re.search(r" (\d+)GB$", preset)
    return int(ending[1]) if ending else None


def preset_about(name: str) -> str:
    """Return a preset's description, one line."""
    return str(_preset(preset_named(name)).get("about", ""))


def preset_card(name: str) -> int | None:
    """Return the GB of the cards that a preset is for, or None if it is for any."""
    card = re.search(r"cards of (\d+) GB", preset_about(name))
    return int(card[1]) if card else None


def preset_reasons(name: str) -> dict[str, str]:
    """Return why each key of a preset has its value, by dotted name."""
    return dict(_preset(preset_named(name)).get("why", {}))


@cache
def _preset(full_name: str) -> Mapping[str, Any]:
    """Return the contents of a preset's file, which is read once."""
    contents: Mapping[str, Any] = read_json(PRESETS / f"{full_name}.json")
    return contents
