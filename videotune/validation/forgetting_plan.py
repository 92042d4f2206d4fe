"""Choose what is measured of the base model's abilities: prompts, shape and steps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from videotune.data.frame_counts import valid_at_least
from videotune.files import digest, read_json
from videotune.job.job import Job
from videotune.model_spec import VideoRules
from videotune.sampling.pipeline import SampleSettings
from videotune.types import ClipShape, Window
from videotune.validation.forgetting import FINE_FACTOR, LEVELS
from videotune.validation.sample_metrics_plan import MIN_FRAMES, metric_conditioning
from videotune.validation.selection import settings_at, usual_shape

PROMPT_COUNTS = (8, 6, 4)
"""How many of the shipped prompts are read: the most that the budget pays for."""

DRAWING_STEPS = 12
"""Denoising steps of the samples that noise is added to."""

SHORTER_SIDE = 192
"""Pixels of the shorter side below which a reading's shape is not made smaller."""

SHARED_LETTERS = 4
"""Letters of a word that says what a caption is about."""


@dataclass(frozen=True)
class ForgettingPlan:
    """What a reading of the base model's abilities reads."""

    prompts: tuple[str, ...]
    seed: int
    drawing: SampleSettings
    """How the base model draws the samples that noise is added to."""
    few_steps: SampleSettings
    """The path of few steps."""
    windows: tuple[Window, ...] = ()
    """For each prompt the window whose conditions its samples have.

    Empty: samples have only text.
    """

    @property
    def many_steps(self) -> int:
        """Denoising steps of the path that the one of few steps is compared with."""
        return FINE_FACTOR * self.few_steps.steps

    @property
    def identity(self) -> str:
        """8 hex digits of all that the figures depend on beside the weights."""
        contents: dict[str, Any] = {
            "prompts": list(self.prompts),
            "seed": self.seed,
            "shape": str(self.drawing.shape),
            "fps": self.drawing.shape.fps,
            "steps": [self.drawing.steps, self.few_steps.steps],
            "guidance": [self.drawing.guidance, self.few_steps.guidance],
            "levels": LEVELS,
            "windows": [window.id for window in self.windows],
        }
        return digest(contents)[:8]


def forgetting_plan(job: Job, count: int) -> ForgettingPlan | None:
    """Return what is read of the base model's abilities.

    None without a budget, or if the run is given the video or the sound of its clips: no
    prompt alone says what comes of them.

    Args:
        job: the job.
        count: how many of the shipped prompts are read, if the config names none.
    """
    settings = job.config.forgetting
    if not settings.budget or job.spec.has_conditioning_modality:
        return None
    prompts = settings.prompts
    if prompts is None:
        captions = list(
            chain.from_iterable(clip.captions for clip in job.library.clips)
        )
        prompts = least_related(shipped_prompts(), captions, count)
    windows = metric_conditioning(job, prompts)

    # First frames are encoded only for the windows' own shapes.
    shape = usual_shape(job)
    if not windows:
        small_shape = reading_shape(shape, job.spec.rules)
        # Processes that share samples must be able to share these.
        if job.spec.video_tokens(small_shape) % job.config.context_parallel == 0:
            shape = small_shape
    drawing_steps = max(DRAWING_STEPS, job.spec.least_steps)
    drawing = settings_at(job.config, job.spec, shape, drawing_steps)
    steps = max(settings.steps, job.spec.least_steps)
    few_steps = settings_at(job.config, job.spec, shape, steps)
    return ForgettingPlan(
        prompts=tuple(dict.fromkeys(prompts)),
        seed=job.config.seed,
        drawing=_without_guidance(drawing, job),
        few_steps=few_steps,
        windows=windows,
    )


def reading_shape(usual: ClipShape, rules: VideoRules) -> ClipShape:
    """Return a shape that costs little: few frames, and sides that are halved as long as
    the shorter one stays at ``SHORTER_SIDE``.

    A bucket of images keeps its one frame.
    """
    frames = usual.frames
    fewest = valid_at_least(MIN_FRAMES, rules)
    if fewest is not None:
        frames = min(fewest, frames)
    if rules.size is not None:
        return ClipShape(frames, *rules.size, usual.fps)

    height = usual.height
    width = usual.width
    while min(height, width) >= 2 * SHORTER_SIDE:
        height = height // 2 // rules.side_multiple * rules.side_multiple
        width = width // 2 // rules.side_multiple * rules.side_multiple
    return ClipShape(frames, height, width, usual.fps)


def _without_guidance(settings: SampleSettings, job: Job) -> SampleSettings:
    """Return settings of samples as the model alone predicts them.

    A model that reads guidance as an input keeps it.
    """
    if job.spec.guidance_embedded:
        return settings
    return replace(settings, guidance=1.0, guidance_2=None)


def shipped_prompts() -> list[str]:
    """Return the prompts that come with the package."""
    prompts: list[str] = read_json(Path(__file__).with_name("unrelated_prompts.json"))
    return prompts


def least_related(
    prompts: Sequence[str], captions: Sequence[str], count: int
) -> list[str]:
    """Return the prompts that share the fewest words with captions, in their order."""
    caption_words: set[str] = set()
    for caption in captions:
        caption_words |= _words(caption)
    shared = [len(_words(prompt) & caption_words) for prompt in prompts]
    by_relation = sorted(range(len(prompts)), key=lambda index: (shared[index], index))
    return [prompts[index] for index in sorted(by_relation[:count])]


def _words(text: str) -> set[str]:
    """Return the words of a text that say what it is about."""
    return set(re.findall(rf"\w{{{SHARED_LETTERS},}}", text.casefold()))
