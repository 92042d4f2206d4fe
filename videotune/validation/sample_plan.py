"""What a run's sample metrics generate: prompts, seeds, the smallest shape, and whether the run can pay for them."""

from dataclasses import dataclass
from typing import Any

from videotune.data.frame_sampling import valid_at_least
from videotune.sampling.pipeline import SampleSettings
from videotune.trainer.run_spec import Job
from videotune.types import ClipShape, VideoRules, Window
from videotune.validation.previews import captions_evenly, conditions_on_first_frame, settings_at, usual_shape

LEAST_FRAMES = 5
"""Fewer frames would show no motion; a probe has the smallest count from here up that the model takes."""


@dataclass(frozen=True)
class SampleMetricsPlan:
    """What is generated at each measurement; sample i has prompt ``prompts[i % P]`` and seed ``seed + i // P``.

    ``first``: for each prompt the window on whose first frame it is conditioned; empty where samples have text alone.
    """

    prompts: tuple[str, ...]
    samples: int
    seed: int
    settings: SampleSettings
    first: tuple[Window, ...] = ()

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(index of its prompt, seed) of each sample."""
        return [(i % len(self.prompts), self.seed + i // len(self.prompts)) for i in range(self.samples)]


def metric_prompts(job: Job) -> list[str]:
    """The probes' prompts: as given, or so many captions of training clips, evenly; none where nothing is probed."""
    config = job.config
    if not config.sample_metrics.budget:
        return []
    wanted = config.sample_metrics.prompts
    if isinstance(wanted, list):
        return wanted[: config.sample_metrics.samples]
    return captions_evenly(job, min(wanted, config.sample_metrics.samples))


def sample_metrics_plan(job: Job) -> SampleMetricsPlan | None:
    """What the run's probes draw; None where nothing is probed: a budget of 0, no caption to draw."""
    prompts, config = metric_prompts(job), job.config
    if not prompts:
        return None
    usual = usual_shape(job)
    first = metric_conditioning(job)
    shape = usual if first else metric_shape(usual, job.spec.rules)
    settings = settings_at(config, job.spec, shape, config.sample_metrics.steps)
    return SampleMetricsPlan(tuple(prompts), config.sample_metrics.samples, config.sample.seed, settings, first)


def metric_shape(usual: ClipShape, rules: VideoRules) -> ClipShape:
    """The smallest frame count from 5 up and half the sides, as the model takes them; of images images."""
    least = valid_at_least(LEAST_FRAMES, rules)
    frames = usual.frames if least is None else min(least, usual.frames)
    if rules.size is not None:
        return ClipShape(frames, *rules.size, usual.fps)
    step = rules.side_multiple
    height, width = (max(step, side // 2 // step * step) for side in (usual.height, usual.width))
    return ClipShape(frames, height, width, usual.fps)


def metric_conditioning(job: Job) -> tuple[Window, ...]:
    """For each prompt the window on whose first frame its samples are conditioned; empty where they have text alone.

    Held-out windows where there are any, since a sample that begins with a training clip's frame is near it by itself. The
    states of a frame are cached for the windows' own shape, so such a probe has that and costs as much as a preview.
    """
    prompts = metric_prompts(job)
    if not (prompts and conditions_on_first_frame(job.config, job.spec)):
        return ()
    shape = str(usual_shape(job))
    held, trained = (
        [window for window in windows if str(window.shape) == shape]
        for windows in (job.library.held_out_windows, job.training_windows)
    )
    captions = {clip.id: clip.captions for clip in job.library.clips}
    found = []
    for i, prompt in enumerate(prompts):
        pool = held or trained
        own = [window for window in pool if prompt in captions[window.clip_id]]
        found.append((own or [pool[i % len(pool)]])[0])
    return tuple(found)


def identity_of(plan: SampleMetricsPlan) -> dict[str, Any]:
    """What decides the pixels of a probe beside the weights, JSON-like."""
    settings = plan.settings
    return {
        "prompts": list(plan.prompts),
        "samples": plan.samples,
        "seed": plan.seed,
        "shape": str(settings.shape),
        "fps": settings.shape.fps,
        "steps": settings.steps,
        "guidance": settings.guidance,
        "guidance_2": settings.guidance_2,
        "shift": settings.shift,
        "temporal_attention": settings.temporal_attention,
        "told": [window.id for window in plan.first],
    }
