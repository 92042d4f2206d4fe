"""Refuse a dataset with videos that have no caption, before torch is imported."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.config.nested_keys import merge
from videotune.data.captions import caption_message
from videotune.data.clip_file import ClipFile
from videotune.data.layouts import read_folder
from videotune.data.probe import VIDEO_SUFFIXES
from videotune.data.remarks import code_of
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, preset_keys, user_keys

PLAIN_KEYS = {"path", "kind", "repeats", "trigger"}
"""Keys of a dataset that do not decide which files are its clips. A dataset with others
is left to the complete check.
"""

UNUSED_CAPTIONS = ("captions_elsewhere", "captions_without_clip")
"""Codes of the notes on caption files that no clip uses."""


def refuse_missing_captions(overrides: Overrides, allow_skips: str | None) -> None:
    """Refuse videos that surely have no caption, if clips must have one.

    The complete check comes later, with the model's rules. A file that may be a copy of
    another one is left to it, because a copy needs no caption.

    Raises:
        VideotuneError: The videos, and what allows them.
    """
    keys = merge(preset_keys(overrides), user_keys(overrides))
    if allow_skips is not None or keys.get("missing_caption", "error") != "error":
        return

    clips: list[ClipFile] = []
    without_caption: list[ClipFile] = []
    unused: list[str] = []
    for dataset in keys.get("datasets") or ():
        if isinstance(dataset, Mapping):
            clips_of_dataset, notes = _clips_of(dataset)
            clips += clips_of_dataset
            unused += [note for note in notes if code_of(note) in UNUSED_CAPTIONS]
            without_caption += _videos_without_caption(clips_of_dataset)
    if without_caption:
        rows = [(str(clip.path), clip.missing_detail) for clip in without_caption]
        example = without_caption[0].expected_caption
        raise VideotuneError(
            caption_message(
                rows, None, clip_count=len(clips), example=example, unused=unused
            )
        )


def _clips_of(dataset: Mapping[str, Any]) -> tuple[Sequence[ClipFile], list[str]]:
    """Return the clips of a folder, and notes; none, if its keys choose its files."""
    path = str(dataset.get("path"))
    folder = Path(path).expanduser()
    chooses_files = not set(dataset) <= PLAIN_KEYS
    if chooses_files or not folder.is_dir():
        return [], []
    return read_folder(folder)


def _videos_without_caption(clips: Sequence[ClipFile]) -> Sequence[ClipFile]:
    """Return the videos of a folder that have no caption."""
    videos = [clip for clip in clips if _is_video(clip)]
    sizes = {clip.path: clip.path.stat().st_size for clip in videos}
    counts = Counter(sizes.values())

    without_caption = []
    for clip in videos:
        may_be_copy = counts[sizes[clip.path]] > 1
        if clip.missing_detail and not may_be_copy:
            without_caption.append(clip)
    return without_caption


def _is_video(clip: ClipFile) -> bool:
    """Return whether a clip is one video file that exists."""
    is_file = clip.exists and not clip.frames and clip.path.is_file()
    return is_file and clip.path.name.lower().endswith(VIDEO_SUFFIXES)
