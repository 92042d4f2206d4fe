"""Find the training clip that is nearest to a preview."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.reporter.read import items
from videotune.studio.status import read_live

PLAYABLE_SUFFIXES = (".mp4", ".webm", ".mov", ".m4v")


@lru_cache(maxsize=256)
def nearest(
    home: Path, run: Path, checked_at: int, prompt: str
) -> Mapping[str, str] | None:
    """Return the training clip whose caption shares most words with the prompt.

    Args:
        home: folder of the project.
        run: folder of the run.
        checked_at: when the run's ``check.json`` was written; part of the cache key.
        prompt: the prompt.
    """
    clips = [clip for clip in read_live(run).clips if clip["used"]]
    if not clips:
        return None
    nearest_clip = max(clips, key=lambda clip: _caption_overlap(prompt, clip))
    return clip_of(home, run, nearest_clip)


def _caption_overlap(prompt: str, clip: Mapping[str, Any]) -> float:
    overlaps = [
        word_overlap(prompt, str(caption)) for caption in items(clip["captions"])
    ]
    return max(overlaps, default=0)


def clip_of(home: Path, run: Path, clip: Mapping[str, Any]) -> dict[str, str]:
    """Return name and media path of a clip of a run.

    The path is that of its video if a browser can play it, else that of its picture.
    """
    path = Path(str(clip["path"]))
    is_playable = path.suffix.lower() in PLAYABLE_SUFFIXES and path.is_relative_to(home)

    media_path = path
    if not is_playable or not path.is_file():
        media_path = run / "pictures" / f"{str(clip.get('id'))[:16]}.jpg"
    media_name = ""
    if media_path.is_file():
        media_name = media_path.relative_to(home).as_posix()
    return {
        "name": path.name,
        "path": media_name,
    }


def word_overlap(text: str, reference: str) -> float:
    """Return the share of words that two texts have in common, of all their words."""
    text_words = set(re.findall(r"\w+", text.lower()))
    reference_words = set(re.findall(r"\w+", reference.lower()))
    all_words = text_words | reference_words
    if not all_words:
        return 0.0
    common_words = text_words & reference_words
    return len(common_words) / len(all_words)
