"""What validation reads: which windows, and at which noise levels; importing this imports no torch."""

from collections.abc import Sequence
from typing import TypeVar

from videotune.types import Window

T = TypeVar("T")

QUANTILES = 9
"""Noise levels of a validation."""

TURNS = 3
"""Each clip is read at every third noise level, the next clip at the next ones: a third of the passes, all levels."""

MOST_WINDOWS, LEAST_WINDOWS = 24, 6
"""How many windows are read. Two thirds are held out: what tells copying from learning is the scatter over these."""


def spread(items: Sequence[T], count: int) -> tuple[T, ...]:
    """At most ``count`` items, evenly over the sequence."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[i * len(items) // count] for i in range(count))


def validation_windows(
    held_out: Sequence[Window], training: Sequence[Window], most: int
) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """At most so many that validation reads: (held-out, training)."""
    return spread_over_clips(held_out, most - most // 3), spread_over_clips(training, most // 3)


def levels_of(windows: Sequence[Window]) -> list[range]:
    """The noise levels at which each window is read, the same for all windows of a clip; the clips cover all levels."""
    clips = list(dict.fromkeys(window.clip_id for window in windows))
    turns = min(TURNS, len(clips))
    return [range(clips.index(window.clip_id) % turns, QUANTILES, turns) for window in windows]


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
