"""The rules by which other trainers choose frames, sizes and noise levels: each a function of a clip's facts.

A frame rule takes a clip's number of frames n, its rate in frames a second, and its ratio of width to height, and answers
with the source frames of each sample, or with the reason why the clip is dropped. A size rule takes width and height and
answers with (width, height). Which trainer has which rule stands in ``practices.py``; where a rule is known from, in
``practices.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from videotune.lazy import torch

if TYPE_CHECKING:
    from videotune.diffusion.timesteps import Timesteps

Frames = Callable[[int, float, float], list[list[int]] | str]
Size = tuple[int, int]
Sizes = Callable[[int, int], Size]
Bucket = tuple[int, int, int]
"""Frames, height, width."""


def step_rounded(count: int, step: int) -> int:
    """The largest n·step + 1 of at most ``count``."""
    return (count - 1) // step * step + 1


def evenly(n: int, count: int) -> list[int]:
    """``count`` frames spread over all of a clip, the last included, rounded down."""
    return [int(i) for i in torch.linspace(0, n - 1, count).long()]


def kept_at_rate(n: int, fps: float, target: float, end: int | None) -> list[int]:
    """Source frames that stay where frames are dropped until ``target`` a second is reached; none is ever repeated.

    ``end``: reading stops at this frame of the target rate. Above the source's rate every frame stays, and reading stops
    earlier.
    """
    kept, at, last = [], 0.0, -1
    for i in range(n):
        index, at = int(at), at + target / fps
        if index == last:
            continue
        last = index
        if end is not None and index >= end:
            break
        kept.append(i)
    return kept


def windows(mode: str, n: int, counts: Sequence[int], step: int, stride: int, samples: int, most: int) -> list[Size]:
    """(start, frames) of each sample by a frame extraction: head, chunk, slide, uniform or full."""
    fitting = [count for count in counts if count <= n]
    match mode:
        case "head":
            return [(0, count) for count in fitting]
        case "chunk":
            return [(start, count) for count in fitting for start in range(0, n - count + 1, count)]
        case "slide":
            return [(start, count) for count in fitting for start in range(0, n - count + 1, stride)]
        case "uniform":
            return [(int(i), count) for count in fitting for i in np.linspace(0, n - count, samples, dtype=int)]
    return [(0, step_rounded(min(n, most), step))]


def extracted(
    mode: str, counts: Sequence[int], step: int, rates: tuple[float, float] | None, stride: int, samples: int, most: int
) -> Frames:
    """Windows of fixed frame counts; ``rates``: the rate that the config says of the source, and the model's."""
    rounded = sorted({step_rounded(count, step) for count in counts})
    mode = "head" if mode == "uniform" and samples == 1 else mode

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        end = rounded[-1] if mode == "head" else None
        kept = kept_at_rate(n, *rates, end) if rates else list(range(n))[:end]
        found = windows(mode, len(kept), rounded, step, stride, samples, most)
        why = f"{len(kept)} frames are read, fewer than the {rounded[0]} of target_frames"
        return [kept[start : start + count] for start, count in found] or why

    return rule


def resampled(mode: str, buckets: Sequence[tuple[int, float | None]], step: int, rate: float) -> Frames:
    """One sample at the model's rate, from a clip's beginning or its middle, as long as a bucket that the clip fills.

    ``buckets``: frames and ratio of each (None: any ratio); the one of the nearest ratio is taken, of several the longest.
    """
    moving = [bucket for bucket in buckets if bucket[0] > 1]

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        length = int(n * rate / fps)
        fitting = [bucket for bucket in moving if bucket[0] <= length]
        if not fitting:
            smallest = min((count for count, _ in moving), default=0)
            short = f"the smallest bucket has {smallest}" if smallest else "no bucket is for clips"
            return f"{length} frames at {rate:g} fps; {short}"
        nearest = min(fitting, key=lambda bucket: (abs(math.log(ratio / (bucket[1] or ratio))), -bucket[0]))
        count = step_rounded(nearest[0], step)
        start = 0 if mode == "single_beginning" else int((length - count) / 2)
        return [evenly(n, length)[start : start + count]]

    return rule


def stretched(count: int, rate: float, shrink: bool, auto: bool, trim: bool, step: int) -> Frames:
    """Always ``count`` frames, whatever the clip's length; ``auto``: as many as it has at ``rate``."""

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        wanted = count
        if auto:
            length = int(n / fps * rate)
            wanted = max(0, length - 1 if trim else length) // step * step + 1
        interval = max(1, round(fps / rate))
        if auto and trim:
            ratio = fps / rate
            return [[min(round(i * ratio), n - 1) for i in range(wanted)]]
        if not shrink and n >= wanted and n // interval >= wanted:
            return [[i * interval for i in range(wanted)]]
        share = (n - 1) / (wanted - 1) if wanted > 1 else 0
        return [[min(round(i * share), n - 1) for i in range(wanted)]]

    return rule


def spread(buckets: Sequence[Bucket]) -> Frames:
    """The largest bucket that the clip fills, its frames spread over the clip; a shorter clip stays as it is."""

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        count = max((bucket[0] for bucket in buckets if bucket[0] <= n), default=n)
        return [evenly(n, count)]

    return rule


def first(counts: Sequence[int], why: str) -> Frames:
    """The first frames of a clip, as many as the largest count that it has; one with fewer is dropped."""

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        fitting = [count for count in counts if count <= n]
        return [list(range(max(fitting)))] if fitting else f"{n} frames; {why} {min(counts)}"

    return rule


