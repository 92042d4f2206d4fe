"""The rules by which other trainers choose frames, sizes and noise levels: each a function of a clip's facts.

The last argument of a frame rule is the clip; those of a size rule are the clip and the frames
of its samples. Which trainer has which rule stands in ``trainer_rules.py``; where a rule is
known from, in ``trainer_rules.json``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from videotune.diffusion.timesteps import TimestepSampler

FrameIndices = list[list[int]] | str
"""The source frames of each sample of a clip, or why the clip is dropped."""

PixelSize = tuple[int, int]
"""Width, height."""

Bucket = tuple[int, int, int]
"""Frames, height, width."""


class SourceVideo(NamedTuple):
    """A clip: its frames, their rate, and its sides in pixels."""

    frames: int
    fps: float
    width: int
    height: int

    @property
    def ratio(self) -> float:
        """Width over height."""
        return self.width / self.height


def floor_to_step(count: int, step: int) -> int:
    """The largest n·step + 1 of at most ``count``."""
    return (count - 1) // step * step + 1


def evenly_spaced(n: int, count: int) -> list[int]:
    """``count`` frames spread over all of a clip, the last included, rounded down."""
    return [int(i) for i in torch.linspace(0, n - 1, count).long()]


def drop_frames_to_rate(n: int, fps: float, target: float, end: int | None) -> list[int]:
    """Source frames that stay where frames are dropped until ``target`` a second is reached; none is ever repeated.

    ``end``: reading stops at this frame of the target rate. Above the source's rate every frame
    stays, and reading stops earlier.
    """
    kept = []
    at = 0.0
    last = -1
    for i in range(n):
        index = int(at)
        at = at + target / fps
        if index == last:
            continue
        last = index
        if end is not None and index >= end:
            break
        kept.append(i)
    return kept


def windows(
    mode: str, n: int, counts: Sequence[int], step: int, stride: int, samples: int, most: int
) -> list[PixelSize]:
    """(start, frames) of each sample by a frame extraction: head, chunk, slide, uniform or full."""
    fitting = [count for count in counts if count <= n]
    match mode:
        case "head":
            return [(0, count) for count in fitting]
        case "chunk":
            return [
                (start, count) for count in fitting for start in range(0, n - count + 1, count)
            ]
        case "slide":
            return [
                (start, count) for count in fitting for start in range(0, n - count + 1, stride)
            ]
        case "uniform":
            return [
                (int(i), count)
                for count in fitting
                for i in np.linspace(0, n - count, samples, dtype=int)
            ]
    return [(0, floor_to_step(min(n, most), step))]


def extract_windows(
    mode: str,
    counts: list[int],
    step: int,
    rates: tuple[float, float] | None,
    how: tuple[int, int, int],
    clip: SourceVideo,
) -> FrameIndices:
    """Windows of fixed frame counts; ``rates``: the rate that the config says of the source, and the model's.

    ``how``: stride, samples of a clip, and the most frames.
    """
    rounded = sorted({floor_to_step(count, step) for count in counts})
    mode = "head" if mode == "uniform" and how[1] == 1 else mode
    end = rounded[-1] if mode == "head" else None
    kept = (
        drop_frames_to_rate(clip.frames, *rates, end)
        if rates
        else list(range(clip.frames))[:end]
    )
    found = windows(mode, len(kept), rounded, step, *how)
    why = f"{len(kept)} frames are read, fewer than the {rounded[0]} of target_frames"
    return [kept[start : start + count] for start, count in found] or why


def resample_to_bucket(
    mode: str,
    buckets: Sequence[tuple[int, float | None]],
    step: int,
    rate: float,
    clip: SourceVideo,
) -> FrameIndices:
    """One sample at the model's rate, from a clip's beginning or its middle, as long as a bucket that the clip fills.

    ``buckets``: frames and ratio of each (None: any ratio); the one of the nearest ratio is
    taken, of several the longest.
    """
    moving = [bucket for bucket in buckets if bucket[0] > 1]
    length = int(clip.frames * rate / clip.fps)
    fitting = [bucket for bucket in moving if bucket[0] <= length]
    if not fitting:
        smallest = min((count for count, _ in moving), default=0)
        short = f"the smallest bucket has {smallest}" if smallest else "no bucket is for clips"
        return f"{length} frames at {rate:g} fps; {short}"
    nearest = min(
        fitting,
        key=lambda bucket: (abs(math.log(clip.ratio / (bucket[1] or clip.ratio))), -bucket[0]),
    )
    count = floor_to_step(nearest[0], step)
    start = 0 if mode == "single_beginning" else int((length - count) / 2)
    return [evenly_spaced(clip.frames, length)[start : start + count]]


def fixed_count_frames(
    count: int, rate: float, shrink: bool, auto: bool, trim: bool, step: int, clip: SourceVideo
) -> FrameIndices:
    """Always ``count`` frames, whatever the clip's length; ``auto``: as many as it has at ``rate``."""
    wanted = count
    if auto:
        length = int(clip.frames / clip.fps * rate)
        wanted = max(0, length - 1 if trim else length) // step * step + 1
    interval = max(1, round(clip.fps / rate))
    if auto and trim:
        every = clip.fps / rate
        return [[min(round(i * every), clip.frames - 1) for i in range(wanted)]]
    if not shrink and clip.frames >= wanted and clip.frames // interval >= wanted:
        return [[i * interval for i in range(wanted)]]
    share = (clip.frames - 1) / (wanted - 1) if wanted > 1 else 0
    return [[min(round(i * share), clip.frames - 1) for i in range(wanted)]]


