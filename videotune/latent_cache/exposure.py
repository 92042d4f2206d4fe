"""Exposure: how often a run shows each window and each clip.

A prior on over-fitting; it never stops a run by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.clip_table import ClipColumns
from videotune.data.window_table import WindowTable
from videotune.latent_cache.view_bands import advice, band
from videotune.types import Window

TARGETS = (10, 20, 50, 100)
"""Views for which a plan gives the steps: where the bands begin, and the 20 of a low
rate.
"""

CLIP_DIGITS = 12
"""Digits of a clip's id that name it, as in windows' ids."""

MOST_STEPS = 10**9
"""Steps beyond which no number of views is looked for: datasets may end before."""


@dataclass(frozen=True)
class Exposure:
    """Views of each window and each clip."""

    windows: Mapping[str, int]
    """By window id."""
    clips: Mapping[str, int]
    """By clip id: the sum over its windows."""
    regularization: frozenset[str] = frozenset()
    """Ids of regularization windows and clips.

    They are counted but decide no band, for they are meant to be shown often.
    """

    def to_json(self, learning_rate: float) -> dict[str, Any]:
        """Return the plan's ``views``.

        Ranges, band and advice are those of the training windows only.
        """
        views = self.ranges()
        views["clips"] = dict(self.clips)
        views["advice"] = advice(most_views(self), learning_rate)

        regularization = [
            count
            for window_id, count in self.windows.items()
            if window_id in self.regularization
        ]
        if regularization:
            views["regularization"] = _range(regularization)
        return views

    def so_far(self) -> dict[str, Any]:
        """Return the journal's line: ranges and band, how many windows had how many
        views, and the views of each clip.

        Clips are named by the first digits of their ids, as windows name them.
        """
        windows_by_views = Counter(self._trained(self.windows))
        line = self.ranges()
        line["windows"] = {
            str(views): count for views, count in sorted(windows_by_views.items())
        }
        line["clips"] = {
            clip_id[:CLIP_DIGITS]: views for clip_id, views in self.clips.items()
        }
        return line

    def ranges(self) -> dict[str, Any]:
        """Return the least, mean and most views of a training window, with the band, and
        of a training clip.
        """
        per_window = _range(self._trained(self.windows)) | {
            "band": band(most_views(self))
        }
        return {"per_window": per_window, "per_clip": _range(self._trained(self.clips))}

    def minus(self, other: Exposure) -> Exposure:
        """Subtract the views of an earlier step of the same stream."""
        windows = {
            name: count - other.windows[name] for name, count in self.windows.items()
        }
        clips = {name: count - other.clips[name] for name, count in self.clips.items()}
        return Exposure(windows, clips, self.regularization)

    def plus(self, views: Mapping[str, int], windows: Sequence[Window]) -> Exposure:
        """Add views from before.

        Args:
            views: by window id.
            windows: the windows that there are now; views of others are ignored.
        """
        clip_of = {window.id: window.clip_id for window in windows}
        window_views = dict(self.windows)
        clip_views = dict(self.clips)
        for window_id, count in views.items():
            if window_id in window_views:
                window_views[window_id] += count
                clip_views[clip_of[window_id]] += count
        return Exposure(window_views, clip_views, self.regularization)

    def _trained(self, views: Mapping[str, int]) -> list[int]:
        return [
            count for name, count in views.items() if name not in self.regularization
        ]


def _range(values: Collection[int]) -> dict[str, Any]:
    if not values:
        return {"min": 0, "mean": 0.0, "max": 0}
    mean = round(sum(values) / len(values), 2)
    return {"min": min(values), "mean": mean, "max": max(values)}


def exposure(
    views: Sequence[Sequence[int]],
    buckets: Sequence[Sequence[Window]],
    regularization: Collection[str] = (),
) -> Exposure:
    """Sum the views of the buckets' positions by window and by clip.

    Args:
        views: views of each entry of each bucket.
        buckets: the window of each entry.
        regularization: ids of the regularization clips.
    """
    windows: Counter[str] = Counter()
    clips: Counter[str] = Counter()
    regularization_clips = frozenset(regularization)
    regularization_ids: set[str] = set()
    for bucket_views, bucket in zip(views, buckets, strict=True):
        for count, window in zip(bucket_views, bucket, strict=True):
            windows[window.id] += count
            clips[window.clip_id] += count
            if window.clip_id in regularization_clips:
                regularization_ids |= {window.id, window.clip_id}
    return Exposure(windows, clips, frozenset(regularization_ids))


def views_of_clips(
    views: Sequence[Sequence[int] | NDArray[np.int64]],
    buckets: Sequence[Sequence[Window]],
    columns: ClipColumns,
) -> NDArray[np.int64]:
    """Return the views of each clip (N,), -1 of those that no bucket has.

    Args:
        views: views of each position of each bucket.
        buckets: the window at each position.
        columns: the clips.
    """
    total = np.zeros(len(columns.ids), np.int64)
    has_position = np.zeros(len(columns.ids), bool)
    for bucket_views, bucket in zip(views, buckets, strict=True):
        table = WindowTable.of(bucket)
        owners = table.owners()
        clip_of_owner = columns.ids.positions(table.clip_ids)
        counts = np.bincount(
            owners, np.asarray(bucket_views), minlength=len(clip_of_owner)
        )
        is_used = np.zeros(len(clip_of_owner), bool)
        is_used[owners] = True
        np.add.at(total, clip_of_owner, counts.astype(np.int64))
        has_position[clip_of_owner[is_used]] = True
    return np.where(has_position, total, -1)


def most_views(exposure: Exposure) -> int:
    """Return the views of the training window that is shown most."""
    return max(exposure._trained(exposure.windows), default=0)


def steps_for(
    views: int, exposure_after: Callable[[int], Exposure], guess: float
) -> int | None:
    """Return the first step after which the most shown training window has ``views``
    views, or None if it never has them.

    Args:
        views: the views to reach.
        exposure_after: the exposure after a step.
        guess: about how many steps one view takes; the search starts near it.
    """

    def reached(step: int) -> int:
        return most_views(exposure_after(step))

    low = 0
    high = max(1, round(views * guess) + 1)
    while reached(high) < views:
        if high > MOST_STEPS:
            return None
        low = high
        high = 2 * high

    near = max(low, round((views - 2) * guess) - 1)
    if reached(near) < views:
        low = near
    return low + bisect_left(range(low, high), views, key=reached)
