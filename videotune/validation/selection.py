"""Choose what validation and previews use.

That is windows and noise levels for validation; prompts, seeds and shapes for previews.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from videotune.adapters.adapter_types import NOT_BY_DEGREES
from videotune.config.sampling_sections import Prompt
from videotune.config.schema import Config
from videotune.data.clip_sizes import is_valid_size, size_rule
from videotune.data.frame_counts import frame_rule, snap_frames
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.conditions import conditions_of_most_samples
from videotune.model_spec import ModelSpec
from videotune.sampling.given_files import FILE_KEYS, NO_FILES, GivenFiles, refuse_given
from videotune.sampling.pipeline import SampleSettings
from videotune.types import ClipShape, Window

T = TypeVar("T")

QUANTILES = 9
"""Number of noise levels of a validation."""

LEVEL_GROUPS = 3
"""Each clip is read at every third noise level, the next clip at the next ones.

This covers all levels with a third of the forward passes.
"""

MAX_WINDOWS = 24
MIN_WINDOWS = 6
"""Windows of a validation; two thirds are held out.

The scatter over held-out clips is what separates copying from learning.
"""


def spread_evenly(items: Sequence[T], count: int) -> tuple[T, ...]:
    """Choose at most ``count`` items, evenly over the sequence."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[i * len(items) // count] for i in range(count))


def validation_windows(job: Job) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """Return the windows that validation reads: (held-out, training).

    Together they are at most ``validation_windows``.
    """
    count = job.config.validation_windows or MAX_WINDOWS
    num_training = count // 3
    held_out = spread_over_clips(job.library.held_out_windows, count - num_training)
    training = spread_over_clips(job.training_windows, num_training)
    return held_out, training


def quantiles_by_window(windows: Sequence[Window]) -> list[range]:
    """Return the indices of the noise levels at which each window is read.

    All windows of a clip have the same levels; together the clips cover all levels.
    """
    clips = list(dict.fromkeys(window.clip_id for window in windows))
    groups = min(LEVEL_GROUPS, len(clips))
    starts = {clip: index % groups for index, clip in enumerate(clips)}
    return [range(starts[window.clip_id], QUANTILES, groups) for window in windows]