def bounded(count: int, least: int, most: float, step: int) -> Frames:
    """The first ``count`` frames of a clip that has ``least`` to ``most``, after it is cut to n·step + 1."""

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        length = max(1, step_rounded(n, step))
        if not least <= length <= most:
            cut = f", cut to {length}" if length != n else ""
            return f"{n} frames{cut}; min_frames is {least}, max_frames {most:g}"
        return [list(range(min(count, length)))]

    return rule


def following(count: int) -> Frames:
    """``count`` frames at the source's own rate from a random start (here its earliest); behind the end the last is held."""

    def rule(n: int, fps: float, ratio: float) -> list[list[int]] | str:
        return [[min(i + 1, n - 1) for i in range(count)]]

    return rule


# ---- sizes


def nearest_multiple(value: float, multiple: int) -> int:
    """``value`` rounded to a multiple."""
    return round(value / multiple) * multiple


def area_buckets(resolution: Size, multiple: int) -> Sizes:
    """Sizes of at most the resolution's area in steps of a side; the one of the nearest ratio of width to height."""
    area = resolution[0] * resolution[1]
    side = int(math.sqrt(area))
    shorter = range(side // 2 // multiple * multiple, side + multiple, multiple)
    pairs = [(w, area // w // multiple * multiple) for w in shorter if w]
    sizes = sorted({size for w, h in pairs for size in ((w, h), (h, w)) if w and h})

    def rule(width: int, height: int) -> Size:
        return min(sizes, key=lambda size: abs(size[0] / size[1] - width / height))

    return rule


def ratio_buckets(resolution: float, ratios: Sequence[float], multiple: int) -> Sizes:
    """The nearest of the ratios by its logarithm, at the area of the resolution squared."""
    known = np.array(sorted(ratios))

    def rule(width: int, height: int) -> Size:
        ratio = float(known[np.argmin(np.abs(math.log(width / height) - np.log(known)))])
        wide = math.sqrt(resolution**2 * ratio)
        return nearest_multiple(wide, multiple), nearest_multiple(resolution**2 / wide, multiple)

    return rule


def never_larger(resolution: int, multiple: int) -> Sizes:
    """The clip's own shape at no more than the resolution squared, sides rounded to whatever is nearest in area."""

    def rule(width: int, height: int) -> Size:
        most = resolution * resolution
        target = min(width * height, most)
        scale = math.sqrt(target / (width * height)) / multiple
        w, h = width * scale, height * scale
        sides = [(x * multiple, y * multiple) for x in (int(w), math.ceil(w)) for y in (int(h), math.ceil(h))]
        fitting = [size for size in sides if 0 < size[0] * size[1] <= most]
        floor = (max(1, int(w)) * multiple, max(1, int(h)) * multiple)
        return min(fitting or [floor], key=lambda size: abs(size[0] * size[1] - target))

    return rule


def nearest_bucket(buckets: Sequence[Bucket], by_ratio: bool, frames: int | None = None) -> Sizes:
    """The bucket of the nearest ratio (of those nearest to these frames; the larger of two), or of the nearest sides."""
    nearest = min(buckets, key=lambda bucket: abs(bucket[0] - frames))[0] if frames is not None else None
    among = [bucket for bucket in buckets if nearest in (None, bucket[0])]

    def rule(width: int, height: int) -> Size:
        def distance(bucket: Bucket) -> tuple[float, ...]:
            if by_ratio:
                return abs(bucket[2] / bucket[1] - width / height), -bucket[1], -bucket[2]
            return (abs(bucket[1] - height) + abs(bucket[2] - width),)

        _, high, wide = min(among, key=distance)
        return wide, high

    return rule


def own_ratio(side: float, multiple: int, square: bool, edge: bool) -> Sizes:
    """The clip's own ratio, or a square, at an area of ``side`` squared (``edge``: whose shorter side it is)."""

    def rule(width: int, height: int) -> Size:
        ratio = 1.0 if square else round(width / height, 2)
        sides: tuple[float, float]
        if edge:
            sides = (side, int(side / ratio)) if width < height else (int(side * ratio), side)
        else:
            root = max(multiple, nearest_multiple(int(side), multiple))
            sides = (root * math.sqrt(ratio), root / math.sqrt(ratio))
        return max(multiple, nearest_multiple(sides[0], multiple)), max(multiple, nearest_multiple(sides[1], multiple))

    return rule


ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)


def listed_aspects(resolution: int, multiple: int) -> Sizes:
    """One of nine ratios and their inverses at the area of the resolution squared; the nearest by height over width."""
    long = [(resolution / math.sqrt(aspect), resolution * math.sqrt(aspect)) for aspect in ASPECTS]
    pairs = {
        (nearest_multiple(h, multiple), nearest_multiple(w, multiple)) for a, b in long for h, w in ((a, b), (b, a))
    }
    sizes = sorted(pairs)

    def rule(width: int, height: int) -> Size:
        high, wide = min(sizes, key=lambda size: abs(size[0] / size[1] - height / width))
        return wide, high

    return rule


# ---- noise levels


@dataclass(frozen=True)
class Noise:
    """A distribution of noise levels, then stretched to [low, high] (a cut stands in ``timesteps`` itself)."""

    timesteps: Timesteps
    low: float = 0.0
    high: float = 1.0

    def quantiles(self, *shares: float) -> list[float]:
        """The noise levels below which these shares of the draws lie."""
        return [self.low + (self.high - self.low) * float(level) for level in self.timesteps.at(shares)]


def shift_of_area(tokens: float, lowest: float = 0.5, highest: float = 1.15) -> float:
    """exp(mu), mu linear in the tokens of a frame: ``lowest`` at 256, ``highest`` at 4096."""
    return math.exp(lowest + (highest - lowest) * (tokens - 256) / (4096 - 256))
