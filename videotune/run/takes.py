"""What a run reads from the cache: which takes of which windows, and which texts."""

from __future__ import annotations

from collections.abc import Sequence

from videotune.monitor.probe import spread
from videotune.run.job import Job
from videotune.types import PLAIN, Window


def prompts_of(job: Job) -> list[str]:
    """The previews' prompts: as given, or so many different captions, evenly over the training clips."""
    wanted = job.config.samples
    if isinstance(wanted, list):
        return wanted
    shown = {window.clip_id for window in job.training_windows}
    captions = list(
        dict.fromkeys(clip.captions[0] for clip in job.library.clips if clip.id in shown and clip.captions[0])
    )
    count = min(wanted, len(captions))
    return [captions[i * len(captions) // count] for i in range(count)]


def takes_of(job: Job) -> list[tuple[Window, int]]:
    """The (window, variant) pairs that a run reads from the cache.

    A training window that varies has as many as ``variants`` says (none for 0: then each view is encoded anew); what
    validation and the ruler's probe look at has nothing drawn.
    """
    variants, pairs = job.config.video_config.variants, []
    for window in job.library.windows:
        pairs += [(window, variant) for variant in (range(variants) if window.varies else (0,))]
    plain = (*spread(job.training_windows), *job.library.held_out_windows)
    return [*pairs, *((window, PLAIN) for window in plain)]


def captions_of(job: Job, extra: Sequence[str] = ()) -> list[str]:
    """Every text that a run feeds: the clips' captions, the empty one, and ``extra`` prompts."""
    captions = [caption for clip in job.library.clips for caption in clip.captions]
    return list(dict.fromkeys([*captions, "", *extra]))
