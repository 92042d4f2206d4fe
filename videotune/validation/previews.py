"""What a run's previews show: their shape, their prompts, and the first frames that they are conditioned on."""

from collections import Counter

from videotune.config.schema import Config
from videotune.data.buckets import size_rule, suits
from videotune.data.frame_sampling import frame_rule, snap_frames
from videotune.errors import VideotuneError
from videotune.sampling.pipeline import SampleSettings
from videotune.trainer.run_spec import Job
from videotune.types import ClipShape, ModelSpec, Window
from videotune.validation.selection import spread


def prompts_of(job: Job) -> list[str]:
    """The previews' prompts: as given, or so many different captions, evenly over the training clips."""
    wanted = job.config.samples
    return wanted if isinstance(wanted, list) else captions_evenly(job, wanted)


def captions_evenly(job: Job, most: int) -> list[str]:
    """At most so many different captions, evenly over the training clips."""
    trained = {window.clip_id for window in job.training_windows}
    captions = [clip.captions[0] for clip in job.library.clips if clip.id in trained and clip.captions[0]]
    return list(spread(list(dict.fromkeys(captions)), most))


def first_frames_of(job: Job) -> dict[str, Window]:
    """For each prompt the window on whose first frame its preview is conditioned; empty where previews have text alone.

    That of a clip whose caption it is, else of the first windows, one prompt after the other; of the preview's own shape,
    for the states of a frame are encoded for so many of them. Raises VideotuneError where no window has that shape.
    """
    prompts = prompts_of(job)
    if not (prompts and conditions_on_first_frame(job.config, job.spec)):
        return {}
    wanted = sample_settings(job.config, job.spec, usual_shape(job)).shape
    alike = [window for window in job.training_windows if str(window.shape) == str(wanted)]
    if not alike:
        there = ", ".join(sorted({str(window.shape) for window in job.training_windows}))
        raise VideotuneError(
            f"sample.frames, sample.resolution: a preview of {job.spec.title} begins with the first frame of a clip, and "
            f"no window is {wanted} as the preview is (frames, height, width); there are {there}. Leave both out, or name "
            "one of those."
        )
    captions = {clip.id: clip.captions for clip in job.library.clips}
    found, others = {}, 0
    for prompt in prompts:
        own = next((window for window in alike if prompt in captions[window.clip_id]), None)
        if own is None:
            own, others = alike[others % len(alike)], others + 1
        found[prompt] = own
    return found


def conditions_on_first_frame(config: Config, spec: ModelSpec) -> bool:
    """Whether a run is rather conditioned on first frames than not (``Source.conditions_on_first_frame``)."""
    return spec.given != "none" and (config.first_frame_probability or 0.0) >= 0.5


def sample_settings(config: Config, spec: ModelSpec, usual: ClipShape) -> SampleSettings:
    """How previews are drawn; ``usual`` is the shape where the config names none.

    Raises VideotuneError for a shape that the model cannot draw.
    """
    sample, rules = config.sample, spec.rules
    frames = usual.frames if sample.frames is None else sample.frames
    height, width = (usual.height, usual.width) if sample.resolution is None else parse_size(sample.resolution)
    if snap_frames(frames, rules) != frames:
        raise VideotuneError(f"sample.frames: {spec.title} draws {frame_rule(rules)}, not {frames}")
    if not suits((height, width), rules):
        raise VideotuneError(f"sample.resolution: {spec.title} draws {size_rule(rules)} pixels, not {height}x{width}")
    return settings_at(config, spec, ClipShape(frames, height, width, rules.fps), sample.steps or spec.sample_steps)


def settings_at(config: Config, spec: ModelSpec, shape: ClipShape, steps: int) -> SampleSettings:
    """The config's settings of a sample at a shape, in so many denoising steps."""
    sample = config.sample
    guidance = spec.sample_guidance if sample.guidance is None else sample.guidance
    return SampleSettings(shape, steps, guidance, sample.shift, sample.guidance_2, sample.use_temporal_attention)


def parse_size(text: str) -> tuple[int, int]:
    """ "HxW" -> (H, W)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise VideotuneError(f'sample.resolution takes "HxW", such as 480x832, not {text!r}')
    return int(parts[0]), int(parts[1])


def usual_shape(job: Job) -> ClipShape:
    """The bucket with most training windows; of videos where there are any."""
    count = Counter(window.shape for window in job.training_windows)
    return max(count, key=lambda shape: (shape.frames > 1, count[shape], shape))
