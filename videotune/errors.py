"""Errors written for the person: what is wrong, where, and how to mend it."""

import re
from collections.abc import Iterable

DONE = 0
FAILED = 1
SKIPPED = 2
INTERRUPTED = 130
"""Exit codes: done; an error; something was skipped or does not fit; interrupted and saved."""


LONGEST_WORD = 1000
LONGEST_TEXT = 50_000
"""Characters of a word, and of a text, beyond which a person is shown its ends alone."""

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text as it may be printed: characters that steer a terminal, turn the direction of writing or stand for bytes
    are written as escapes, and what is too long to be read is cut."""
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _cut(word[0], LONGEST_WORD), text)
    text = _cut(text, LONGEST_TEXT)
    return _UNPRINTABLE.sub(lambda char: char[0].encode("unicode_escape").decode(), text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def did_you_mean(names: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence on an unknown name: the names that may be meant, or ``otherwise``."""
    meant = " or ".join(map(repr, names))
    return f"; did you mean {meant}?" if meant else otherwise


class VideotuneError(ValueError):
    """A mistake that the person can mend. The command line prints its text without a traceback."""

    exit_code = FAILED

    def __str__(self) -> str:
        return printable(super().__str__())


class DoesNotFit(VideotuneError):
    """Something was skipped, or does not fit; the text says what to change."""

    exit_code = SKIPPED