def spread_over_clips(windows: Sequence[Window], count: int) -> tuple[Window, ...]:
    """Choose at most ``count`` windows, evenly over the clips.

    A clip gets a second window only after every clip has one, and so on; otherwise a
    few long clips would take most places. A clip with one place gives its middle
    window.
    """
    indices_by_clip: dict[str, list[int]] = {}
    for index, window in enumerate(windows):
        indices_by_clip.setdefault(window.clip_id, []).append(index)
    clips = spread_evenly(list(indices_by_clip.values()), count)

    shares = [0] * len(clips)
    left = min(count, sum(map(len, clips)))
    while left:
        for clip, indices in enumerate(clips):
            if left and shares[clip] < len(indices):
                shares[clip] += 1
                left -= 1

    # Split the windows of a clip into equal parts and take the middle of each.
    chosen = []
    for indices, share in zip(clips, shares, strict=True):
        for part in range(share):
            chosen.append(indices[(2 * part + 1) * len(indices) // (2 * share)])
    return tuple(windows[index] for index in sorted(chosen))


@dataclass(frozen=True)
class PreviewRequest:
    """A sample that a run generates repeatedly."""

    prompt: str
    seed: int
    settings: SampleSettings
    files: GivenFiles = NO_FILES
    """What it is conditioned on. Nothing: parts of a clip, or no condition."""


def preview_prompts(job: Job) -> list[Prompt]:
    """Return the prompts of the previews.

    These are the prompts of ``samples``; if it is a number, that many different
    captions, evenly over the training clips. A resumed run keeps those that it has
    sampled, as long as a clip has them: otherwise one caption that changes could exchange
    all, and no preview would have one before it.
    """
    samples = job.config.samples
    prompts: Sequence[str | Prompt]
    if isinstance(samples, list):
        prompts = samples
    else:
        prompts = _with_sampled_prompts(job, spread_captions(job, samples))
    return [
        Prompt(prompt=prompt) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def preview_requests(job: Job) -> list[PreviewRequest]:
    """Return the previews of the run.

    Raises:
        VideotuneError: if the model cannot sample a shape, or the same prompt occurs
            twice with the same seed.
    """
    sample = job.config.sample
    default_shape = usual_shape(job)
    requests: dict[tuple[str, int], PreviewRequest] = {}

    for key, prompt in zip(preview_keys(job), preview_prompts(job), strict=True):
        text, seed = key
        overrides = {
            name: getattr(prompt, name)
            for name in prompt.model_fields_set - {"prompt", *FILE_KEYS}
            if getattr(prompt, name) is not None
        }
        prompt_sample = sample.model_copy(update=overrides)
        config = job.config.model_copy(update={"sample": prompt_sample})
        files = GivenFiles(**{name: getattr(prompt, name) for name in FILE_KEYS})
        if files:
            refuse_given(files, job.spec, job.config, "samples")
        if key in requests:
            raise VideotuneError(
                f"samples: {text!r} occurs twice with seed {seed}. "
                "Give one of them another seed."
            )
        settings = sample_settings(config, job.spec, default_shape)
        requests[key] = PreviewRequest(text, seed, settings, files)
    return list(requests.values())


def preview_keys(job: Job) -> list[tuple[str, int]]:
    """Return (prompt, seed) of each preview.

    A prompt without a seed gets the seed of the run plus its index.
    """
    run_seed = job.config.sample.seed
    keys = []
    for index, prompt in enumerate(preview_prompts(job)):
        seed = run_seed + index if prompt.seed is None else prompt.seed
        keys.append((prompt.prompt, seed))
    return keys


def spread_captions(job: Job, count: int) -> list[str]:
    """Choose at most ``count`` different captions, evenly over the training clips."""
    return list(spread_evenly(_captions(job), count))


def _with_sampled_prompts(job: Job, prompts: Sequence[str]) -> list[str]:
    """Return prompts of the run's previews, those that it has sampled in their places."""
    captions = _captions(job) if job.sampled_prompts else []
    run_seed = job.config.sample.seed
    kept_by_place: dict[int, str] = {}
    for place in range(len(prompts)):
        sampled = job.sampled_prompts.get(run_seed + place)
        if sampled in captions and sampled not in kept_by_place.values():
            kept_by_place[place] = sampled

    # Those of before and, if they are not enough, any others.
    kept = set(kept_by_place.values())
    others = (text for text in dict.fromkeys([*prompts, *captions]) if text not in kept)
    return [
        kept_by_place[place] if place in kept_by_place else next(others)
        for place in range(len(prompts))
    ]


def _captions(job: Job) -> list[str]:
    """Return the different captions of the training clips."""
    trained_ids = {window.clip_id for window in job.training_windows}
    captions = []
    for clip in job.library.clips:
        if clip.id in trained_ids and clip.captions[0]:
            captions.append(clip.captions[0])
    return list(dict.fromkeys(captions))


def preview_windows(job: Job) -> dict[PreviewRequest, Window]:
    """Return for each preview the window that its conditions are taken from.

    The window has the prompt as its caption if there is one; otherwise the prompts go
    through the windows in order. It has the shape of the preview, because first frames
    are encoded only for the windows' own shapes. Empty if previews have only text.

    Raises:
        VideotuneError: if no window has the shape of a preview.
    """
    if (
        not conditions_of_most_samples(job.config, job.spec)
        and not job.spec.has_conditioning_modality
    ):
        return {}
    return {
        request: _first_window(job, request, index)
        for index, request in enumerate(preview_requests(job))
        if not request.files
    }


def _first_window(job: Job, preview: PreviewRequest, index: int) -> Window:
    """Return a window of the preview's shape: with its caption, else the index-th."""
    shape = str(preview.settings.shape)
    windows = windows_to_start_from(job, job.training_windows, shape)
    if not windows:
        shapes = ", ".join(
            sorted({str(window.shape) for window in job.training_windows})
        )
        raise VideotuneError(
            f"sample.frames, sample.resolution: a preview of {job.spec.title} "
            f"begins with the first frame of a clip, but no window has "
            f"the shape {shape} "
            f"(frames, height, width). Leave both out, or choose one of: {shapes}."
        )
    return window_with_caption(job, windows, preview.prompt, index)


def windows_to_start_from(
    job: Job, windows: Sequence[Window], shape: str
) -> list[Window]:
    """Return the windows of a shape that a sample can be given something of."""
    return [
        window
        for window in windows
        if str(window.shape) == shape
        and (window.shape.sound or not job.spec.has_conditioning_modality)
    ]


def window_with_caption(
    job: Job, windows: Sequence[Window], prompt: str, index: int
) -> Window:
    """Return the first window with the prompt as caption, else the index-th."""
    for window in windows:
        if prompt in job.captions[window.id]:
            return window
    return windows[index % len(windows)]


def preview_settings(job: Job) -> SampleSettings:
    """Return the settings of the previews; if they differ, those with most tokens."""
    default = sample_settings(job.config, job.spec, usual_shape(job))
    if not isinstance(job.config.samples, list):
        return default
    settings = [request.settings for request in preview_requests(job)]
    return max(settings, key=lambda item: job.spec.tokens(item.shape), default=default)


def sample_settings(
    config: Config, spec: ModelSpec, default_shape: ClipShape
) -> SampleSettings:
    """Return the settings of a preview.

    Args:
        config: the config with its ``sample`` section.
        spec: the model.
        default_shape: the shape if the config does not set one.

    Raises:
        VideotuneError: if the model cannot sample the shape, or does not use a negative
            prompt.
    """
    sample = config.sample
    rules = spec.rules
    frames = default_shape.frames if sample.frames is None else sample.frames
    height = default_shape.height
    width = default_shape.width
    if sample.resolution is not None:
        height, width = map(int, sample.resolution.split("x"))

    if snap_frames(frames, rules) != frames:
        raise VideotuneError(
            f"sample.frames: {spec.title} samples {frame_rule(rules)}, not {frames}. "
            "Choose such a number, or leave it out."
        )
    if not is_valid_size((height, width), rules):
        raise VideotuneError(
            f"sample.resolution: {spec.title} samples {size_rule(rules)} pixels, "
            f"not {height}x{width}. Choose such a size, or leave it out."
        )

    # A rate that the pipeline is told is the clips'; others play at the model's own.
    fps = default_shape.fps if spec.takes_frame_rate else rules.fps
    shape = ClipShape(frames, height, width, fps)
    settings = settings_at(config, spec, shape, sample.steps or spec.sample_steps)
    if sample.negative:
        _refuse_unused_negative(spec, settings)
    _refuse_unused_sampling(config, spec)
    return replace(
        settings,
        negative=sample.negative,
        scheduler=sample.scheduler,
        guidance_rescale=sample.guidance_rescale,
        strength=sample.strength,
        loras=tuple((lora.file, lora.strength, lora.expert) for lora in sample.loras),
        base_loras=sample.base_loras,
        cache_threshold=sample.cache_threshold,
    )


def _refuse_unused_sampling(config: Config, spec: ModelSpec) -> None:
    """Raise VideotuneError for keys of ``sample`` that the family or the method does
    not have.
    """
    sample = config.sample
    if sample.scheduler is not None and sample.scheduler not in spec.schedulers:
        raise VideotuneError(
            f"sample.scheduler: {spec.title} does not sample with {sample.scheduler}. "
            f"Choose one of {', '.join(spec.schedulers)}"
        )
    if sample.guidance_rescale and not spec.rescales_guidance:
        raise VideotuneError(
            f"sample.guidance_rescale: the pipeline of {spec.title} has none. Leave it out"
        )

    if sample.cache_threshold and not spec.caches_first_block:
        raise VideotuneError(
            f"sample.cache_threshold: diffusers' first-block cache does not know the blocks "
            f"of {spec.title}. Leave it out"
        )

    if sample.strength != 1.0 and config.training_method != "LORA":
        raise VideotuneError(
            f"sample.strength: {config.training_method} trains no LoRA. Leave it out"
        )
    if sample.strength != 1.0 and config.lora.variant in NOT_BY_DEGREES:
        raise VideotuneError(
            f"sample.strength: {config.lora.variant} has no strength but 1. Leave it out"
        )
    if not sample.base_loras and not config.base_loras:
        raise VideotuneError(
            "sample.base_loras: the run has no base_loras to leave out. Remove the key"
        )


def _refuse_unused_negative(spec: ModelSpec, settings: SampleSettings) -> None:
    """Raise VideotuneError if a negative prompt would have no effect."""
    if spec.guidance_embedded:
        reason = "takes guidance as an input"
    elif settings.guidance <= 1:
        reason = "runs once per step at guidance 1"
    else:
        return
    raise VideotuneError(
        f"sample.negative: {spec.title} {reason}, so a negative prompt has no effect. "
        "Leave it out."
    )


def settings_at(
    config: Config, spec: ModelSpec, shape: ClipShape, steps: int
) -> SampleSettings:
    """Return the settings of a sample with a given shape and number of steps.

    Raises:
        VideotuneError: for fewer steps than the model's scheduler needs.
    """
    sample = config.sample
    if steps < spec.least_steps:
        raise VideotuneError(
            f"sample.steps: {steps} given; the scheduler of {spec.title} needs at least "
            f"{spec.least_steps}"
        )
    return SampleSettings(
        shape=shape,
        steps=steps,
        guidance=spec.sample_guidance if sample.guidance is None else sample.guidance,
        shift=sample.shift,
        guidance_2=sample.guidance_2,
        temporal_attention=sample.use_temporal_attention,
    )


def usual_shape(job: Job) -> ClipShape:
    """Return the bucket with most training windows, a video bucket if there is one."""
    count = Counter(window.shape for window in job.training_windows)
    return max(count, key=lambda shape: (shape.frames > 1, count[shape], shape))
