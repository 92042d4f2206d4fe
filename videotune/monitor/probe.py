"""Which windows of a set are looked at again and again; importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from videotune.types import Window

PROBE = 8
"""How many windows of a set are read at most; chosen evenly over the set."""


def spread(windows: Sequence[Window], count: int = PROBE) -> tuple[Window, ...]:
    """At most ``count`` windows, evenly over the sequence."""
    if len(windows) <= count:
        return tuple(windows)
    return tuple(windows[i * len(windows) // count] for i in range(count))
