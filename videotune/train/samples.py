"""What a run reads from the cache: which takes of which windows, and which texts."""

from __future__ import annotations

from collections.abc import Sequence

from videotune.train.run_spec import Job
from videotune.train.text_encoders import in_loop
from videotune.types import PLAIN, Window
from videotune.validation.previews import first_frames_of
from videotune.validation.sample_plan import metric_conditioning
from videotune.validation.selection import validation_windows


def takes_of(job: Job) -> list[tuple[Window, int]]:
    """The (window, variant) pairs that a run reads from the cache.

    A training window that varies has as many as ``variants`` says (none for 0: then each view is encoded anew); what
    validation, the ruler's probe and previews look at has nothing drawn.
    """
    variants, pairs = job.config.video_config.variants, []
    for window in job.library.windows:
        varies = window.varies or job.spec.image_noise
        pairs += [(window, variant) for variant in (range(variants) if varies else (0,))]
    told = dict.fromkeys(first_frames_of(job).values()) if job.config.sample_after else ()
    _, read = validation_windows((), job.training_windows)
    plain = (*read, *job.library.held_out_windows, *told, *metric_conditioning(job))
    return [*pairs, *((window, PLAIN) for window in plain)]


def captions_of(job: Job, extra: Sequence[str] = ()) -> list[str]:
    """Every text that a run reads from the cache; none where text is encoded in the step."""
    return [] if in_loop(job.config) else texts_of(job, extra)


def texts_of(job: Job, extra: Sequence[str] = ()) -> list[str]:
    """Every text that a run feeds: the clips' captions, the empty one, and ``extra`` prompts."""
    captions = [caption for clip in job.library.clips for caption in clip.captions]
    return list(dict.fromkeys([*captions, "", *extra]))
