"""Whether samples show training clips again: the nearest clip of each, beside how near clips that are no copies come.

Similarity is the mean cosine of frames, at its greatest over views, both ways round and time (``similarities``). How near
unrelated clips come differs from one set of clips to another, so no number is a copy by itself: see ``Baselines``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_WINDOWS = 256
"""So many windows are compared with at most."""

MOST_FRAMES = 18
"""So many frames of a window are kept, every second or third of a longer one; more where samples are short.

Of every second frame, copies of what moves fast (a galloping horse) are half a pair of frames off, and come to 0.55
instead of 0.68."""

MOST_IN_ALL = 4608
"""So many frames are kept at most of all windows together: 150 MB of the heuristic's vectors."""

MOST_QUERIES = 64
"""So many clips say at most how near clips come that are no copies."""

QUANTILE = 0.99
SHARE_OF_THE_WAY = 1 / 4
"""A copy is nearer than 99 % of clips that are none by a quarter of what is missing to sameness: of 40 planted copies the
least similar came to 0.74, of 200 unrelated clips the most similar to 0.64, with the line at 0.72 (docs/copies.json)."""


@dataclass(frozen=True)
class Known:
    """A window to compare samples with: its clip, the video that this was cut from, and its ``in_views`` (V, F, D)."""

    clip: str
    source: str
    views: Tensor


@dataclass(frozen=True)
class Nearest:
    """The clip that something comes nearest to, and how near, -1 to 1."""

    clip: str
    similarity: float


class Gallery:
    """Windows side by side, those of equally many frames in one tensor, so that a comparison is one product."""

    def __init__(self, known: Iterable[Known]) -> None:
        by_length: dict[int, list[Known]] = {}
        for one in known:
            by_length.setdefault(one.views.shape[1], []).append(one)
        self._groups = [(group, torch.stack([one.views for one in group])) for group in by_length.values()]
        self.known: tuple[Known, ...] = tuple(one for group, _ in self._groups for one in group)

    def similarities(self, seen: Tensor) -> Tensor:
        """How near ``seen``, ``both_ways`` (2, T, D) of a clip, comes to each of ``known``: (windows,)."""
        return torch.cat([similarities(seen, views) for _, views in self._groups])

    def nearest(self, seen: Tensor, but: str | None = None) -> Nearest | None:
        """The nearest clip to ``seen``; none of the source ``but``. None where there is no other."""
        allowed = torch.tensor([one.source != but for one in self.known])
        if not allowed.any():
            return None
        found = self.similarities(seen).masked_fill(~allowed, -2)
        place = int(found.argmax())
        return Nearest(self.known[place].clip, float(found[place]))


def similarities(seen: Tensor, views: Tensor) -> Tensor:
    """How near a clip (2, T, D) comes to each of others (N, V, F, D): (N,), the greatest over both ways, views and starts.

    Frames of both are equally far apart in time. Of a longer clip only the beginning is compared with a shorter one.
    """
    length = views.shape[2]
    cosines = torch.einsum("mtd,nvfd->mnvtf", seen[:, :length], views)
    frames = cosines.shape[3]
    starts = [
        torch.stack([cosines[..., i, start + i] for i in range(frames)]).mean(0) for start in range(length - frames + 1)
    ]
    return torch.stack(starts).amax((0, 1, 3))


@dataclass(frozen=True)
class Baselines:
    """How near clips come that are no copies of what they are compared with.

    ``held_out``: held-out clips to training clips; ``others``: training clips to those cut from other videos. Either may be
    empty: no clip is held out, all clips are of one video.
    """

    held_out: tuple[float, ...]
    others: tuple[float, ...]

    def line(self, base: Sequence[float] = ()) -> float | None:
        """The similarity above which a sample is a likely copy.

        From the 99th percentile of both baselines a quarter of the way to 1; where both are empty, from the nearest of
        ``base``, the base model's samples. None where there is nothing to compare with.
        """
        pool = [*self.held_out, *self.others]
        if not pool and not base:
            return None
        usual = float(np.quantile(pool, QUANTILE)) if pool else max(base)
        return usual + (1 - usual) * SHARE_OF_THE_WAY

    def to_json(self) -> dict[str, Any]:
        """For each baseline {clips, median, p99}; null where it is empty."""
        return {name: _summary(values) for name, values in (("held_out", self.held_out), ("others", self.others))}


def baselines(
    gallery: Gallery, held_out: Mapping[str, Sequence[Tensor]], training: Sequence[tuple[str, Tensor]]
) -> Baselines:
    """Both baselines. ``held_out``: ``both_ways`` of held-out clips by source; ``training``: (source, ``both_ways``)."""
    first = [gallery.nearest(seen, but=source) for source, several in held_out.items() for seen in several]
    second = [gallery.nearest(seen, but=source) for source, seen in training]
    return Baselines(*(tuple(one.similarity for one in part if one is not None) for part in (first, second)))


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    middle, high = np.quantile(values, [0.5, QUANTILE])
    return {"clips": len(values), "median": round(float(middle), 4), "p99": round(float(high), 4)}
