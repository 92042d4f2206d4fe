"""WebDataset: a folder of tar files, in which the files of a clip have one name.

``000017.mp4`` is a clip, and its caption is ``000017.txt``, or the text of ``000017.json``.
"""

import json
import os
from pathlib import Path

from videotune import files
from videotune.data.archives import FileProgressFn, unpack_shards
from videotune.data.clip_file import CAPTION_SUFFIX, CLIP_SUFFIXES, has_clip_files
from videotune.data.metadata_files import TEXT_COLUMNS
from videotune.errors import VideotuneError

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")

MAX_SHARDS = 10_000

MAX_JSON_BYTES = 1 << 20
"""Most bytes of a clip's JSON. A larger one is no caption."""


def shards_of(folder: Path) -> list[Path]:
    """Return the shards of a folder, in the order of their names; none if it has clips
    as files.

    Raises:
        VideotuneError: if there are too many of them.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []  # read_folder says why
    shards = [
        folder / name
        for name in names
        if name.lower().endswith(SHARD_SUFFIXES)
        and not name.startswith(".")
        and not (folder / name).is_dir()
    ]
    if not shards or has_clip_files(folder):
        return []
    if len(shards) > MAX_SHARDS:
        raise VideotuneError(
            f"{folder} has {len(shards)} archives; {MAX_SHARDS} are unpacked. "
            "Make several datasets of them."
        )
    return shards


def unpack_clips(
    shards: list[Path], cache: Path, caption_suffix: str, progress: FileProgressFn
) -> Path:
    """Unpack shards and write the captions of their JSON files beside the clips.

    Returns:
        The folder of all of them.
    """
    folder = unpack_shards(shards, cache, progress)
    if caption_suffix == CAPTION_SUFFIX:
        for parent, _, names in os.walk(folder):
            present = set(names)
            for name in names:
                stem, suffix = os.path.splitext(name)
                has_caption = f"{stem}{CAPTION_SUFFIX}" in present
                if suffix.lower() in CLIP_SUFFIXES and not has_caption:
                    _write_caption(Path(parent), stem)
    return folder


def _write_caption(folder: Path, stem: str) -> None:
    """Write the text of a clip's JSON, if it has one, as its caption file."""
    path = folder / f"{stem}.json"
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # the clip has no caption, which the account says
    if not isinstance(value, dict):
        return
    for column in TEXT_COLUMNS:
        text = value.get(column)
        if isinstance(text, str) and text.strip():
            content = text.encode("utf-8", "replace").decode()
            files.write_text(folder / f"{stem}{CAPTION_SUFFIX}", content, durable=False)
            return
