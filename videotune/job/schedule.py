"""The schedule over the buckets of a library: how often each is shown, and the samples of
its steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from videotune.config.schema import Config
from videotune.data.buckets import BucketKey
from videotune.data.library import Library
from videotune.data.window_table import WindowTable
from videotune.job.notes import mixes
from videotune.latent_cache.sampler import Schedule, exact
from videotune.text import counted_between
from videotune.types import Window


def make_schedule(
    config: Config,
    windows_by_bucket: Mapping[BucketKey, Sequence[Window]],
    library: Library,
    processes: int = 1,
) -> tuple[Schedule, list[str]]:
    """Return the schedule over the buckets, and notes on the batch.

    If images and videos are mixed, a step of a video bucket takes fewer samples, as the
    multiplier says.

    Args:
        config: the settings.
        windows_by_bucket: the buckets.
        library: the clips.
        processes: how many processes train.
    """
    multiplier = config.video_config.video_batch_size_multiplier
    is_mixed = mixes(library)
    columns = library.columns
    video_batch = max(1, math.floor(config.batch_size * multiplier))

    samples_by_bucket = []
    samples_of_images = []
    samples_of_videos = []
    for key, windows in windows_by_bucket.items():
        table = WindowTable.of(windows)
        clips_of_owners = columns.ids.positions(table.clip_ids)
        has_video = bool((~columns.still[clips_of_owners])[table.owners()].any())
        samples_a_pass = video_batch if is_mixed and has_video else config.batch_size
        samples_a_pass = key.batch_size or samples_a_pass
        samples = samples_a_pass * config.gradient_accumulation_steps * processes
        samples_by_bucket.append(samples)
        if has_video:
            samples_of_videos.append(samples)
        else:
            samples_of_images.append(samples)

    notes = []
    has_both = bool(samples_of_images and samples_of_videos)
    if is_mixed and has_both and video_batch != config.batch_size:
        images = _counted(samples_of_images, "image")
        videos = _counted(samples_of_videos, "video")
        notes.append(
            f"images and videos are mixed: a step takes {images} or {videos} "
            f"(video_batch_size_multiplier {multiplier:g})"
        )
    sizes = [len(windows) for windows in windows_by_bucket.values()]
    schedule = Schedule(
        seed=config.seed,
        window_counts=tuple(sizes) or (1,),
        batch_sizes=tuple(samples_by_bucket) or (config.batch_size * processes,),
        shuffle=config.shuffle,
        weights=_weights(windows_by_bucket),
        phases=_phases(windows_by_bucket),
    )
    return schedule, notes


def _counted(numbers: Sequence[int], thing: str) -> str:
    """Return "1 image", or "2 to 4 images" for different numbers."""
    return counted_between(min(numbers), max(numbers), thing)


def _weights(keys: Iterable[BucketKey]) -> tuple[Fraction, ...]:
    """Return the factor of how often each bucket is shown; none if all are 1."""
    weights = tuple(exact(key.probability) for key in keys)
    return weights if any(weight != 1 for weight in weights) else ()


def _phases(keys: Iterable[BucketKey]) -> tuple[tuple[int, int], ...]:
    """Return first step and number of buckets of each phase; none if there is one."""
    bucket_counts = Counter(key.first_step for key in keys)
    phases = tuple(sorted(bucket_counts.items()))
    return phases if len(phases) > 1 else ()
