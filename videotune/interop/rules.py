"""Rules by which other trainers choose frames, sizes and noise levels.

The last argument of a frame rule is the clip; those of a size rule are the clip and the
frame count of its samples. ``trainer_rules.py`` assigns rules to trainers;
``trainer_rules.json`` has their sources.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.text import counted, counted_are

FrameIndices = list[list[int]] | str
"""The source frames of each sample of a clip, or why the clip is dropped."""

PixelSize = tuple[int, int]
"""Width, height."""

Bucket = tuple[int, int, int]
"""Frames, height, width."""


class SourceVideo(NamedTuple):
    """A clip."""

    frames: int
    fps: float
    width: int
    height: int

    @property
    def ratio(self) -> float:
        """Width over height."""
        return self.width / self.height


# ---- frames


def floor_to_step(count: int, step: int) -> int:
    """Return the largest n·step + 1 of at most ``count``."""
    return (count - 1) // step * step + 1


def evenly_spaced(n: int, count: int) -> list[int]:
    """Return ``count`` frames spread over all n of a clip, the last included, rounded
    down.
    """
    return [int(i) for i in torch.linspace(0, n - 1, count).long()]


def drop_frames_to_rate(
    n: int, fps: float, target: float, end: int | None
) -> list[int]:
    """Return the source frames that remain if frames are dropped to reach a lower rate.

    No frame is repeated. If the target is above the source's rate, every frame remains
    and reading stops earlier.

    Args:
        n: the frames of the clip.
        fps: the clip's rate.
        target: the target rate.
        end: reading stops at this frame of the target rate; None: at the clip's end.
    """
    remaining = []
    target_position = 0.0
    last_index = -1
    for i in range(n):
        index = int(target_position)
        target_position = target_position + target / fps
        if index == last_index:
            continue
        last_index = index
        if end is not None and index >= end:
            break
        remaining.append(i)
    return remaining


def sample_windows(
    mode: str,
    n: int,
    counts: Sequence[int],
    step: int,
    stride: int,
    samples: int,
    max_frames: int,
) -> list[tuple[int, int]]:
    """Return start and frame count of each sample.

    Args:
        mode: head, chunk, slide, uniform or full.
        n: the frames of the clip.
        counts: the frame counts of samples.
        step: the model's frame step, for mode full.
        stride: frames between starts, for mode slide.
        samples: samples per frame count, for mode uniform.
        max_frames: the most frames of a sample, for mode full.
    """
    if mode not in ("head", "chunk", "slide", "uniform"):
        return [(0, floor_to_step(min(n, max_frames), step))]

    windows = []
    for count in counts:
        if count > n:
            continue
        last_start = n - count
        starts: Sequence[int] = [0]
        if mode == "chunk":
            starts = range(0, last_start + 1, count)
        elif mode == "slide":
            starts = range(0, last_start + 1, stride)
        elif mode == "uniform":
            starts = [int(i) for i in np.linspace(0, last_start, samples, dtype=int)]
        windows += [(start, count) for start in starts]
    return windows


def extract_windows(
    mode: str,
    counts: list[int],
    step: int,
    rates: tuple[float, float] | None,
    limits: tuple[int, int, int],
    clip: SourceVideo,
) -> FrameIndices:
    """Return windows of fixed frame counts.

    Args:
        mode: head, chunk, slide, uniform or full.
        counts: the frame counts; they are rounded down to n·step + 1.
        step: the model's frame step.
        rates: the source's rate in the config, and the model's; None: no frame is
            dropped.
        limits: stride, samples per clip, and the most frames.
        clip: the clip.
    """
    stride, samples, max_frames = limits
    rounded_counts = sorted({floor_to_step(count, step) for count in counts})
    if mode == "uniform" and samples == 1:
        mode = "head"

    end = rounded_counts[-1] if mode == "head" else None
    if rates:
        source_fps, model_fps = rates
        frames = drop_frames_to_rate(clip.frames, source_fps, model_fps, end)
    else:
        frames = list(range(clip.frames))[:end]

    windows = sample_windows(
        mode=mode,
        n=len(frames),
        counts=rounded_counts,
        step=step,
        stride=stride,
        samples=samples,
        max_frames=max_frames,
    )
    if not windows:
        return f"{counted_are(len(frames), 'frame')} read, fewer than the {rounded_counts[0]} of target_frames"
    return [frames[start : start + count] for start, count in windows]


def resampled_length(rate: float, clip: SourceVideo) -> int:
    """Return how many frames a clip has at the model's rate."""
    return int(clip.frames * rate / clip.fps)