def spread_over_clip(buckets: Sequence[Bucket], clip: SourceVideo) -> FrameIndices:
    """The largest bucket that the clip fills, its frames spread over the clip; a shorter clip stays as it is."""
    count = max(
        (bucket[0] for bucket in buckets if bucket[0] <= clip.frames), default=clip.frames
    )
    return [evenly_spaced(clip.frames, count)]


def leading_frames(counts: Sequence[int], why: str, clip: SourceVideo) -> FrameIndices:
    """The first frames of a clip, as many as the largest count that it has; one with fewer is dropped."""
    fitting = [count for count in counts if count <= clip.frames]
    return (
        [list(range(max(fitting)))] if fitting else f"{clip.frames} frames; {why} {min(counts)}"
    )


def leading_frames_in_range(
    count: int, least: int, most: float, step: int, clip: SourceVideo
) -> FrameIndices:
    """The first ``count`` frames of a clip that has ``least`` to ``most``, after it is cut to n·step + 1."""
    length = max(1, floor_to_step(clip.frames, step))
    if not least <= length <= most:
        cut = f", cut to {length}" if length != clip.frames else ""
        return f"{clip.frames} frames{cut}; min_frames is {least}, max_frames {most:g}"
    return [list(range(min(count, length)))]


def frames_from_start(count: int, clip: SourceVideo) -> FrameIndices:
    """``count`` frames at the source's own rate from a random start (here its earliest); behind the end the last is held."""
    return [[min(i + 1, clip.frames - 1) for i in range(count)]]


# ---- sizes


def nearest_multiple(value: float, multiple: int) -> int:
    """``value`` rounded to a multiple."""
    return round(value / multiple) * multiple


