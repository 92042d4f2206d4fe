"""Lines on clips: their order by name, and notes that several of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from videotune.console import tell

ALIKE = 4
"""Clips with the same note that share a line, at least."""


def natural(path: str) -> list[Any]:
    """Return a key that sorts numbers in names by their value: clip_2 before clip_10."""
    key = []
    for part in re.split(r"([0-9]{1,18})", path):
        is_number = part.isdecimal()
        key.append((is_number, int(part) if is_number else 0, part))
    return key


def print_notes(notes: Mapping[str, str]) -> None:
    """Print each clip's note; clips with the same note share a line from ALIKE on."""
    clips_of: dict[str, list[str]] = {}
    for clip, note in notes.items():
        clips_of.setdefault(note, []).append(clip)

    for note, clips in clips_of.items():
        if len(clips) >= ALIKE:
            tell(f"{len(clips)} clips ({clips[0]}, {clips[1]}, …): {note}")
            continue
        for clip in clips:
            tell(f"{clip}: {note}")