def resample_to_bucket(
    mode: str,
    choose_count: Callable[[int, SourceVideo], int | None],
    smallest: int,
    step: int,
    rate: float,
    clip: SourceVideo,
) -> FrameIndices:
    """Return one sample at the model's rate, as long as a bucket that the clip fills.

    Args:
        mode: "single_beginning" takes the clip's beginning, any other its middle.
        choose_count: the clip's length at the model's rate -> the frames of its bucket.
        smallest: frames of the smallest bucket for clips; 0: there is none.
        step: the model's frame step.
        rate: the model's rate.
        clip: the clip.
    """
    length = resampled_length(rate, clip)
    bucket_frames = choose_count(length, clip)
    if bucket_frames is None:
        reason = (
            f"the smallest bucket has {smallest}"
            if smallest
            else "no bucket is for clips"
        )
        return f"{length} frames at {rate:g} fps; {reason}"

    count = floor_to_step(bucket_frames, step)
    start = 0 if mode == "single_beginning" else int((length - count) / 2)
    return [evenly_spaced(clip.frames, length)[start : start + count]]


def fixed_count_frames(
    count: int,
    rate: float,
    shrink: bool,
    auto: bool,
    trim: bool,
    step: int,
    clip: SourceVideo,
) -> FrameIndices:
    """Return one sample of ``count`` frames, whatever the clip's length.

    Args:
        count: the frame count.
        rate: the rate at which frames are taken.
        shrink: spread the frames over the whole clip.
        auto: take as many frames as the clip has at ``rate``, instead of ``count``.
        trim: with ``auto``, leave out the last frame.
        step: the frame step of automatic counts.
        clip: the clip.
    """
    sample_frames = count
    if auto:
        length = int(clip.frames / clip.fps * rate)
        if trim:
            length -= 1
        sample_frames = max(0, length) // step * step + 1

    last_frame = clip.frames - 1
    if auto and trim:
        interval = clip.fps / rate
        return [[min(round(i * interval), last_frame) for i in range(sample_frames)]]

    whole_interval = max(1, round(clip.fps / rate))
    is_long_enough = clip.frames // whole_interval >= sample_frames
    if not shrink and clip.frames >= sample_frames and is_long_enough:
        return [[i * whole_interval for i in range(sample_frames)]]

    spacing = last_frame / (sample_frames - 1) if sample_frames > 1 else 0
    return [[min(round(i * spacing), last_frame) for i in range(sample_frames)]]


def spread_over_clip(buckets: Sequence[Bucket], clip: SourceVideo) -> FrameIndices:
    """Return the frames of the largest bucket that the clip fills, spread over the
    clip.

    A shorter clip keeps all its frames.
    """
    filled = [bucket[0] for bucket in buckets if bucket[0] <= clip.frames]
    return [evenly_spaced(clip.frames, max(filled, default=clip.frames))]


def leading_frames(
    counts: Sequence[int], reason: str, clip: SourceVideo
) -> FrameIndices:
    """Return the first frames, as many as the largest count that the clip has.

    Args:
        counts: the frame counts.
        reason: the beginning of the message for a clip that is too short.
        clip: the clip.
    """
    filled = [count for count in counts if count <= clip.frames]
    if not filled:
        return f"{counted(clip.frames, 'frame')}; {reason} {min(counts)}"
    return [list(range(max(filled)))]


def leading_frames_in_range(
    count: int, min_frames: int, max_frames: float, step: int, clip: SourceVideo
) -> FrameIndices:
    """Return the first ``count`` frames of a clip whose length, cut to n·step + 1,
    fits.
    """
    length = max(1, floor_to_step(clip.frames, step))
    if not min_frames <= length <= max_frames:
        cut = f", cut to {length}" if length != clip.frames else ""
        return f"{counted(clip.frames, 'frame')}{cut}; min_frames is {min_frames}, max_frames {max_frames:g}"
    return [list(range(min(count, length)))]


def frames_from_start(count: int, clip: SourceVideo) -> FrameIndices:
    """Return ``count`` frames at the source's rate from a random start (here its
    earliest).

    Beyond the clip's end the last frame is repeated.
    """
    return [[min(i + 1, clip.frames - 1) for i in range(count)]]


# ---- sizes


def nearest_multiple(value: float, multiple: int) -> int:
    """Return ``value`` rounded to a multiple."""
    return round(value / multiple) * multiple


def _both_orientations(sizes: Sequence[PixelSize]) -> list[PixelSize]:
    """Return the sizes and their transposes, sorted, without duplicates."""
    transposed = [(height, width) for width, height in sizes]
    return sorted({*sizes, *transposed})


def area_buckets(
    resolution: Sequence[int], multiple: int, clip: SourceVideo, count: int
) -> PixelSize:
    """Return the size of the nearest ratio among sizes of at most the resolution's
    area.
    """
    area = resolution[0] * resolution[1]
    square_side = int(math.sqrt(area))
    first_side = square_side // 2 // multiple * multiple
    sizes = []
    for side in range(first_side, square_side + multiple, multiple):
        if not side:
            continue
        other_side = area // side // multiple * multiple
        if other_side:
            sizes.append((side, other_side))
    return min(
        _both_orientations(sizes), key=lambda size: abs(size[0] / size[1] - clip.ratio)
    )


