"""Which paths of a model a list of patterns names; one rule for adapters' modules and for layers to train."""

from __future__ import annotations

import re
from collections.abc import Sequence

from videotune.errors import VideotuneError


def named_by(paths: Sequence[str], patterns: Sequence[str], key: str, what: str) -> set[str]:
    """The paths that any of the patterns names: a whole path as a regular expression, or its last parts.

    Raises VideotuneError, beginning with the config's ``key``, for a pattern that is not valid or names no ``what``.
    """
    found: set[str] = set()
    for pattern in patterns:
        try:
            whole = re.compile(pattern)
        except re.error as error:
            raise VideotuneError(f"{key}: {pattern!r} is not a valid pattern: {error}") from error
        hits = {path for path in paths if whole.fullmatch(path) or f".{path}".endswith(f".{pattern}")}
        if not hits:
            raise VideotuneError(f"{key}: {pattern!r} matches no {what}, such as {', '.join(paths[:3])}")
        found |= hits
    return found


def grouped(paths: Sequence[str]) -> dict[str, int]:
    """How many paths there are of each kind, a block's number written as *, in the model's order."""
    groups: dict[str, int] = {}
    for path in paths:
        kind = re.sub(r"(?<=[a-z_]\.)\d+(?=\.)", "*", path, count=1)
        groups[kind] = groups.get(kind, 0) + 1
    return groups
