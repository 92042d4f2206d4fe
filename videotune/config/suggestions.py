"""Guess what a user meant: names that other trainers give to a key or a value, and
their config files.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from videotune.errors import did_you_mean
from videotune.files import read_json


@lru_cache
def others() -> dict[str, Any]:
    """Return other trainers' names of our "keys", their words for our "values" in
    capitals, and marks of their "files".
    """
    return dict(read_json(Path(__file__).with_name("other_trainers.json")))


def nearest_key(name: str, keys: Collection[str]) -> str:
    """Return the end of a sentence on an unknown key: the keys that it may stand for,
    in its own section if possible.
    """
    section, _, last = name.rpartition(".")
    their_names: Mapping[str, str | None] = others()["keys"]
    if last.lower() in their_names:
        our_name = their_names[last.lower()]
        our_names = [our_name] if our_name else []
        return did_you_mean(our_names, "; videotune has no such key")

    in_section = []
    everywhere = set()
    for key in sorted(keys):
        key_section, _, key_name = key.rpartition(".")
        everywhere.add(key_name)
        if section and key_section == section:
            in_section.append(key_name)
    close = _closest(last, in_section) or _closest(last, sorted(everywhere))

    matches = [key for key in sorted(keys) if key.rpartition(".")[2] in close]
    in_same_section = [key for key in matches if key.rpartition(".")[0] == section]
    nearest = in_same_section or matches
    if not nearest:
        nearest = _closest(name, sorted(keys))
    return did_you_mean(nearest, "; `videotune presets keys` lists every key")


def _closest(name: str, names: Sequence[str]) -> list[str]:
    """Return the name that is most alike, if any is alike enough."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.6)


def nearest_value(value: object, allowed: Sequence[str]) -> str:
    """Return the end of a sentence on a value that a key does not take; empty if no
    allowed value is near.
    """
    given_value = str(value).upper()
    meant = others()["values"].get(given_value)
    if meant in allowed:
        return did_you_mean([meant])

    allowed_by_letters = {}
    for name in allowed:
        letters = name.upper().replace("_", "")
        allowed_by_letters[letters] = name
    close = difflib.get_close_matches(
        given_value.replace("_", ""),
        list(allowed_by_letters),
        n=1,
        cutoff=0.7,
    )
    return did_you_mean([allowed_by_letters[match] for match in close])


def other_trainer(raw: object) -> Mapping[str, Any] | None:
    """Return the trainer whose config file this is, by its keys: "trainer", "keys" and
    more, or None if not known.
    """
    names: set[str] = set()
    for key in flat_leaves(raw):
        # "a.b.c" has the sections "a", "a.b" and "a.b.c".
        for section in accumulate(key.split("."), "{}.{}".format):
            names.add(re.sub("^-+", "", section))
    names |= {plain(name) for name in names}
    for trainer in others()["files"]:
        if names.issuperset(trainer["keys"]):
            return trainer
    return None


def plain(key: str) -> str:
    """Replace each index in a dotted key by N: "datasets.0.path" becomes
    "datasets.N.path".
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "N", key)


def flat_leaves(value: object, prefix: str = "") -> dict[str, Any]:
    """Return every leaf of a nested value by its dotted key.

    Lists without objects, and empty objects, are leaves.
    """
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list):
        has_objects = any(isinstance(item, Mapping) for item in value)
        children = enumerate(value) if has_objects else ()

    flat: dict[str, Any] = {}
    for name, inner in children:
        flat |= flat_leaves(inner, f"{prefix}{name}.")
    return flat or {prefix.removesuffix("."): value}
