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
    "clipped_sound",
    "cropped",
    "cuts",
    "damaged",
    "distorted",
    "fast_clip",
    "few_held_out",
    "few_validations",
    "frame_count",
    "frozen",
    "in_no_window",
    "interlaced",
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
    "unfilled_count",
    "unread",
    "unused_masks",
    "unused_references",
    "unused_sound",
    "upscaled",
]
"""What a remark is about."""


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


def code_of(line: str) -> str:
    """Return what a line is about; empty for one that only says what is done."""
    return line.code if isinstance(line, Remark) else ""


def codes_of(lines: Iterable[str]) -> list[str]:
    """Return the code of each line."""
    return [code_of(line) for line in lines]


def with_codes(lines: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Return lines of a file with their codes, which an older file may lack."""
    remarks = []
    for line, code in zip_longest(lines, codes[: len(lines)], fillvalue=""):
        remarks.append(Remark(cast(RemarkCode, code), line) if code else line)
    return remarks