def area_buckets(
    resolution: Sequence[int], multiple: int, clip: SourceVideo, count: int
) -> PixelSize:
    """Sizes of at most the resolution's area in steps of a side; the one of the nearest ratio of width to height."""
    area = resolution[0] * resolution[1]
    side = int(math.sqrt(area))
    shorter = range(side // 2 // multiple * multiple, side + multiple, multiple)
    pairs = [(w, area // w // multiple * multiple) for w in shorter if w]
    sizes = sorted({size for w, h in pairs for size in ((w, h), (h, w)) if w and h})
    return min(sizes, key=lambda size: abs(size[0] / size[1] - clip.ratio))


def ratio_buckets(
    resolution: float, ratios: Sequence[float], multiple: int, clip: SourceVideo, count: int
) -> PixelSize:
    """The nearest of the ratios by its logarithm, at the area of the resolution squared."""
    known = np.array(sorted(ratios))
    ratio = float(known[np.argmin(np.abs(math.log(clip.ratio) - np.log(known)))])
    wide = math.sqrt(resolution**2 * ratio)
    return nearest_multiple(wide, multiple), nearest_multiple(resolution**2 / wide, multiple)


def within_area(resolution: int, multiple: int, clip: SourceVideo, count: int) -> PixelSize:
    """The clip's own shape at no more than the resolution squared, sides rounded to whatever is nearest in area."""
    most = resolution * resolution
    target = min(clip.width * clip.height, most)
    scale = math.sqrt(target / (clip.width * clip.height)) / multiple
    w = clip.width * scale
    h = clip.height * scale
    sides = [
        (x * multiple, y * multiple)
        for x in (int(w), math.ceil(w))
        for y in (int(h), math.ceil(h))
    ]
    fitting = [size for size in sides if 0 < size[0] * size[1] <= most]
    floor = (max(1, int(w)) * multiple, max(1, int(h)) * multiple)
    return min(fitting or [floor], key=lambda size: abs(size[0] * size[1] - target))


def bucket_by_ratio(buckets: Sequence[Bucket], clip: SourceVideo, count: int) -> PixelSize:
    """Of the buckets that are nearest to these frames the one of the nearest ratio of width to height; of two the larger."""
    frames = min(buckets, key=lambda bucket: abs(bucket[0] - count))[0]
    among = [bucket for bucket in buckets if bucket[0] == frames]
    _, height, width = min(
        among, key=lambda own: (abs(own[2] / own[1] - clip.ratio), -own[1], -own[2])
    )
    return width, height


def bucket_by_sides(buckets: Sequence[Bucket], clip: SourceVideo, count: int) -> PixelSize:
    """The bucket of the nearest sides, whatever its frames."""
    _, height, width = min(
        buckets, key=lambda own: abs(own[1] - clip.height) + abs(own[2] - clip.width)
    )
    return width, height


def source_ratio(
    side: float, multiple: int, square: bool, edge: bool, clip: SourceVideo, count: int
) -> PixelSize:
    """The clip's own ratio, or a square, at an area of ``side`` squared (``edge``: whose shorter side it is)."""
    ratio = 1.0 if square else round(clip.ratio, 2)
    sides: tuple[float, float]
    if edge:
        sides = (
            (side, int(side / ratio)) if clip.width < clip.height else (int(side * ratio), side)
        )
    else:
        root = max(multiple, nearest_multiple(int(side), multiple))
        sides = (root * math.sqrt(ratio), root / math.sqrt(ratio))
    return max(multiple, nearest_multiple(sides[0], multiple)), max(
        multiple, nearest_multiple(sides[1], multiple)
    )


ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)


def listed_aspects(resolution: int, multiple: int, clip: SourceVideo, count: int) -> PixelSize:
    """One of nine ratios and their inverses at the area of the resolution squared; the nearest by height over width."""
    long = [
        (resolution / math.sqrt(aspect), resolution * math.sqrt(aspect)) for aspect in ASPECTS
    ]
    sides = [(nearest_multiple(a, multiple), nearest_multiple(b, multiple)) for a, b in long]
    sizes = sorted({size for a, b in sides for size in ((a, b), (b, a))})
    high, wide = min(sizes, key=lambda size: abs(size[0] / size[1] - 1 / clip.ratio))
    return wide, high


# ---- noise levels


@dataclass(frozen=True)
class NoiseLevels:
    """A distribution of noise levels, then stretched to [low, high] (a cut stands in ``timesteps`` itself)."""

    timesteps: TimestepSampler
    low: float = 0.0
    high: float = 1.0

    def quantiles(self, *shares: float) -> list[float]:
        """The noise levels below which these shares of the draws lie."""
        return [
            self.low + (self.high - self.low) * float(level)
            for level in self.timesteps.at(shares)
        ]


def area_shift(tokens: float) -> float:
    """exp(mu), mu linear in the tokens of a frame: 0.5 at 256, 1.15 at 4096."""
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