def ratio_buckets(
    resolution: float,
    ratios: Sequence[float],
    multiple: int,
    clip: SourceVideo,
    count: int,
) -> PixelSize:
    """Return the size of the nearest ratio (by logarithm) at the area of the
    resolution².
    """
    sorted_ratios = np.array(sorted(ratios))
    distances = np.abs(math.log(clip.ratio) - np.log(sorted_ratios))
    ratio = float(sorted_ratios[np.argmin(distances)])
    width = math.sqrt(resolution**2 * ratio)
    height = resolution**2 / width
    return nearest_multiple(width, multiple), nearest_multiple(height, multiple)


def within_area(
    resolution: int, multiple: int, clip: SourceVideo, count: int
) -> PixelSize:
    """Return the clip's shape at no more than resolution², with sides rounded to a
    multiple.

    Of the roundings up and down the one nearest in area is taken.
    """
    max_area = resolution * resolution
    clip_area = clip.width * clip.height
    target_area = min(clip_area, max_area)
    scale = math.sqrt(target_area / clip_area) / multiple
    width = clip.width * scale
    height = clip.height * scale

    sizes = []
    for columns in (int(width), math.ceil(width)):
        for rows in (int(height), math.ceil(height)):
            size = (columns * multiple, rows * multiple)
            if 0 < size[0] * size[1] <= max_area:
                sizes.append(size)
    if not sizes:
        return max(1, int(width)) * multiple, max(1, int(height)) * multiple
    return min(sizes, key=lambda size: abs(size[0] * size[1] - target_area))


def bucket_by_ratio(
    buckets: Sequence[Bucket], clip: SourceVideo, count: int
) -> PixelSize:
    """Return the size of the nearest ratio among the buckets nearest to the frame
    count.

    Of two with the same ratio the larger is taken.
    """

    def distance(bucket: Bucket) -> tuple[float, int, int]:
        _, height, width = bucket
        return abs(width / height - clip.ratio), -height, -width

    frames = min(buckets, key=lambda bucket: abs(bucket[0] - count))[0]
    candidates = [bucket for bucket in buckets if bucket[0] == frames]
    _, height, width = min(candidates, key=distance)
    return width, height


def bucket_by_sides(
    buckets: Sequence[Bucket], clip: SourceVideo, count: int
) -> PixelSize:
    """Return the size of the bucket with the nearest sides, whatever its frames."""

    def distance(bucket: Bucket) -> int:
        _, height, width = bucket
        return abs(height - clip.height) + abs(width - clip.width)

    _, height, width = min(buckets, key=distance)
    return width, height


def source_ratio(
    side: float, multiple: int, square: bool, edge: bool, clip: SourceVideo, count: int
) -> PixelSize:
    """Return a size with the clip's ratio.

    Args:
        side: the side of the square with the size's area.
        multiple: sides are rounded to a multiple of it, and are at least this long.
        square: return a square instead.
        edge: ``side`` is the shorter side.
        clip: the clip.
        count: not used.
    """
    ratio = 1.0 if square else round(clip.ratio, 2)
    width: float
    height: float
    if edge and clip.width < clip.height:
        width = side
        height = int(side / ratio)
    elif edge:
        width = int(side * ratio)
        height = side
    else:
        square_side = max(multiple, nearest_multiple(int(side), multiple))
        width = square_side * math.sqrt(ratio)
        height = square_side / math.sqrt(ratio)

    rounded_width = max(multiple, nearest_multiple(width, multiple))
    rounded_height = max(multiple, nearest_multiple(height, multiple))
    return rounded_width, rounded_height


ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Ratios of the longer to the shorter side."""


def listed_aspects(
    resolution: int, multiple: int, clip: SourceVideo, count: int
) -> PixelSize:
    """Return the size of the nearest of nine ratios and their inverses at the area
    resolution².

    Ratios are compared as height over width.
    """
    sizes = []
    for aspect in ASPECTS:
        short_side = nearest_multiple(resolution / math.sqrt(aspect), multiple)
        long_side = nearest_multiple(resolution * math.sqrt(aspect), multiple)
        if short_side and long_side:
            sizes.append((short_side, long_side))

    if not sizes:
        raise VideotuneError(
            f"resolution {resolution}: every size of it is rounded to no pixels at a multiple of {multiple}"
        )
    height, width = min(
        _both_orientations(sizes),
        key=lambda size: abs(size[0] / size[1] - 1 / clip.ratio),
    )
    return width, height


# ---- noise levels


@dataclass(frozen=True)
class NoiseLevels:
    """A distribution of noise levels, stretched to [low, high]; ``timesteps`` has its
    cut.
    """

    timesteps: TimestepSampler
    low: float = 0.0
    high: float = 1.0

    def quantiles(self, *shares: float) -> list[float]:
        """Return the noise levels that these shares of the draws are below."""
        span = self.high - self.low
        return [self.low + span * float(level) for level in self.timesteps.at(shares)]


def area_shift(tokens: float) -> float:
    """Return exp(mu), with mu linear in the tokens of a frame: 0.5 at 256, 1.15 at
    4096.
    """
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
