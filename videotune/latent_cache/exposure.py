"""Exposure: how often the run shows each window and each clip. A prior on over-fitting, never a stop by itself."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from videotune.types import Window

BANDS = ((10.0, "conservative"), (50.0, "moderate"), (100.0, "high"))
"""Half-open: [0, 10) conservative, [10, 50) moderate, [50, 100) high, and from 100 on risky."""

TARGETS = (10, 20, 50, 100)
"""Views for which a plan says the steps: where the bands begin, and the 20 of the low rate."""

CLIP_DIGITS = 12
"""So many digits of a clip's id name it, as in windows' ids."""

LOW_RATE = 4e-5
"""At or below this learning rate, 20 to 30 views of a clip should still be safe."""


@dataclass(frozen=True)
class Exposure:
    """Views of each window and of each clip (the sum over its windows); ``regularization`` names windows and clips.

    Those are counted but decide no band: they are shown to keep the model as it is, and often.
    """

    windows: Mapping[str, int]
    clips: Mapping[str, int]
    regularization: frozenset[str] = frozenset()

    def to_json(self, learning_rate: float) -> dict[str, Any]:
        """The plan's ``views``; ranges, band and advice are those of the training windows alone."""
        out = self._ranges() | {
            "clips": dict(self.clips),
            "advice": advice(most(self), learning_rate),
        }
        aside = [views for name, views in self.windows.items() if name in self.regularization]
        return out | {"regularization": _range(aside)} if aside else out

    def so_far(self) -> dict[str, Any]:
        """The journal's line: ranges and band of the training windows, how many windows had how many views, and each clip's.

        Clips by the first digits of their ids, as windows name them.
        """
        counts = sorted(Counter(self._trained(self.windows)).items())
        return self._ranges() | {
            "windows": {str(views): count for views, count in counts},
            "clips": {name[:CLIP_DIGITS]: views for name, views in self.clips.items()},
        }

    def _ranges(self) -> dict[str, Any]:
        windows = _range(self._trained(self.windows)) | {"band": band(most(self))}
        return {"per_window": windows, "per_clip": _range(self._trained(self.clips))}

    def less(self, other: Exposure) -> Exposure:
        """The views of both, subtracted: what came between two steps of one stream."""
        windows = {name: count - other.windows[name] for name, count in self.windows.items()}
        clips = {name: count - other.clips[name] for name, count in self.clips.items()}
        return Exposure(windows, clips, self.regularization)

    def more(self, views: Mapping[str, int], windows: Sequence[Window]) -> Exposure:
        """With the views by window id that the ``windows`` had before."""
        clip_of = {window.id: window.clip_id for window in windows}
        shown = dict(self.windows)
        clips = dict(self.clips)
        for name, count in views.items():
            if name in shown:
                shown[name] += count
                clips[clip_of[name]] += count
        return Exposure(shown, clips, self.regularization)

    def _trained(self, views: Mapping[str, int]) -> list[int]:
        return [count for name, count in views.items() if name not in self.regularization]


def _range(values: Collection[int]) -> dict[str, Any]:
    if not values:
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": min(values), "mean": round(sum(values) / len(values), 2), "max": max(values)}


def exposure(
    views: Sequence[Sequence[int]],
    buckets: Sequence[Sequence[Window]],
    regularization: Collection[str] = (),
) -> Exposure:
    """Draws of each entry by the schedule -> views by window (over all its entries) and by clip.

    ``regularization``: the ids of the clips that are shown to keep the model as it is.
    """
    keeping = frozenset(regularization)
    aside = set[str]()
    windows = Counter[str]()
    clips = Counter[str]()
    for counts, bucket in zip(views, buckets, strict=True):
        for count, window in zip(counts, bucket, strict=True):
            windows[window.id] += count
            clips[window.clip_id] += count
            if window.clip_id in keeping:
                aside |= {window.id, window.clip_id}
    return Exposure(windows, clips, frozenset(aside))


def most(shown: Exposure) -> int:
    """Views of the training window that is shown most."""
    return max(shown._trained(shown.windows), default=0)


def steps_for(views: int, shown_after: Callable[[int], Exposure], guess: float) -> int:
    """The first step after which the most shown training window has so many views, by what is shown after each step.

    ``guess``: steps for one view, near which it is looked for first.
    """
    low = 0
    high = max(1, round(views * guess) + 1)
    while most(shown_after(high)) < views:
        low = high
        high = 2 * high
    near = max(low, round((views - 2) * guess) - 1)
    low = near if most(shown_after(near)) < views else low
    return low + bisect_left(range(low, high), views, key=lambda step: most(shown_after(step)))


def band(views: float) -> str:
    """The band of a number of views."""
    return next((name for limit, name in BANDS if views < limit), "risky")


def advice(views: float, learning_rate: float) -> str:
    """The band in a sentence, with what a low learning rate changes."""
    words = {
        "conservative": "fewer than 10 views a window: strong generalisation, perhaps too little learning",
        "moderate": "10 to 50 views a window: balanced",
        "high": "50 to 100 views a window: watch the previews for copies of the clips",
        "risky": "100 views a window or more: likely to copy the clips; more clips or fewer steps would help",
    }[band(views)]
    slow = f"; at a rate of {learning_rate:g} up to 20-30 views should be safe"
    return words + (slow if learning_rate <= LOW_RATE else "")
