"""Sections of the config on samples: previews, prompts, and samples that are measured."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from videotune.config.data_schema import Section
from videotune.config.fields import safe
from videotune.config.sections import LoraFile

short_file = BeforeValidator(
    lambda value: {"file": value} if isinstance(value, str) else value
)
"""A path is short for a file with the usual settings."""

SIZE_PATTERN = "^[1-9][0-9]{1,4}x[1-9][0-9]{1,4}$"
"""Height and width, "HxW"."""

MAX_STEPS = 10_000
"""Denoising steps of a sample, at most."""

SEEDS_END = 2**63
"""Seeds are below it."""

SCHEDULER_PATTERN = "^[A-Za-z0-9]+Scheduler$"
"""A class of diffusers."""

LoraFileOrPath = Annotated[LoraFile, short_file]


class Sample(Section):
    """How previews are sampled."""

    steps: int | None = safe(None, ge=1, le=MAX_STEPS)
    """denoising steps (default: the family's)"""
    guidance: float | None = safe(None, ge=1)
    """classifier-free guidance scale; 1: none (default: the family's)"""
    seed: int = safe(42, ge=0, lt=SEEDS_END)
    """seed of the first prompt's noise; the next prompt takes the next seed"""
    guidance_2: float | None = safe(None, ge=1)
    """guidance under the expert for low noise, where there are two (default: guidance)
    """
    use_temporal_attention: bool = safe(True)
    """false: previews are sampled with isolated frames too
    (video_config.use_temporal_attention)
    """
    shift: float | None = safe(None, gt=0)
    """the scheduler's shift (default: the checkpoint's own)"""
    frames: int | None = safe(None, ge=1)
    """frames of a preview (default: the bucket with most windows)"""
    resolution: str | None = safe(None, pattern=SIZE_PATTERN)
    """"HxW" of a preview (default: the bucket with most windows)"""
    negative: str = safe("")
    """what guidance leads away from, instead of the empty prompt; of previews and
    `sample`
    """
    scheduler: str | None = safe(None, pattern=SCHEDULER_PATTERN)
    """diffusers' name of a scheduler that the family samples with (default: the
    checkpoint's own)
    """
    guidance_rescale: float = safe(
        0.0,
        ge=0,
        le=1,
    )
    """how far guidance is scaled back to the deviation of the prompt's own prediction,
    against glaring pictures (of families whose pipeline does it)
    """
    strength: float = safe(1.0, ge=-100, le=100)
    """strength of the LoRA that trains; 0: the base model"""
    loras: list[LoraFileOrPath] = safe([])
    """LoRA files that previews and `sample` add, such as one for few steps; never
    saved: a path, or {"file", "strength", "expert"}
    """
    base_loras: bool = safe(True)
    """false: without the LoRA files of base_loras"""
    cache_threshold: float = safe(
        0.0,
        ge=0,
        le=1,
    )
    """a step skips the network's blocks behind the first while the first one's output
    has changed by less than this share (diffusers' first-block cache); 0: none is
    skipped
    """


def file_path() -> Any:
    """Return a field for the path of a file; it has none unless the user sets one."""
    return Field(None, min_length=1)


class Prompt(Section):
    """A prompt with settings of its own in the place of ``sample``'s."""

    prompt: str
    negative: str | None = None
    seed: int | None = Field(None, ge=0, lt=SEEDS_END)
    steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    guidance: float | None = Field(None, ge=1)
    shift: float | None = Field(None, gt=0)
    frames: int | None = Field(None, ge=1)
    resolution: str | None = Field(None, pattern=SIZE_PATTERN)
    image: str | None = file_path()
    last_frame: str | None = file_path()
    prefix: str | None = file_path()
    suffix: str | None = file_path()
    video: str | None = file_path()
    mask: str | None = file_path()
    reference: str | None = file_path()
    control: str | None = file_path()
    sound: str | None = file_path()
    scheduler: str | None = Field(None, pattern=SCHEDULER_PATTERN)
    guidance_rescale: float | None = Field(None, ge=0, le=1)
    strength: float | None = Field(None, ge=-100, le=100)
    loras: list[LoraFileOrPath] | None = None
    base_loras: bool | None = None


PromptCount = Annotated[int, Field(ge=1)]

PromptList = Annotated[list[str], Field(min_length=1)]


class SampleMetrics(Section):
    """Small samples that are measured: how near they come to the clips, how diverse
    they are, how they move.
    """

    budget: float = safe(0.015, ge=0)
    """share of the training time that they may take; their spacing follows from it; 0:
    never
    """
    samples: int = safe(8, ge=1, le=10_000)
    """number of samples generated at a checkpoint, evenly over its prompts"""
    steps: int = safe(12, ge=1)
    """denoising steps of each"""
    prompts: PromptCount | PromptList = safe(2)
    """prompts, or how many captions of training clips to take as prompts"""
    encoder: str | None = safe(None)
    """an image encoder that transformers reads (folder or Hub id) to compare by
    (default: a heuristic)
    """


UnrelatedPrompt = Annotated[
    str,
    Field(min_length=1, max_length=2000),
]

UnrelatedPrompts = Annotated[
    list[UnrelatedPrompt],
    Field(min_length=4, max_length=64),
]


class Forgetting(Section):
    """What the training costs the base model: its predictions for prompts that have
    nothing to do with the clips.
    """

    budget: float = safe(0.01, ge=0)
    """share of the training time that the readings may take; their spacing follows from
    it; 0: never
    """
    prompts: UnrelatedPrompts | None = safe(None)
    """4 to 64 prompts that have nothing to do with the clips (default: those of a
    shipped list that share the fewest words with the captions)
    """
    steps: int = safe(4, ge=1, le=250)
    """denoising steps of the path that is compared with one of four times as many"""
