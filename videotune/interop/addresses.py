"""Addresses for messages in a translated config: collected, and kept out of what is
printed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from videotune.config.notify_addresses import HIDDEN, masked, masked_list
from videotune.interop.translated_key import TranslatedKey

KEY = "notify"

STUDIO_NOTE = (
    "all who may open the studio can see its settings: put the address into an "
    "environment variable of the studio, and its name into notify"
)

_SECRET_NAME = re.compile(r"url|token|secret|auth|header|password|key", re.IGNORECASE)


def with_all_addresses(rows: Sequence[TranslatedKey]) -> list[TranslatedKey]:
    """Return the rows with the addresses of all of them in each row that has some."""
    addresses: list[str] = []
    for row in rows:
        addresses += row.ours.get(KEY, [])
    unique_addresses = list(dict.fromkeys(addresses))

    result = []
    for row in rows:
        if KEY in row.ours:
            row = replace(row, ours=row.ours | {KEY: unique_addresses})
        result.append(row)
    return result


def masked_rows(
    rows: Iterable[TranslatedKey], patterns: Sequence[str]
) -> tuple[TranslatedKey, ...]:
    """Return the rows without secrets.

    Args:
        rows: the rows.
        patterns: names of keys of the other trainer that may hold secrets.
    """
    result = []
    for row in rows:
        ours = row.ours
        if KEY in ours:
            ours = ours | {KEY: masked_list(ours[KEY])}
        theirs = row.theirs
        if any(fnmatchcase(row.key, pattern) for pattern in patterns):
            theirs = _masked_value(row.key, theirs)
        result.append(replace(row, ours=ours, theirs=theirs))
    return tuple(result)


def _masked_value(key: str, value: Any) -> Any:
    """Return a value of a key that may hold a secret, as it may be shown."""
    if isinstance(value, list):
        return [_masked_value(key, item) for item in value]
    if not isinstance(value, str):
        return value
    has_secret_name = _SECRET_NAME.search(key.rpartition(".")[2]) is not None
    is_json = value.lstrip()[:1] in ("{", "[")
    if "://" in value:
        return masked(value.strip())
    return HIDDEN if is_json or has_secret_name else value


def masked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return videotune's config as it may be shown."""
    shown = dict(config)
    if KEY in shown:
        shown[KEY] = masked_list(shown[KEY])
    return shown


def without_addresses(rows: Iterable[TranslatedKey]) -> tuple[TranslatedKey, ...]:
    """Return the rows without addresses, and with a note that says why."""
    result = []
    for row in rows:
        if KEY in row.ours:
            ours = {key: value for key, value in row.ours.items() if key != KEY}
            row = replace(row, ours=ours, verdict="none", note=STUDIO_NOTE)
        result.append(row)
    return tuple(result)
