"""One key of another trainer's config, with its translation."""

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TranslatedKey:
    """One key of the other trainer's config, and its translation."""

    key: str

    theirs: Any
    """The key's value."""

    verdict: str
    """The result.

    same: taken as it is; translated: taken under another name or with another value;
        none: there is no counterpart; differs: the key does something other than its
        name suggests; unknown: no rule knows the key; missing: a file that does not
        exist; the note says what is taken instead.
    """

    ours: dict[str, Any] = field(default_factory=dict)
    """videotune's keys and values."""

    note: str = ""
    source: str = ""

    given: bool = True
    """Whether the config has the key; False for a default of the trainer."""


def our_key(name: str) -> str:
    """Return a key of a row without the place of its dataset."""
    return re.sub(r"^datasets\.[\d_]*\.", "datasets.", name)


def short_key(key: str) -> str:
    """Return a key without the sections and numbers that all keys of its file have."""
    parts = [part for part in key.split(".") if not part.isdecimal()]
    common = ("config", "process", "dataset_config", "datasets", "general")
    return ".".join(part for part in parts if part not in common) or key
