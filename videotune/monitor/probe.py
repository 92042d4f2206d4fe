"""Which windows are looked at again and again, and at how many noise levels; importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from videotune.types import Window

T = TypeVar("T")

QUANTILES = 9
"""Noise levels at which the ruler reads a window."""

OF_HELD_OUT = 16
"""How many held-out windows the ruler reads at most: what tells copying from learning is the scatter over these."""

OF_TRAINING = 8
"""How many training windows it reads at most: of these the mean alone counts."""


def spread(items: Sequence[T], count: int) -> tuple[T, ...]:
    """At most ``count`` items, evenly over the sequence."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[i * len(items) // count] for i in range(count))


def read_by_ruler(
    held_out: Sequence[Window], training: Sequence[Window]
) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """Those that the ruler reads: (held-out, training)."""
    return spread_over_clips(held_out, OF_HELD_OUT), spread_over_clips(training, OF_TRAINING)


def spread_over_clips(windows: Sequence[Window], count: int) -> tuple[Window, ...]:
    """At most ``count`` windows, evenly over the clips: a second one of a clip only where each clip has one.

    Of each clip the window in its middle goes first. Without this a few long clips would take all places.
    """
    of_clip: dict[str, list[int]] = {}
    for place, window in enumerate(windows):
        of_clip.setdefault(window.clip_id, []).append(place)
    middles = {own[len(own) // 2] for own in of_clip.values()}
    chosen = spread(sorted(middles), count)
    rest = [place for place in range(len(windows)) if place not in middles] if len(chosen) < count else []
    return tuple(windows[place] for place in sorted((*chosen, *spread(rest, count - len(chosen)))))
