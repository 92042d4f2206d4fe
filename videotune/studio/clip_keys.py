"""The settings of clips: the keys of a dataset that the user may set for a project."""

from collections.abc import Mapping
from typing import Any

from videotune.config.data_schema import READ_ALIKE

CLIP_KEYS = (
    "trigger",
    "caption_prefix",
    "caption_suffix",
    "caption_shuffle",
    "caption_tag_dropout",
    "caption_keep_tokens",
    "caption_separator",
    "caption_wildcards",
    "caption_variants",
    "caption_weights",
    "caption_dropout",
    "caption_extension",
    "file_column",
    "caption_column",
    "flip",
    "max_clips",
    "frame_folder_fps",
)
"""Keys of a dataset that the user may set for the clips of a project. They are in its
settings as ``datasets.KEY``.
"""

FILE_KEYS = {
    "caption_extension",
    "file_column",
    "caption_column",
    "max_clips",
    "frame_folder_fps",
}
"""Those that say how the files of one folder are read."""

VALIDATION_CLIP_KEYS = tuple(key for key in CLIP_KEYS if key in READ_ALIKE)
"""Those that hold for the validation clips too."""


def keys_of_source(
    clip_keys: Mapping[str, Any], kind: str, *, is_only_place: bool
) -> dict[str, Any]:
    """Return those of a project's settings of clips that hold for a dataset outside it.

    Args:
        clip_keys: the settings.
        kind: the kind of the dataset.
        is_only_place: whether the project has no clips of its own; otherwise those on
            files hold for its own.
    """
    if kind == "regularization":
        return {}
    keys = dict(clip_keys)
    if kind == "validation":
        keys = {key: keys[key] for key in VALIDATION_CLIP_KEYS if key in keys}
    if not is_only_place:
        keys = {key: value for key, value in keys.items() if key not in FILE_KEYS}
    return keys
