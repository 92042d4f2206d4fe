"""The clips that samples are compared with: decoded small, embedded, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from videotune.console import bar
from videotune.data.decode import decode
from videotune.data.frame_sampling import sample_window
from videotune.files import digest
from videotune.trainer.run_spec import Job
from videotune.types import PLAIN, Window
from videotune.validation.copying import (
    MOST_FRAMES,
    MOST_IN_ALL,
    MOST_QUERIES,
    MOST_WINDOWS,
    Baselines,
    Gallery,
    Known,
    baselines,
)
from videotune.validation.features import Embedding, both_ways, in_views
from videotune.validation.motion import mean_measures, measures
from videotune.validation.sample_plan import SampleMetricsPlan, identity_of
from videotune.validation.selection import spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

SIDE = 64
"""The shorter side of the frames that clips are compared by."""

OF_DATA = 32
"""So many windows say how the data moves."""


@dataclass(frozen=True)
class EmbeddedClips:
    """Training windows to compare with, of every ``every``-th frame; how near clips come that are no copies (None: known
    already); how the data moves.
    """

    gallery: Gallery
    every: int
    baselines: Baselines | None
    motion: Mapping[str, float | None]


def every_of(job: Job, plan: SampleMetricsPlan) -> int:
    """Every how many frames are compared, so that of a usual window 18 are at most, and of a sample no fewer than 3."""
    longest = max(window.shape.frames for window in job.training_windows)
    return max(1, min(-(-longest // MOST_FRAMES), plan.settings.shape.frames // 2))


def compared_windows(job: Job, plan: SampleMetricsPlan) -> tuple[Window, ...]:
    """At most 256 training windows, fewer of long ones: first those with a prompt as caption, then others evenly."""
    longest = max(window.shape.frames for window in job.training_windows)
    most = min(MOST_WINDOWS, max(8, MOST_IN_ALL // -(-longest // every_of(job, plan))))
    captions = {clip.id: clip.captions for clip in job.library.clips}
    prompts = set(plan.prompts)
    own = [window for window in job.training_windows if prompts & set(captions[window.clip_id])]
    first = spread(own, most // 2)
    return tuple(dict.fromkeys([*first, *spread(job.training_windows, most - len(first))]))


def name_of(job: Job, plan: SampleMetricsPlan, embedding: Embedding) -> str:
    """8 hex digits: readings of one name compare."""
    windows = [[window.id for window in part] for part in (compared_windows(job, plan), job.library.held_out_windows)]
    return digest([identity_of(plan), embedding.name, windows])[:8]


def embed_clips(job: Job, plan: SampleMetricsPlan, embedding: Embedding, with_baselines: bool) -> EmbeddedClips:
    """Decode and embed the clips; the baselines too where they are wanted."""
    clips, every = {clip.id: clip for clip in job.library.clips}, every_of(job, plan)
    length = plan.settings.shape.frames
    windows = compared_windows(job, plan)
    asking = {window.id for window in spread(windows, MOST_QUERIES)} if with_baselines else set()
    moving = {window.id for window in spread(windows, OF_DATA)}
    known, training, motion = [], [], []
    with bar("looking at the clips") as progress:
        for done, (window, frames) in enumerate(small_frames(job, plan, windows), 1):
            clip = clips[window.clip_id]
            known.append(Known(clip.path, clip.source, in_views(embedding, frames[::every])))
            if window.id in asking:
                training.append((clip.source, both_ways(embedding, frames[:length][::every])))
            if window.id in moving:
                motion.append(measures(frames[:length]))
            progress.update(done, len(windows))
    gallery, found = Gallery(known), None
    if with_baselines:
        held: dict[str, list[Any]] = {}
        for window, frames in small_frames(job, plan, spread(job.library.held_out_windows, MOST_QUERIES)):
            seen = both_ways(embedding, frames[:length][::every])
            held.setdefault(clips[window.clip_id].source, []).append(seen)
        found = baselines(gallery, held, training)
    return EmbeddedClips(gallery, every, found, mean_measures(motion))


def small_frames(
    job: Job, plan: SampleMetricsPlan, windows: Sequence[Window]
) -> Iterator[tuple[Window, NDArray[np.uint8]]]:
    """Each window's frames as the model is shown them, without any draw, in the samples' aspect and small."""
    shape = plan.settings.shape
    scale = SIDE / min(shape.height, shape.width)
    height, width = round(shape.height * scale), round(shape.width * scale)
    for window in windows:
        times = sample_window(window, PLAIN, job.config.seed).times
        yield window, decode(job.library.media[window.clip_id], times, height, width, window.resize)
