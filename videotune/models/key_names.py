"""Names of weights in other layouts: rules that rename a key, and the rules of each
family's files.
"""

import re
from collections.abc import Iterable, Sequence

from videotune.models.discovery import import_families

KeyRules = Sequence[tuple[str, str]]
"""Regular expressions and their replacements, applied one after the other."""

_FILE_RULES: dict[str, dict[str, tuple[KeyRules, ...]]] = {}
"""By the network's class name and then by the family."""


def rename_key(key: str, rules: KeyRules) -> str:
    """Return a key after each of the replacements."""
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key


def add_file_rules(network: str, family: str, layouts: Iterable[KeyRules]) -> None:
    """Register the layouts in which a family's network may be stored in a single file.

    Args:
        network: class name of the network in diffusers.
        family: name of the family.
        layouts: for each layout the rules from diffusers' keys to the file's.
    """
    _FILE_RULES.setdefault(network, {})[family] = tuple(layouts)


def file_rules(network: str) -> list[KeyRules]:
    """Return the rules of each layout in which a network of this class may be stored."""
    import_families()
    by_family = _FILE_RULES.get(network, {})
    layouts: list[KeyRules] = []
    for family in sorted(by_family):
        layouts += by_family[family]
    return layouts
