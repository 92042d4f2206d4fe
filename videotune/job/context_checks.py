"""Refuse runs whose processes cannot share the tokens of their samples equally."""

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.clip_ends import appended_sizes
from videotune.text import counted
from videotune.types import ClipShape


def groups_of(config: Config, processes: int) -> int:
    """Return how many groups of processes share the samples of a step.

    Raises VideotuneError if ``context_parallel`` does not divide the processes.
    """
    parts = config.context_parallel
    if processes % parts:
        raise VideotuneError(
            f"context_parallel: groups of {parts} processes share a sample, and the run has "
            f"{counted(processes, 'process', 'processes')}. Start a multiple of {parts}, or set context_parallel to 1"
        )
    return processes // parts


def refuse_unequal_parts(job: Job) -> None:
    """Raise VideotuneError for a window whose tokens cannot be shared equally."""
    fault = fault_of_parts(job)
    if fault is not None:
        raise VideotuneError(fault)


def fault_of_parts(job: Job) -> str | None:
    """Return a sentence on a window whose tokens cannot be shared equally, or None."""
    if job.config.context_parallel == 1:
        return None
    paths = {clip.id: clip.path for clip in job.library.clips}
    shapes: dict[ClipShape, str] = {}
    for window in (*job.library.windows, *job.library.held_out_windows):
        shapes.setdefault(window.shape, window.clip_id)

    for shape, clip_id in shapes.items():
        fault = _fault_of_shape(job, shape, str(paths[clip_id]))
        if fault is not None:
            return fault
    return None


def refuse_unequal_shape(job: Job, shape: ClipShape, name: str) -> None:
    """Raise VideotuneError if the tokens of a sample cannot be shared equally.

    Args:
        job: the run.
        shape: of the sample.
        name: what has this shape.
    """
    fault = _fault_of_shape(job, shape, name)
    if fault is not None:
        raise VideotuneError(fault)


def _fault_of_shape(job: Job, shape: ClipShape, name: str) -> str | None:
    """Return a sentence if the tokens of a shape, or those that a condition appends to
    it, cannot be shared equally. diffusers pads none.
    """
    parts = job.config.context_parallel
    _, patch_rows, patch_columns = job.spec.patch
    counts = [job.spec.video_tokens(shape)]
    for frames, rows, columns in appended_sizes(job.config, shape, job.spec).values():
        counts.append(frames * (rows // patch_rows) * (columns // patch_columns))

    for tokens in counts:
        if tokens % parts:
            side = job.spec.rules.side_multiple * parts
            return (
                f"{name}: a sample of {shape} has {tokens} tokens, which the {parts} processes of context_parallel "
                f"cannot share equally. Set a resolution with a side that {side} divides, or context_parallel to 1"
            )
    return None
