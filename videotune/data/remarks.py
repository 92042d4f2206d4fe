"""Warnings and notes on clips: sentences with a code, so that no reader has to find out
by the wording what a sentence is about.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, Self, cast

RemarkCode = Literal[
    "beyond_max_duration",
    "black",
    "borders",
    "caption",
    "caption_lines",
    "caption_reading",
    "captions_alike",
    "captions_elsewhere",
    "captions_without_clip",
    "clipped_sound",
    "cropped",
    "cuts",
    "damaged",
    "distorted",
    "far_rate",
    "fast_clip",
    "few_dependable",
    "few_held_out",
    "few_validations",
    "frame_count",
    "frozen",
    "in_no_window",
    "interlaced",
    "long_clips",
    "mixed_rates",
    "near_duplicate",
    "no_sound",
    "none_held_out",
    "numbered_stills",
    "repeated_frames",
    "shared_sources",
    "short_sound",
    "silent_sound",
    "single_frames",
    "slow_clips",
    "some_in_no_window",
    "sound_dropped",
    "spherical",
    "stereoscopic",
    "transparency",
    "turned",
    "unconverted_colours",
    "unfilled_count",
    "unread",
    "unread_media",
    "unused_masks",
    "unused_references",
    "unused_sound",
    "upscaled",
]
"""What a remark is about."""

SERIOUS: tuple[RemarkCode, ...] = (
    "far_rate",
    "captions_elsewhere",
    "captions_without_clip",
    "unread_media",
    "numbered_stills",
    "caption_lines",
    "slow_clips",
    "unfilled_count",
    "long_clips",
    "single_frames",
    "captions_alike",
    "unused_masks",
    "unused_references",
    "sound_dropped",
    "none_held_out",
    "few_held_out",
    "shared_sources",
    "few_validations",
    "caption_reading",
)
"""Notes on a dataset by which something else is trained or measured than its owner may
think, the most serious first.
"""

SHOWN = 2
"""Notes that are shown where there is no room for all, at least."""


class Remark(str):
    """A warning or note on clips. It is a text everywhere."""

    __slots__ = ("code",)

    code: str

    def __new__(cls, code: RemarkCode, text: str) -> Self:
        """Build a remark from its code and its sentence."""
        remark = super().__new__(cls, text)
        remark.code = code
        return remark

    def __getnewargs__(self) -> Any:
        """Return the arguments that copies and pickles are built with."""
        return self.code, str(self)


class Urgent(str):
    """A note that asks for a decision like those of ``SERIOUS``, on a setting, so that it
    has no code of a remark on clips.
    """

    __slots__ = ()


def code_of(line: str) -> str:
    """Return what a line is about; empty for one that only says what is done."""
    return line.code if isinstance(line, Remark) else ""


def codes_of(lines: Iterable[str]) -> list[str]:
    """Return the code of each line."""
    return [code_of(line) for line in lines]


def most_serious_first(lines: Iterable[str]) -> list[str]:
    """Return notes once each: those that ask for a decision, other remarks, and then
    lines that only say what is done.
    """
    return sorted(dict.fromkeys(lines), key=_rank)


def shown_first(lines: Sequence[str]) -> list[str]:
    """Return the notes that are shown where there is no room for all: each that asks for
    a decision, and at least ``SHOWN`` in all.
    """
    ordered = most_serious_first(lines)
    serious = sum(_rank(line) < _ORDINARY for line in ordered)
    return ordered[: max(SHOWN, serious)]


_ORDINARY = len(SERIOUS) + 1
"""The rank of a remark that asks for nothing."""


def _rank(line: str) -> int:
    """Return the place of a note in the order of what it asks of its reader."""
    if isinstance(line, Urgent):
        return 0
    code = code_of(line)
    if code in SERIOUS:
        return 1 + SERIOUS.index(cast(RemarkCode, code))
    return _ORDINARY if code else _ORDINARY + 1


def with_codes(lines: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Return lines of a file with their codes, which an older file may lack."""
    remarks = []
    for line, code in zip_longest(lines, codes[: len(lines)], fillvalue=""):
        remarks.append(Remark(cast(RemarkCode, code), line) if code else line)
    return remarks
