"""What validation reads, and what previews and sample metrics show: windows, noise levels, prompts, seeds, shapes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from videotune.config.schema import Config, Prompt
from videotune.data.buckets import is_valid_size, size_rule
from videotune.data.frame_counts import frame_rule, snap_frames, valid_at_least
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.sampling.pipeline import SampleSettings
from videotune.types import ClipShape, ModelSpec, VideoRules, Window

T = TypeVar("T")

QUANTILES = 9
"""Noise levels of a validation."""

TURNS = 3
"""Each clip is read at every third noise level, the next clip at the next ones: a third of the passes, all levels."""

MOST_WINDOWS = 24
LEAST_WINDOWS = 6
"""How many windows are read. Two thirds are held out: what tells copying from learning is the scatter over these."""


def spread(items: Sequence[T], count: int) -> tuple[T, ...]:
    """At most ``count`` items, evenly over the sequence."""
    return (
        tuple(items)
        if len(items) <= count
        else tuple(items[i * len(items) // count] for i in range(count))
    )


def validation_windows(job: Job) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """At most so many as ``validation_windows`` says, which validation reads: (held-out, training)."""
    most = job.config.validation_windows or MOST_WINDOWS
    held_out = spread_over_clips(job.library.held_out_windows, most - most // 3)
    return held_out, spread_over_clips(job.training_windows, most // 3)


def levels_of(windows: Sequence[Window]) -> list[range]:
    """The noise levels at which each window is read, the same for all windows of a clip; the clips cover all levels."""
    clips = list(dict.fromkeys(window.clip_id for window in windows))
    turns = min(TURNS, len(clips))
    return [range(clips.index(window.clip_id) % turns, QUANTILES, turns) for window in windows]


def spread_over_clips(windows: Sequence[Window], count: int) -> tuple[Window, ...]:
    """At most ``count`` windows, evenly over the clips: a second one of a clip only where each clip has one, and so on.

    Of a clip with one place the window in its middle. Without this a few long clips would take all places.
    """
    of_clip: dict[str, list[int]] = {}
    for place, window in enumerate(windows):
        of_clip.setdefault(window.clip_id, []).append(place)
    clips = spread(list(of_clip.values()), count)
    shares = [0] * len(clips)
    left = min(count, sum(map(len, clips)))
    while left:
        for number, own in enumerate(clips):
            if left and shares[number] < len(own):
                shares[number] = shares[number] + 1
                left = left - 1
    # the middles of as many equal parts of a clip's places
    chosen = [
        own[(2 * i + 1) * len(own) // (2 * n)]
        for own, n in zip(clips, shares, strict=True)
        for i in range(n)
    ]
    return tuple(windows[place] for place in sorted(chosen))


@dataclass(frozen=True)
class PreviewRequest:
    """A sample that a run shows again and again."""

    prompt: str
    seed: int
    settings: SampleSettings


def prompts_of(job: Job) -> list[Prompt]:
    """The previews' prompts: as given, or so many different captions, evenly over the training clips."""
    wanted = job.config.samples
    given = wanted if isinstance(wanted, list) else captions_evenly(job, wanted)
    return [Prompt(prompt=one) if isinstance(one, str) else one for one in given]


def previews_of(job: Job) -> list[PreviewRequest]:
    """The run's previews.

    Raises VideotuneError for a shape that the model cannot sample, and for the same prompt with the same seed.
    """
    sample = job.config.sample
    usual = usual_shape(job)
    found = dict[tuple[str, int], PreviewRequest]()
    for key, prompt in zip(names_of(job), prompts_of(job), strict=True):
        own = prompt.model_dump(exclude_none=True, exclude={"prompt"})
        config = job.config.model_copy(update={"sample": sample.model_copy(update=own)})
        if key in found:
            raise VideotuneError(
                f"samples: {key[0]!r} is there twice with seed {key[1]}: give one another seed"
            )
        found[key] = PreviewRequest(*key, sample_settings(config, job.spec, usual))
    return list(found.values())


def names_of(job: Job) -> list[tuple[str, int]]:
    """(prompt, seed) of each preview: a seed of its own, or the run's and one more for each prompt before it."""
    first = job.config.sample.seed
    return [
        (one.prompt, first + i if one.seed is None else one.seed)
        for i, one in enumerate(prompts_of(job))
    ]


def captions_evenly(job: Job, most: int) -> list[str]:
    """At most so many different captions, evenly over the training clips."""
    trained = {window.clip_id for window in job.training_windows}
    captions = [
        clip.captions[0]
        for clip in job.library.clips
        if clip.id in trained and clip.captions[0]
    ]
    return list(spread(list(dict.fromkeys(captions)), most))


def first_frames_of(job: Job) -> dict[PreviewRequest, Window]:
    """For each preview the window on whose first frame it is conditioned; empty where previews have text alone.

    That of a clip whose caption it is, else of the first windows, one prompt after the other; of the preview's own shape,
    for the states of a frame are encoded for so many of them. Raises VideotuneError where no window has that shape.
    """
    if not conditions_on_first_frame(job):
        return {}
    return {one: _first_window(job, one, place) for place, one in enumerate(previews_of(job))}


def _first_window(job: Job, preview: PreviewRequest, place: int) -> Window:
    """The window of a preview's shape with its caption, else the ``place``-th of that shape, counted in a circle."""
    wanted = preview.settings.shape
    alike = [window for window in job.training_windows if str(window.shape) == str(wanted)]
    if not alike:
        there = ", ".join(sorted({str(window.shape) for window in job.training_windows}))
        raise VideotuneError(
            f"sample.frames, sample.resolution: a preview of {job.spec.title} begins with the first frame of a clip, and "
            f"no window is {wanted} as the preview is (frames, height, width); there are {there}. Leave both out, or name "
            "one of those."
        )
    return _with_caption(job, alike, preview.prompt, place)


