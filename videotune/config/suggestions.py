"""What a user may have meant: names that other trainers give to a key or a value, and their config files recognised."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from videotune.errors import did_you_mean


@lru_cache
def _others() -> dict[str, Any]:
    text = (resources.files("videotune") / "config" / "other_trainers.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def other_values() -> Mapping[str, str]:
    """Words that other trainers give to a value, in capitals, and ours for them."""
    return dict(_others()["values"])


def nearest_key(name: str, known: Collection[str]) -> str:
    """The end of a sentence on an unknown key: the keys that it may stand for, in the section that was named if possible."""
    section, _, last = name.rpartition(".")
    theirs: Mapping[str, str | None] = _others()["keys"]
    if last.lower() in theirs:
        ours = theirs[last.lower()]
        return did_you_mean([ours] if ours else [], "; videotune has no such key")
    inside = [key.rpartition(".")[2] for key in sorted(known) if section and key.rpartition(".")[0] == section]
    everywhere = sorted({key.rpartition(".")[2] for key in known})
    close = difflib.get_close_matches(last, inside, 1, 0.6) or difflib.get_close_matches(last, everywhere, 1, 0.6)
    ending = [key for key in sorted(known) if key.rpartition(".")[2] in close]
    near = [key for key in ending if key.rpartition(".")[0] == section] or ending
    near = near or difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return did_you_mean(near, "; `videotune presets keys` lists every key")


def nearest_value(value: object, allowed: Sequence[str]) -> str:
    """The end of a sentence on a word that a key does not take; empty where no allowed word is near."""
    asked = str(value).upper()
    plain = {word.upper().replace("_", ""): word for word in allowed}
    meant = _others()["values"].get(asked)
    found = [meant] if meant in allowed else difflib.get_close_matches(asked.replace("_", ""), list(plain), 1, 0.7)
    return did_you_mean(plain.get(word.upper().replace("_", ""), word) for word in found)


def other_trainer(raw: object) -> str | None:
    """Whose config file this is, by its top-level keys; None where it is not known."""
    if not isinstance(raw, Mapping):
        rows = raw if isinstance(raw, list) else []
        return other_trainer(rows[0]) if rows and isinstance(rows[0], Mapping) else None
    return next((name for name, keys in _others()["files"] if all(key in raw for key in keys)), None)
