"""One key of another trainer's config, with its translation."""

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