def _with_caption(job: Job, windows: Sequence[Window], prompt: str, place: int) -> Window:
    """The first window with the prompt as its caption, else the ``place``-th, counted in a circle."""
    own = next((one for one in windows if prompt in job.captions[one.id]), None)
    return own or windows[place % len(windows)]


def conditions_on_first_frame(job: Job) -> bool:
    """Whether a run is rather conditioned on first frames than not (``BatchSource.conditions_on_first_frame``)."""
    return (
        job.spec.image_conditioning != "none"
        and (job.config.first_frame_probability or 0.0) >= 0.5
    )


def preview_settings(job: Job) -> SampleSettings:
    """How a run's previews are sampled; where they differ, the one with most tokens."""
    usual = sample_settings(job.config, job.spec, usual_shape(job))
    given = (
        (one.settings for one in previews_of(job))
        if isinstance(job.config.samples, list)
        else ()
    )
    return max(given, key=lambda one: job.spec.tokens(one.shape), default=usual)


def sample_settings(config: Config, spec: ModelSpec, usual: ClipShape) -> SampleSettings:
    """How previews are drawn; ``usual`` is the shape where the config names none.

    Raises VideotuneError for a shape that the model cannot draw, and for a negative prompt that nothing would read.
    """
    sample = config.sample
    rules = spec.rules
    frames = usual.frames if sample.frames is None else sample.frames
    height, width = (
        (usual.height, usual.width)
        if sample.resolution is None
        else map(int, sample.resolution.split("x"))
    )
    if snap_frames(frames, rules) != frames:
        raise VideotuneError(
            f"sample.frames: {spec.title} draws {frame_rule(rules)}, not {frames}"
        )
    if not is_valid_size((height, width), rules):
        raise VideotuneError(
            f"sample.resolution: {spec.title} draws {size_rule(rules)} pixels, not {height}x{width}"
        )
    shape = ClipShape(frames, height, width, rules.fps)
    settings = settings_at(config, spec, shape, sample.steps or spec.sample_steps)
    if sample.negative and (spec.guidance_embedded or settings.guidance <= 1):
        why = (
            "takes guidance as an input"
            if spec.guidance_embedded
            else "is asked once at guidance 1"
        )
        raise VideotuneError(
            f"sample.negative: {spec.title} {why}, so it reads no negative prompt; leave it out"
        )
    return replace(settings, negative=sample.negative)


def settings_at(
    config: Config, spec: ModelSpec, shape: ClipShape, steps: int
) -> SampleSettings:
    """The config's settings of a sample at a shape, in so many denoising steps."""
    sample = config.sample
    guidance = spec.sample_guidance if sample.guidance is None else sample.guidance
    return SampleSettings(
        shape, steps, guidance, sample.shift, sample.guidance_2, sample.use_temporal_attention
    )


def usual_shape(job: Job) -> ClipShape:
    """The bucket with most training windows; of videos where there are any."""
    count = Counter(window.shape for window in job.training_windows)
    return max(count, key=lambda shape: (shape.frames > 1, count[shape], shape))


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
        return [
            (i % len(self.prompts), self.seed + i // len(self.prompts))
            for i in range(self.samples)
        ]


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
    prompts = metric_prompts(job)
    config = job.config
    if not prompts:
        return None
    usual = usual_shape(job)
    first = metric_conditioning(job, prompts)
    shape = usual if first else metric_shape(usual, job.spec.rules)
    settings = settings_at(config, job.spec, shape, config.sample_metrics.steps)
    return SampleMetricsPlan(
        tuple(prompts), config.sample_metrics.samples, config.sample.seed, settings, first
    )


def metric_shape(usual: ClipShape, rules: VideoRules) -> ClipShape:
    """The smallest frame count from 5 up and half the sides, as the model takes them; of images images."""
    least = valid_at_least(LEAST_FRAMES, rules)
    frames = usual.frames if least is None else min(least, usual.frames)
    if rules.size is not None:
        return ClipShape(frames, *rules.size, usual.fps)
    step = rules.side_multiple
    height, width = (
        max(step, side // 2 // step * step) for side in (usual.height, usual.width)
    )
    return ClipShape(frames, height, width, usual.fps)


def metric_conditioning(job: Job, prompts: Sequence[str]) -> tuple[Window, ...]:
    """For each prompt the window on whose first frame its samples are conditioned; empty where they have text alone.

    Held-out windows where there are any, since a sample that begins with a training clip's frame is near it by itself. The
    states of a frame are cached for the windows' own shape, so such a probe has that and costs as much as a preview.
    """
    if not conditions_on_first_frame(job):
        return ()
    shape = str(usual_shape(job))
    library = job.library
    held_out = [window for window in library.held_out_windows if str(window.shape) == shape]
    pool = held_out or [window for window in job.training_windows if str(window.shape) == shape]
    return tuple(
        _with_caption(job, pool, prompt, place) for place, prompt in enumerate(prompts)
    )


def identity_of(plan: SampleMetricsPlan) -> dict[str, Any]:
    """What decides the pixels of a probe beside the weights, JSON-like."""
    drawn = ("steps", "guidance", "guidance_2", "shift", "temporal_attention")
    return {
        **{name: getattr(plan.settings, name) for name in drawn},
        "prompts": list(plan.prompts),
        "samples": plan.samples,
        "seed": plan.seed,
        "shape": str(plan.settings.shape),
        "fps": plan.settings.shape.fps,
        "told": [window.id for window in plan.first],
    }
