"""Choose what the sample metrics measure: their prompts, seeds, shape and first frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from videotune.data.frame_counts import valid_at_least
from videotune.job.job import Job
from videotune.latent_cache.conditions import conditions_of_most_samples
from videotune.model_spec import VideoRules
from videotune.sampling.pipeline import SampleSettings
from videotune.types import ClipShape, Window
from videotune.validation.selection import (
    settings_at,
    spread_captions,
    usual_shape,
    window_with_caption,
    windows_to_start_from,
)

MIN_FRAMES = 5
"""Frames of a sample for the sample metrics; fewer would show no motion."""

SHORTER_SIDE = 128
"""Pixels of the shorter side below which sides are not halved: in much smaller pictures
than it has learnt from, a model draws nothing that could be measured.
"""


@dataclass(frozen=True)
class SampleMetricsPlan:
    """The samples of a measurement.

    With P prompts, sample i has prompt ``prompts[i % P]`` and seed ``seed + i // P``.
    """

    prompts: tuple[str, ...]
    samples: int
    seed: int
    settings: SampleSettings

    condition_windows: tuple[Window, ...] = ()
    """For each prompt the window of its first frame; empty with text only."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(index of the prompt, seed) of each sample."""
        pairs = []
        for index in range(self.samples):
            repeat, prompt_index = divmod(index, len(self.prompts))
            pairs.append((prompt_index, self.seed + repeat))
        return pairs


def metric_prompts(job: Job) -> list[str]:
    """Return the prompts of the sample metrics; empty if the budget is 0."""
    settings = job.config.sample_metrics
    if not settings.budget:
        return []
    if isinstance(settings.prompts, list):
        return settings.prompts[: settings.samples]
    return spread_captions(job, min(settings.prompts, settings.samples))


def sample_metrics_plan(job: Job) -> SampleMetricsPlan | None:
    """Return the samples of the sample metrics, or None without budget or prompts."""
    prompts = metric_prompts(job)
    # A video that is given says nothing about the training.
    if not prompts or "video" not in job.spec.generates:
        return None
    config = job.config
    condition_windows = metric_conditioning(job, prompts)

    # First frames are encoded only for the windows' own shapes.
    shape = usual_shape(job)
    if not condition_windows:
        shape = metric_shape(shape, job.spec.rules)
    settings = settings_at(config, job.spec, shape, config.sample_metrics.steps)
    return SampleMetricsPlan(
        prompts=tuple(prompts),
        samples=config.sample_metrics.samples,
        seed=config.sample.seed,
        settings=settings,
        condition_windows=condition_windows,
    )


def metric_shape(default_shape: ClipShape, rules: VideoRules) -> ClipShape:
    """Return a small shape: few frames, at least 5, and half the sides, unless the
    shorter one would be below ``SHORTER_SIDE``.

    A bucket of images keeps its one frame.
    """
    frames = default_shape.frames
    fewest = valid_at_least(MIN_FRAMES, rules)
    if fewest is not None:
        frames = min(fewest, frames)
    if rules.size is not None:
        return ClipShape(frames, *rules.size, default_shape.fps)

    height = default_shape.height
    width = default_shape.width
    if min(height, width) >= 2 * SHORTER_SIDE:
        height = _half_side(height, rules.side_multiple)
        width = _half_side(width, rules.side_multiple)
    return ClipShape(frames, height, width, default_shape.fps)


def _half_side(side: int, multiple: int) -> int:
    """Halve a side, rounded down to a multiple."""
    return side // 2 // multiple * multiple


def metric_conditioning(job: Job, prompts: Sequence[str]) -> tuple[Window, ...]:
    """Return for each prompt the window whose first frame its samples start from.

    Held-out windows are preferred: a sample that starts with a frame of a training clip
    is similar to it anyway. The windows have the most common shape, since first frames
    are encoded only for the windows' own shapes; so these samples cost as much as
    previews. Empty if samples have only text.
    """
    if (
        not conditions_of_most_samples(job.config, job.spec)
        and not job.spec.has_conditioning_modality
    ):
        return ()
    shape = str(usual_shape(job))
    windows = windows_to_start_from(job, job.library.held_out_windows, shape)
    if not windows:
        windows = windows_to_start_from(job, job.training_windows, shape)
    return tuple(
        window_with_caption(job, windows, prompt, index)
        for index, prompt in enumerate(prompts)
    )


def sampling_identity(plan: SampleMetricsPlan) -> dict[str, Any]:
    """Return what the pixels of the samples depend on besides the weights, for JSON."""
    settings = plan.settings
    return {
        "steps": settings.steps,
        "guidance": settings.guidance,
        "guidance_2": settings.guidance_2,
        "shift": settings.shift,
        "temporal_attention": settings.temporal_attention,
        "prompts": list(plan.prompts),
        "samples": plan.samples,
        "seed": plan.seed,
        "shape": str(settings.shape),
        "fps": settings.shape.fps,
        "told": [window.id for window in plan.condition_windows],
    }
