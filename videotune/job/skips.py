"""Refuse a run that would leave out clips, or most of every clip, without the user's
consent.
"""

from videotune.console import echo
from videotune.data.buckets import crop_problem
from videotune.errors import DoesNotFit
from videotune.job.job import Job
from videotune.text import counted_are, reason_words


def crop_blocker(job: Job) -> str | None:
    """Return why the crop is too small a part of every clip, or None if it is not or
    the config allows it.
    """
    if job.config.allow_crop:
        return None
    resolution = job.config.resolution or job.spec.default_resolution
    return crop_problem(job.library, job.spec.rules, resolution)


def refuse_skips(job: Job, allow: str | None) -> None:
    """Stop if clips are skipped and the user has not allowed as many.

    Args:
        job: the run.
        allow: a number of clips, or "all". None: none may be skipped.

    Raises:
        DoesNotFit: if too many clips are skipped; it lists them. Also if most of every
            clip is cropped away.
    """
    crop_reason = crop_blocker(job)
    if crop_reason is not None:
        raise DoesNotFit(crop_reason)

    skipped = job.library.skipped
    is_allowed = allow is not None and (allow == "all" or len(skipped) <= int(allow))
    if not skipped or is_allowed:
        without_caption = sum(reason.endswith("_caption") for _, reason, _ in skipped)
        if without_caption:
            clips = counted_are(len(skipped), "clip")
            echo(f"note: {clips} left out, {without_caption} without a usable caption")
        return

    listed = "".join(
        f"\n  {path}: {reason_words(reason)}: {detail}"
        for path, reason, detail in skipped[:10]
    )
    if len(skipped) > 10:
        listed += f"\n  … and {len(skipped) - 10} more"
    raise DoesNotFit(
        f"{len(skipped)} of the clips would be skipped:{listed}\n"
        f"Fix or remove them, or allow it: --allow-skips {len(skipped)}"
    )
