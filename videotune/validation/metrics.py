"""Compare samples with clips: nearest clip, diversity of a set, and motion.

The similarity of two clips is the mean cosine of their frames, maximised over views,
mirroring and start frame. How similar unrelated clips are depends on the data set, so a
similarity by itself does not show a copy; ``Baselines`` gives the threshold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from videotune.validation.embeddings import GREY_WEIGHTS, resize_square, to_pictures

QUANTILE = 0.99

COPY_MARGIN = 1 / 4
"""Position of the copy threshold between the 99th percentile of unrelated clips and 1.

Of 40 planted copies the least similar came to 0.74, of 200 unrelated clips the most
similar to 0.64, with the threshold at 0.72 (research/copies.json).
"""


@dataclass(frozen=True)
class ReferenceWindow:
    """An embedded window that samples are compared with."""

    clip: str

    source: str
    """The video that the clip was cut from."""

    views: Tensor
    """The output of ``embed_views``, (V, T, D)."""


@dataclass(frozen=True)
class NearestClip:
    """The most similar clip, and its similarity, -1 to 1."""

    clip: str
    similarity: float


class Gallery:
    """Reference windows, stacked by frame count: a search is one product each."""

    def __init__(self, windows: Iterable[ReferenceWindow]) -> None:
        by_length: dict[int, list[ReferenceWindow]] = {}
        for window in windows:
            by_length.setdefault(window.views.shape[1], []).append(window)

        self._stacks: list[Tensor] = []
        ordered: list[ReferenceWindow] = []
        for group in by_length.values():
            self._stacks.append(torch.stack([window.views for window in group]))
            ordered.extend(group)
        self.windows = tuple(ordered)

    def nearest(
        self, sample: Tensor, exclude_source: str | None = None
    ) -> NearestClip | None:
        """Return the window nearest to a sample, or None if no window is left.

        Args:
            sample: output of ``embed_with_mirror``, (2, T, D).
            exclude_source: video whose windows are not compared.
        """
        is_allowed = torch.tensor(
            [window.source != exclude_source for window in self.windows]
        )
        if not is_allowed.any():
            return None

        scores = torch.cat([similarities(sample, views) for views in self._stacks])
        scores = scores.masked_fill(~is_allowed, -2)
        index = int(scores.argmax())
        return NearestClip(self.windows[index].clip, float(scores[index]))


def similarities(sample: Tensor, views: Tensor) -> Tensor:
    """Compare a clip with reference windows of one length.

    The frames of both must have the same spacing in time. Only the beginning of a
    longer sample is compared with a shorter window.

    Args:
        sample: (2, T, D), as it is and mirrored.
        views: (N, V, F, D).

    Returns:
        (N,), the maximum over mirroring, views and start frame.
    """
    length = views.shape[2]
    cosines = torch.einsum("mtd,nvfd->mnvtf", sample[:, :length], views)
    starts = range(length - cosines.shape[3] + 1)
    means = [cosines.diagonal(start, 3, 4).mean(-1) for start in starts]
    return torch.stack(means).amax((0, 1, 3))


@dataclass(frozen=True)
class Baselines:
    """Similarities of clips that are not copies of the clips they are compared with."""

    held_out: tuple[float, ...]
    """Held-out clips to training clips; empty if no clip is held out."""

    others: tuple[float, ...]
    """Training clips to those of other videos; empty if all are of one video."""

    def line(self, base: Sequence[float] = ()) -> float | None:
        """Return the similarity above which a sample is a likely copy.

        The threshold is a quarter of the way from the 99th percentile of both baselines
        to 1. If both are empty, the most similar base sample replaces the percentile.

        Args:
            base: similarities of the base model's samples.

        Returns:
            The threshold, or None if there is nothing to compare with.
        """
        unrelated = [*self.held_out, *self.others]
        if unrelated:
            usual = float(np.quantile(unrelated, QUANTILE))
        elif base:
            usual = max(base)
        else:
            return None
        return usual + (1 - usual) * COPY_MARGIN

    def to_json(self) -> dict[str, Any]:
        """Return {clips, median, p99} of each baseline, or null if it is empty."""
        return {"held_out": _summary(self.held_out), "others": _summary(self.others)}


def measure_baselines(
    gallery: Gallery,
    held_out: Mapping[str, Sequence[Tensor]],
    training: Sequence[tuple[str, Tensor]],
) -> Baselines:
    """Compare clips with the gallery, each without the windows of its own video.

    Args:
        gallery: the training windows.
        held_out: ``embed_with_mirror`` of held-out clips by source video.
        training: (source video, ``embed_with_mirror``) of training clips.
    """
    held_out_clips: list[tuple[str, Tensor]] = []
    for source, clips in held_out.items():
        held_out_clips.extend((source, clip) for clip in clips)
    return Baselines(
        _nearest_similarities(gallery, held_out_clips),
        _nearest_similarities(gallery, training),
    )


def _nearest_similarities(
    gallery: Gallery, clips: Iterable[tuple[str, Tensor]]
) -> tuple[float, ...]:
    matches = [gallery.nearest(clip, exclude_source=source) for source, clip in clips]
    return tuple(match.similarity for match in matches if match is not None)


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    median, p99 = np.quantile(values, [0.5, QUANTILE])
    return {
        "clips": len(values),
        "median": round(float(median), 4),
        "p99": round(float(p99), 4),
    }


def vendi_score(vectors: NDArray[np.float64]) -> float:
    """Return the Vendi score of vectors (n, D): an effective number of distinct ones.

    It is the exponential of the entropy of the eigenvalues of K / n, with K the
    cosines, in float64 (Friedman and Dieng 2023, arXiv 2210.02410): 1 if all vectors
    are the same, n if they are orthogonal.

    Raises:
        ValueError: if there is no vector, or one of length 0.
    """
    x = np.asarray(vectors, np.float64)
    lengths = np.zeros(1)
    if x.ndim == 2 and len(x):
        lengths = np.linalg.norm(x, axis=1, keepdims=True)
    if not (lengths > 0).all():
        raise ValueError(
            "the Vendi score needs at least one vector (n, D), none of length 0"
        )

    x = x / lengths
    cosines = x @ x.T
    eigenvalues = np.linalg.eigvalsh(cosines / len(x))
    eigenvalues = eigenvalues[eigenvalues > 1e-12]
    summands = eigenvalues * np.log(eigenvalues)
    entropy = -summands.sum()
    return float(np.exp(entropy))


def diversity(by_prompt: Sequence[Sequence[Tensor]]) -> float | None:
    """Return the mean over prompts of the Vendi score of a prompt's samples.

    Samples of different prompts differ anyway, so they are not compared.

    Args:
        by_prompt: for each prompt the frame vectors (T, D) of its samples.

    Returns:
        The mean, or None if no prompt has two samples.
    """
    scores = []
    for samples in by_prompt:
        if len(samples) > 1:
            vectors = torch.stack([sample.flatten() for sample in samples])
            scores.append(vendi_score(vectors.double().numpy()))
    return sum(scores) / len(scores) if scores else None


MEASURED_SIDE = 64
"""Rows and columns of the measured picture, so that clips of all sizes compare."""

BLOCK = 8

DARK = 8 / 255
"""Blocks darker than this do not count for the gain."""


@dataclass(frozen=True)
class MotionStats:
    """Motion, flicker and saturation of a clip."""

    energy: float | None
    """Mean change of a pixel between frames without the gain, as a share of full light.

    None for fewer than two frames.
    """

    flicker: float | None
    """Fluctuation of the picture's light.

    Light that alternates by ±5 % gives 0.05, a steady fade 0. None for fewer than three
    frames.
    """

    saturation: float
    """Mean difference of a pixel's strongest and weakest channel, 0 (grey) to 1."""


