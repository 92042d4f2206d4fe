"""What the ruler reads: which windows, and at how many noise levels; importing this imports no torch."""

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


def validation_windows(
    held_out: Sequence[Window], training: Sequence[Window]
) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """Those that the ruler reads: (held-out, training)."""
    return spread_over_clips(held_out, OF_HELD_OUT), spread_over_clips(training, OF_TRAINING)


def spread_over_clips(windows: Sequence[Window], count: int) -> tuple[Window, ...]:
    """At most ``count`` windows, evenly over the clips: a second one of a clip only where each clip has one, and so on.

    Of a clip with one place the window in its middle. Without this a few long clips would take all places.
    """
    of_clip: dict[str, list[int]] = {}
    for place, window in enumerate(windows):
        of_clip.setdefault(window.clip_id, []).append(place)
    clips = spread(list(of_clip.values()), count)
    shares, left = [0] * len(clips), min(count, sum(map(len, clips)))
    while left:
        for number, own in enumerate(clips):
            if left and shares[number] < len(own):
                shares[number], left = shares[number] + 1, left - 1
    chosen = [place for own, share in zip(clips, shares, strict=True) for place in middles(own, share)]
    return tuple(windows[place] for place in sorted(chosen))


def middles(places: Sequence[int], count: int) -> list[int]:
    """The middles of ``count`` equal parts of a sequence."""
    return [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]
