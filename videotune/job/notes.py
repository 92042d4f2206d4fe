"""Sentences for the user on what a config means for its data: unused keys, sizes, clips
that are never shown.
"""

from collections.abc import Mapping, Sequence

from videotune.config.resolve import Resolved
from videotune.config.schema import Config
from videotune.data.dataset import Library
from videotune.latent_cache.exposure import exposure
from videotune.latent_cache.sampler import Schedule, times_seen
from videotune.types import ClipShape, Window

EMBEDDING_KEYS = (
    "embedding_learning_rate",
    "embedding.token",
    "embedding.vectors",
    "embedding.init_text",
)
"""Keys that only the method EMBEDDING uses."""


def sizes_as_read(resolved: Resolved) -> list[str]:
    """Say how the user's resolutions "HxW" are read, because most programs name the
    width first.
    """
    resolutions: list[object] = []
    if resolved.origins.get("resolution") == "user":
        resolutions += _as_list(resolved.config.resolution)
    for dataset in resolved.config.datasets:
        resolutions += _as_list(dataset.resolution)

    notes = []
    for resolution in dict.fromkeys(str(item) for item in resolutions):
        if "x" in resolution:
            height, width = resolution.split("x")
            notes.append(
                f"resolution {resolution} is read as {height} high, {width} wide"
            )
    return notes


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def epoch_notes(
    library: Library,
    windows_by_shape: Mapping[ClipShape, Sequence[Window]],
    schedule: Schedule,
    steps: int,
) -> list[str]:
    """Say if regularization takes most samples, and if training clips are never shown."""
    if not library.windows:
        return []

    views = exposure(times_seen(schedule, steps), list(windows_by_shape.values())).clips
    total = sum(views.values())
    training = [
        count for name, count in views.items() if name not in library.regularization
    ]
    share = (total - sum(training)) / total if total else 0.0

    notes = []
    if share > 0.5:
        notes.append(
            f"regularization takes {share:.0%} of the samples: give the training clips repeats"
        )
    unseen = training.count(0)
    if unseen:
        clips = "1 training clip is" if unseen == 1 else f"{unseen} training clips are"
        notes.append(f"{clips} never shown: {steps} steps are too few")
    return notes


def mixes(library: Library) -> bool:
    """Return whether there are images and videos to train on."""
    return len({clip.still for clip in library.clips if not clip.held_out}) == 2


def unused_keys(resolved: Resolved, library: Library, noisy: bool) -> list[str]:
    """Return a sentence for each key that the user has set and nothing uses.

    Args:
        resolved: the config with its origins.
        library: the clips.
        noisy: the model draws noise onto conditioning frames.
    """
    reasons = {
        **_reasons_of_training(resolved.config),
        **_reasons_of_data(resolved.config, library, noisy),
    }
    notes = []
    for key, reason in reasons.items():
        if reason and resolved.origins[key] == "user":
            notes.append(f"{key} is unused: {reason}")
    return notes


def _reasons_of_training(config: Config) -> dict[str, str | None]:
    """Return why keys of the training are unused, None if they are used."""
    reasons: dict[str, str | None] = {}
    text = config.text_encoder
    is_embedding = config.training_method == "EMBEDDING"

    if not config.transformer.train:
        if is_embedding and config.embedding_learning_rate is not None:
            reasons["learning_rate"] = "embedding_learning_rate is the new tokens' own"
        elif text.train and text.learning_rate is not None:
            reasons["learning_rate"] = (
                "text_encoder.learning_rate is the text encoder's own"
            )
    if not is_embedding:
        for key in EMBEDDING_KEYS:
            reasons[key] = 'training_method is not "EMBEDDING"'
    if not text.train:
        for key in ("text_encoder.learning_rate", "text_encoder.layers"):
            reasons[key] = "the text encoder does not train"
    return reasons


def _reasons_of_data(
    config: Config, library: Library, noisy: bool
) -> dict[str, str | None]:
    """Return why keys of the data and its validation are unused, None if they are used."""
    reasons: dict[str, str | None] = {}
    video = config.video_config
    windows = (*library.windows, *library.held_out_windows)

    if not mixes(library):
        reasons["video_config.video_batch_size_multiplier"] = (
            "images and videos are not mixed here"
        )
    if video.windows != "slide":
        reasons["video_config.window_stride"] = 'video_config.windows is not "slide"'
    if video.frame_sample_strategy != "keyframe":
        reasons["video_config.keyframe_source"] = (
            'frame_sample_strategy is not "keyframe"'
        )
    if not noisy and not any(window.varies for window in windows):
        reasons["video_config.variants"] = "nothing of a window is random"
    if video.stretch:
        reasons["video_config.windows"] = "stretch makes one window of each clip"

    held_out_clips = {window.clip_id for window in library.held_out_windows}
    if config.validate_every == 0:
        reasons["early_stopping"] = (
            "validate_every is 0, and only validations can say when to stop"
        )
    elif len(held_out_clips) < 2:
        reasons["early_stopping"] = (
            "fewer than two clips are held out, and only held-out clips tell learning from copying"
        )
    return reasons
