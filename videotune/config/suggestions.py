"""What a user may have meant: names that other trainers give to a key or a value, and their config files recognised."""

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
    """By other trainers: their names of our "keys", their words for our "values", in capitals, and their "files"."""
    return dict(read_json(Path(__file__).with_name("other_trainers.json")))


def nearest_key(name: str, known: Collection[str]) -> str:
    """The end of a sentence on an unknown key: the keys that it may stand for, in the section that was named if possible."""
    section, _, last = name.rpartition(".")
    theirs: Mapping[str, str | None] = others()["keys"]
    if last.lower() in theirs:
        ours = theirs[last.lower()]
        return did_you_mean([ours] if ours else [], "; videotune has no such key")
    inside = [
        key.rpartition(".")[2]
        for key in sorted(known)
        if section and key.rpartition(".")[0] == section
    ]
    everywhere = sorted({key.rpartition(".")[2] for key in known})
    close = difflib.get_close_matches(last, inside, 1, 0.6) or difflib.get_close_matches(
        last, everywhere, 1, 0.6
    )
    ending = [key for key in sorted(known) if key.rpartition(".")[2] in close]
    near = [key for key in ending if key.rpartition(".")[0] == section] or ending
    near = near or difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return did_you_mean(near, "; `videotune presets keys` lists every key")


def nearest_value(value: object, allowed: Sequence[str]) -> str:
    """The end of a sentence on a word that a key does not take; empty where no allowed word is near."""
    asked = str(value).upper()
    plain = {word.upper().replace("_", ""): word for word in allowed}
    meant = others()["values"].get(asked)
    found = (
        [meant]
        if meant in allowed
        else difflib.get_close_matches(asked.replace("_", ""), list(plain), 1, 0.7)
    )
    return did_you_mean(plain.get(word.upper().replace("_", ""), word) for word in found)


def other_trainer(raw: object) -> Mapping[str, Any] | None:
    """Whose config file this is, by its keys: "trainer", "keys", and what else the table says; None: not known."""
    held = {
        re.sub("^-+", "", part)
        for key in flat_leaves(raw)
        for part in accumulate(key.split("."), "{}.{}".format)
    }
    held |= {plain(key) for key in held}
    return next((kind for kind in others()["files"] if held.issuperset(kind["keys"])), None)


def plain(key: str) -> str:
    """A dotted key with N in the place of each index: "datasets.0.path" is "datasets.N.path"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "N", key)


def flat_leaves(value: object, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a nested value by its dotted key; lists without objects, and empty objects, are leaves."""
    rows = (
        value
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value)
        else []
    )
    inner: Iterable[tuple[Any, Any]] = (
        value.items() if isinstance(value, Mapping) else enumerate(rows)
    )
    found = {
        key: leaf
        for name, one in inner
        for key, leaf in flat_leaves(one, f"{prefix}{name}.").items()
    }
    return found or {prefix.removesuffix("."): value}