def motion_stats(frames: NDArray[Any]) -> MotionStats:
    """Measure uint8 frames (T, H, W, 3).

    The gain between two frames is the median over 8 × 8 blocks of the ratio of their
    light: motion makes some blocks lighter and others darker, a lamp changes all of
    them.
    """
    small = resize_square(to_pictures(frames), MEASURED_SIDE)
    channel_weights = torch.tensor(GREY_WEIGHTS)[:, None, None]
    grey = (small * channel_weights).sum(1)
    channel_differences = small.amax(1) - small.amin(1)
    saturation = float(channel_differences.mean())
    blocks = functional.avg_pool2d(grey[:, None], BLOCK)
    log_gains = _log_gains(blocks[:, 0])
    if len(grey) < 2:
        return MotionStats(None, None, saturation)

    inverse_gains = torch.exp(-log_gains)[:, None, None]
    without_gain = grey[1:] * inverse_gains
    change = without_gain - grey[:-1]
    energy = float(change.abs().mean())
    flicker = None
    if len(grey) > 2:
        flicker = float(log_gains.diff().abs().mean()) / 4
    return MotionStats(energy, flicker, saturation)


def _log_gains(blocks: Tensor) -> Tensor:
    """Return the log gain from each frame to the next, 0 if all blocks are dark.

    Args:
        blocks: light of blocks, (T, h, w).

    Returns:
        (T - 1,).
    """
    gains = []
    for before, after in pairwise(blocks):
        is_lit = (before > DARK) & (after > DARK)
        ratios = torch.log(after[is_lit] / before[is_lit])
        if is_lit.any():
            gains.append(torch.quantile(ratios, 0.5))
        else:
            gains.append(torch.zeros(()))
    return torch.stack(gains) if gains else torch.zeros(0)


def mean_motion(clips: Sequence[MotionStats]) -> dict[str, float | None]:
    """Return mean energy, flicker and saturation, None if no clip has a value."""
    means: dict[str, float | None] = {}
    for name in ("energy", "flicker", "saturation"):
        values = [getattr(clip, name) for clip in clips]
        known_values = [value for value in values if value is not None]
        means[name] = None
        if known_values:
            means[name] = round(sum(known_values) / len(known_values), 6)
    return means
