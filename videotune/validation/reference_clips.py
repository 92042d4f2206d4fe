"""Decode and embed the clips that samples are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from videotune.console import bar
from videotune.data.decode import decode
from videotune.data.frame_sampling import draw_frames
from videotune.files import digest
from videotune.job.job import Job
from videotune.types import DETERMINISTIC_VARIANT, Clip, Window
from videotune.validation import metrics
from videotune.validation.embeddings import (
    FrameEmbedding,
    embed_views,
    embed_with_mirror,
)
from videotune.validation.metrics import Baselines, Gallery, ReferenceWindow
from videotune.validation.sample_metrics_plan import (
    SampleMetricsPlan,
    sampling_identity,
)
from videotune.validation.selection import spread_evenly

Frames = NDArray[np.uint8]

SIDE = 64
"""The shorter side, in pixels, of the frames that are compared."""

MAX_WINDOWS = 256
"""Number of training windows to compare with, at most."""

MIN_WINDOWS = 8
"""Number of training windows to compare with, however long they are."""

MAX_FRAMES = 18
"""Frames kept of a window, at most; more if samples are short.
 Of longer windows every second or third frame is kept. With every second frame, copies
of fast motion (a galloping horse) are half a frame pair off and come to 0.55 instead of
0.68.
"""

MAX_TOTAL_FRAMES = 4608
"""Frames kept of all windows, at most: 150 MB of the heuristic's vectors."""

BASELINE_CLIPS = 64
"""Clips per baseline, at most."""

MOTION_WINDOWS = 32
"""Training windows whose motion is measured, at most."""


@dataclass(frozen=True)
class EmbeddedClips:
    """The embedded training windows and what was measured on them."""

    gallery: Gallery

    every: int
    """Distance of the embedded frames."""

    baselines: Baselines | None
    """None if they were not asked for."""

    motion: Mapping[str, float | None]
    """Mean energy, flicker and saturation of the training windows."""


def frame_stride(job: Job, plan: SampleMetricsPlan) -> int:
    """Return the distance of the compared frames.

    It leaves at most 18 frames of the longest window and at least two of a sample.
    """
    longest = max(window.shape.frames for window in job.training_windows)
    stride = -(-longest // MAX_FRAMES)
    return max(1, min(stride, plan.settings.shape.frames // 2))


def reference_windows(job: Job, plan: SampleMetricsPlan) -> tuple[Window, ...]:
    """Choose the training windows to compare with.

    At most half of them have a prompt of the plan as caption; the others are spread
    over the training set. Long windows get fewer places.
    """
    longest = max(window.shape.frames for window in job.training_windows)
    frames_per_window = -(-longest // frame_stride(job, plan))
    affordable = max(MIN_WINDOWS, MAX_TOTAL_FRAMES // frames_per_window)
    count = min(MAX_WINDOWS, affordable)

    prompts = set(plan.prompts)
    prompted = [
        window
        for window in job.training_windows
        if prompts & set(job.captions[window.id])
    ]
    first = spread_evenly(prompted, count // 2)
    others = spread_evenly(job.training_windows, count - len(first))
    return tuple(dict.fromkeys([*first, *others]))


def reading_name(job: Job, plan: SampleMetricsPlan, embedding: FrameEmbedding) -> str:
    """Return 8 hex digits that are equal for readings that can be compared."""
    compared_ids = [window.id for window in reference_windows(job, plan)]
    held_out_ids = [window.id for window in job.library.held_out_windows]
    parts = [sampling_identity(plan), embedding.name, [compared_ids, held_out_ids]]
    return digest(parts)[:8]


def embed_clips(
    job: Job, plan: SampleMetricsPlan, embedding: FrameEmbedding, with_baselines: bool
) -> EmbeddedClips:
    """Decode and embed the training windows, and measure their motion."""
    clips = {clip.id: clip for clip in job.library.clips}
    every = frame_stride(job, plan)
    length = plan.settings.shape.frames
    windows = reference_windows(job, plan)
    baseline_ids = set[str]()
    if with_baselines:
        baseline_ids = {window.id for window in spread_evenly(windows, BASELINE_CLIPS)}
    motion_ids = {window.id for window in spread_evenly(windows, MOTION_WINDOWS)}

    references = []
    training = []
    motion = []
    with bar("embedding the clips") as progress:
        frames_of = small_frames(job, plan, windows)
        for done, (window, frames) in enumerate(frames_of, 1):
            clip = clips[window.clip_id]
            views = embed_views(embedding, frames[::every])
            references.append(ReferenceWindow(clip.path, clip.source, views))
            if window.id in baseline_ids:
                vectors = embed_with_mirror(embedding, frames[:length][::every])
                training.append((clip.source, vectors))
            if window.id in motion_ids:
                motion.append(metrics.motion_stats(frames[:length]))
            progress.update(done, len(windows))

    gallery = Gallery(references)
    baselines = None
    if with_baselines:
        held_out = _embed_held_out(job, plan, embedding, clips)
        baselines = metrics.measure_baselines(gallery, held_out, training)
    return EmbeddedClips(gallery, every, baselines, metrics.mean_motion(motion))


def _embed_held_out(
    job: Job,
    plan: SampleMetricsPlan,
    embedding: FrameEmbedding,
    clips: Mapping[str, Clip],
) -> dict[str, list[Tensor]]:
    """Embed held-out windows, cut to the length of a sample, by source video."""
    every = frame_stride(job, plan)
    length = plan.settings.shape.frames
    windows = spread_evenly(job.library.held_out_windows, BASELINE_CLIPS)

    by_source: dict[str, list[Tensor]] = {}
    for window, frames in small_frames(job, plan, windows):
        vectors = embed_with_mirror(embedding, frames[:length][::every])
        by_source.setdefault(clips[window.clip_id].source, []).append(vectors)
    return by_source


def small_frames(
    job: Job, plan: SampleMetricsPlan, windows: Sequence[Window]
) -> Iterator[tuple[Window, Frames]]:
    """Yield the frames of each window, small and in the aspect ratio of the samples.

    The frame times are those of the deterministic variant, without random draws.
    """
    shape = plan.settings.shape
    scale = SIDE / min(shape.height, shape.width)
    height = round(shape.height * scale)
    width = round(shape.width * scale)

    for window in windows:
        times = draw_frames(window, DETERMINISTIC_VARIANT, job.config.seed).times
        media = job.library.media[window.clip_id]
        yield window, decode(media, times, height, width, window.resize)
