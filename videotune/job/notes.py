"""Sentences for the user on what a config means for its data: unused keys, sizes, clips
that are never shown.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from videotune.config.applies import Facts, unused
from videotune.config.resolve import Resolved
from videotune.config.schema import Config
from videotune.config.usual_rates import far_rates
from videotune.data.library import Library
from videotune.data.remarks import Remark, Urgent
from videotune.data.window_table import WindowTable
from videotune.latent_cache.exposure import views_of_clips
from videotune.latent_cache.sampler import Schedule, views_by_position
from videotune.model_spec import ModelSpec
from videotune.text import counted_are
from videotune.types import Window


def reading_notes(resolved: Resolved, spec: ModelSpec) -> list[str]:
    """Say how captions and resolutions are read where somebody may expect otherwise."""
    return caption_reading_notes(spec) + sizes_as_read(resolved)


def sizes_as_read(resolved: Resolved) -> list[str]:
    """Say how the user's resolutions "HxW" are read, because most programs name the
    width first.
    """
    resolutions: list[object] = []
    if resolved.origins.get("resolution") == "user":
        resolutions += _as_list(resolved.config.resolution)
    for dataset in resolved.config.datasets:
        resolutions += _as_list(dataset.resolution)

    notes: list[str] = []
    for resolution in dict.fromkeys(str(item) for item in resolutions):
        height, _, width = resolution.partition("x")
        if width and height != width:
            text = f"resolution {resolution} is read as {height} high, {width} wide"
            notes.append(Urgent(text))
    return notes


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def epoch_notes(
    library: Library,
    buckets: Sequence[Sequence[Window]],
    schedule: Schedule,
    steps: int,
) -> list[str]:
    """Say if regularization takes most samples, and if training clips are never shown."""
    if not library.windows:
        return []

    views = views_of_clips(views_by_position(schedule, steps), buckets, library.columns)
    is_training = (views >= 0) & ~library.columns.regularization
    total = int(views[views >= 0].sum())
    training = int(views[is_training].sum())
    share = (total - training) / total if total else 0.0

    notes: list[str] = []
    if share > 0.5:
        text = f"regularization takes {share:.0%} of the samples: give the training clips repeats"
        notes.append(Urgent(text))
    unseen = int((views[is_training] == 0).sum())
    if unseen:
        clips = counted_are(unseen, "training clip")
        text = (
            f"{clips} never shown: {counted_are(steps, 'step')} too few. Set more steps"
        )
        notes.append(Urgent(text))
    return notes


def mixes(library: Library) -> bool:
    """Return whether there are images and videos to train on."""
    columns = library.columns
    return len(np.unique(columns.still[~columns.held_out])) == 2


def pictures_only_notes(library: Library, spec: ModelSpec) -> list[str]:
    """Say if videos train a model of pictures, which learns nothing of their motion."""
    columns = library.columns
    has_videos = bool((~columns.still & ~columns.held_out).any())
    if spec.rules.most_frames != 1 or not has_videos:
        return []
    text = (
        f"{spec.title} generates single pictures: it learns from single frames of the videos, "
        "and nothing of their motion"
    )
    notes: list[str] = [Urgent(text)]
    return notes


def unused_keys(
    resolved: Resolved,
    library: Library,
    spec: ModelSpec,
    samples_per_step: int,
) -> list[str]:
    """Return a sentence for each key that the user has set and nothing uses.

    Args:
        resolved: the config with its origins.
        library: the clips.
        spec: the model.
        samples_per_step: samples of the largest step.
    """
    facts = facts_of(resolved.config, library, spec, samples_per_step)
    notes: list[str] = []
    for key, condition in unused(facts).items():
        if resolved.origins[key] == "user":
            text = f"{key} is unused: {condition.otherwise}"
            notes.append(Urgent(text))
    return notes


def facts_of(
    config: Config, library: Library, spec: ModelSpec, samples_per_step: int
) -> Facts:
    """Return what is known of a run that decides whether a key acts."""
    held_out = WindowTable.of(library.held_out_windows)
    kinds = [*WindowTable.of(library.windows).used_kinds(), *held_out.used_kinds()]
    has_random_windows = any(kind.varies for kind in kinds)
    held_out_clips = held_out.used_clip_ids()
    splits_by_fraction = None
    if config.validation_fraction > 0:
        splits_by_fraction = bool(held_out_clips)

    return Facts(
        config=config,
        num_denoisers=len(spec.experts),
        mixes_images=mixes(library),
        has_random_windows=has_random_windows or spec.image_noise,
        held_out_clips=len(held_out_clips),
        splits_by_fraction=splits_by_fraction,
        most_frames=max((kind.shape.frames for kind in kinds), default=None),
        samples_per_step=samples_per_step,
    )


def rate_notes(config: Config) -> list[str]:
    """Return a note for each learning rate that is far above the usual one."""
    return [Remark("far_rate", text) for text in far_rates(config).values()]


def warmup_note(config: Config, steps: int) -> list[str]:
    """Say if the run ends before the learning rate reaches its peak."""
    warmup_steps = config.warmup_steps
    if warmup_steps is None or warmup_steps <= steps:
        return []
    text = (
        f"warmup_steps {warmup_steps}: the run ends at step {steps}, when the learning rate has "
        f"reached {steps / warmup_steps:.0%} of its peak"
    )
    notes: list[str] = [Urgent(text)]
    return notes


def caption_reading_notes(spec: ModelSpec) -> list[str]:
    """Say if ComfyUI will read captions differently from the training."""
    if spec.authors_text or not spec.authors_read_otherwise:
        return []
    return [
        Remark(
            "caption_reading",
            f"captions are read as diffusers reads them; ComfyUI reads those of {spec.title} "
            "differently, as the model's authors do. For a result for ComfyUI, set "
            "text_encoder.convention to authors",
        )
    ]


def unweighted_notes(config: Config) -> list[str]:
    """Return a note for each dataset that is not trained on."""
    return [
        f"{dataset.path} is left out: its loss_weight is 0"
        for dataset in config.datasets
        if dataset.loss_weight <= 0
    ]


def interval_notes(config: Config, steps_between: Mapping[str, int]) -> list[str]:
    """Return a note for each interval in epochs, with its steps."""
    notes: list[str] = []
    for key, count in steps_between.items():
        epochs = getattr(config, f"{key}_epochs")
        notes.append(f"{key}_epochs {epochs:g}: {key} = {count}")
    return notes


def preview_notes(config: Config, library: Library, interval: int | None) -> list[str]:
    """Say if previews are to be of captions, and no training clip has one.

    Args:
        config: the config.
        library: the clips.
        interval: steps from one preview to the next.
    """
    are_of_captions = isinstance(config.samples, int) and config.samples > 0
    if not interval or not are_of_captions or not library.windows:
        return []
    if any(clip.captions[0] for clip in library.clips if not clip.held_out):
        return []
    return [
        "no previews are made: their prompts are captions, and no training clip has one. "
        "Set samples to prompts"
    ]


def micro_batch_notes(resolved: Resolved) -> list[str]:
    """Return a note if a micro-batch could hold more than a step has."""
    config = resolved.config
    is_users = resolved.origins.get("micro_batch_size") != "plan"
    micro_batch_size = config.micro_batch_size
    if (
        not is_users
        or micro_batch_size is None
        or micro_batch_size <= config.batch_size
        or any(dataset.batch_size for dataset in config.datasets)
    ):
        return []
    return [
        f"micro_batch_size {micro_batch_size} is unused: batch_size is {config.batch_size}"
    ]
