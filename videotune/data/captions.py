"""Clips and their captions on disk: the videos/ + captions/ layout and side-car files, reading, trigger word, hints."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from videotune.errors import VideotuneError

from .facts import ClipProblem
from .probe import VIDEO_SUFFIXES

LONG_CAPTION = 512
"""Words beyond which a caption is surely cut by every model's text encoder."""

_TEMPORAL = re.compile(r"\b(first|firstly|then|next|afterwards?|finally|lastly)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ClipFile:
    """A video file of a dataset; ``caption`` is its text file, or None, and ``expected`` where that would have to be."""

    path: Path
    caption: Path | None
    expected: Path


def find_clips(root: Path) -> list[ClipFile]:
    """All video files below ``root`` in path order, each with its caption file.

    A clip somewhere below a folder ``videos`` has its caption at the same place below ``captions`` beside it, or else
    beside itself. Hidden files and folders are passed over; links are followed. VideotuneError for a folder that is not
    there or has no videos.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise VideotuneError(f"The dataset folder {root} {what}. Give the folder that holds the clips.")
    try:
        files = list(_walk(root, frozenset()))
    except OSError as error:
        raise VideotuneError(f"The folder {error.filename} cannot be read: {error.strerror}.") from error
    _check_names(files)
    clips = [_with_caption(root, path) for path in files if path.suffix.lower() in VIDEO_SUFFIXES]
    if not clips:
        there = Counter(path.suffix.lower() or "no suffix" for path in files)
        listing = ", ".join(f"{count} {suffix}" for suffix, count in there.most_common(8)) or "nothing"
        raise VideotuneError(
            f"No video files in {root}: looked for {' '.join(VIDEO_SUFFIXES)} in it and all folders below; "
            f"found {listing}. Give the folder that holds the clips, or that holds videos/ and captions/."
        )
    return sorted(clips, key=lambda clip: clip.path.as_posix())


def _walk(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """Files below a folder; ``above`` are the real paths of the folders on the way, against links in a circle."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(Path(entry.path), above | {real})
        else:
            yield Path(entry.path)


def _check_names(files: list[Path]) -> None:
    for path in files:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise VideotuneError(f"The file name {str(path)!r} is not valid UTF-8. Rename the file.") from error


def _with_caption(root: Path, path: Path) -> ClipFile:
    side_car = path.with_suffix(".txt")
    expected = side_car
    for folder in path.parents:
        if folder.name == "videos":
            expected = folder.with_name("captions") / path.relative_to(folder).with_suffix(".txt")
            break
        if folder == root:
            break
    for place in (expected, side_car):
        if place.is_file():
            return ClipFile(path, place, expected)
    return ClipFile(path, None, expected)


def read_caption(path: Path) -> tuple[str, ...]:
    """The variants of a caption: the lines of a UTF-8 file, trimmed, without blank ones; ClipProblem where there is none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClipProblem("undecodable_caption", f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ClipProblem("missing_caption", f"{path}: {error.strerror}") from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ClipProblem("empty_caption", f"{path} has no text")
    return lines


def with_trigger(caption: str, trigger: str | None) -> str:
    """The caption with the trigger word in front, unless it holds that word already."""
    if not trigger:
        return caption
    if re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def lint(caption: str) -> list[str]:
    """Hints on a caption; none of them is an error."""
    hints = []
    words = sorted({word.lower() for word in _TEMPORAL.findall(caption)})
    if words:
        quoted = ", ".join(f'"{word}"' for word in words)
        hints.append(f"the caption tells a sequence ({quoted}); describe what is seen instead")
    count = len(caption.split())
    if count > LONG_CAPTION:
        hints.append(f"the caption has {count} words; text encoders cut it long before")
    return hints
