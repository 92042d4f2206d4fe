"""Lists whose entries are keys of their own in another trainer's config."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from videotune.config.suggestions import plain
from videotune.interop.translated_key import TranslatedKey

JOINED = ("conditions", "samples")
"""videotune's keys whose entries may come from several keys of one list."""


def with_joined_lists(rows: Sequence[TranslatedKey]) -> list[TranslatedKey]:
    """Return the rows with the entries of all of a list in each row that has some.

    Rows belong to one list if their keys differ only in an index.
    """
    entries: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        for name in _joined_names(row):
            entries[name, plain(row.key)] += row.ours[name]

    result = []
    for row in rows:
        lists = {name: entries[name, plain(row.key)] for name in _joined_names(row)}
        result.append(replace(row, ours=row.ours | lists))
    return result


def _joined_names(row: TranslatedKey) -> list[str]:
    """Return the keys of videotune for which a row has entries of a list."""
    if plain(row.key) == row.key:
        return []
    return [name for name in JOINED if isinstance(row.ours.get(name), list)]
