"""How diffusion-pipe chooses among the frame counts or the size buckets of a config."""

import math
from collections.abc import Sequence

from videotune.interop.rules import (
    Bucket,
    PixelSize,
    SourceVideo,
    resampled_length,
)


def longest_filled(counts: Sequence[int], length: int) -> int | None:
    """Return the longest frame count of a clip bucket that a clip fills, or None."""
    filled = [count for count in counts if 1 < count <= length]
    return max(filled, default=None)


def size_bucket_order(buckets: Sequence[Bucket]) -> tuple[list[Bucket], list[float]]:
    """Return size buckets and ratios in the two orders that diffusion-pipe has them in.

    The buckets are ordered by length, longest first; the ratios by value, without
    duplicates. It takes the n-th bucket for the n-th ratio, whichever they are: so a
    bucket may serve another ratio than its own, and the last ones serve none where
    ratios are duplicates.
    """
    by_length = sorted(buckets, key=lambda bucket: -bucket[0])
    ratios = sorted({width / height for _, height, width in buckets})
    return by_length, ratios


def size_bucket(
    buckets: Sequence[Bucket], length: int, clip: SourceVideo
) -> Bucket | None:
    """Return the size bucket that diffusion-pipe takes for a clip, or None.

    Args:
        buckets: the buckets of the config.
        length: frames of the clip at the model's rate.
        clip: the clip.
    """
    by_length, ratios = size_bucket_order(buckets)
    distances = [abs(math.log(clip.ratio) - math.log(ratio)) for ratio in ratios]
    for index in sorted(range(len(ratios)), key=lambda index: distances[index]):
        bucket = by_length[index]
        if 1 < bucket[0] <= length:
            return bucket
    return None


def size_of_bucket(
    buckets: Sequence[Bucket], rate: float, clip: SourceVideo, count: int
) -> PixelSize:
    """Return the size of the bucket that ``size_bucket`` takes for a clip."""
    bucket = size_bucket(buckets, resampled_length(rate, clip), clip)
    assert bucket is not None, "a clip without a bucket has no frames"
    _, height, width = bucket
    return width, height
