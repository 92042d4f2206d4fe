"""Errors for the user: what is wrong, in which file or key, and what to do."""

import re
from collections.abc import Iterable

DONE = 0
FAILED = 1
SKIPPED = 2
INTERRUPTED = 130
"""Exit codes: done; an error; something was skipped or does not fit; interrupted and
saved.
"""

LONGEST_WORD = 1000
LONGEST_TEXT = 50_000
"""Characters of a word and of a text beyond which only the ends are printed."""

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return the text as it may be printed.

    Characters that control a terminal, reverse the writing direction or encode bytes
    become escapes; text that is too long is shortened.
    """
    long_word = rf"\S{{{LONGEST_WORD + 1},}}"
    text = re.sub(long_word, lambda match: _shorten(match[0], LONGEST_WORD), text)
    text = _shorten(text, LONGEST_TEXT)
    return _UNPRINTABLE.sub(
        lambda char: char[0].encode("unicode_escape").decode(), text
    )


def _shorten(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-most // 4 :]}"


def did_you_mean(names: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a sentence on an unknown name: similar names, or ``otherwise``."""
    suggestions = " or ".join(map(repr, names))
    return f"; did you mean {suggestions}?" if suggestions else otherwise


class VideotuneError(ValueError):
    """A mistake that the user can correct; the command line prints no traceback."""

    exit_code = FAILED

    def __str__(self) -> str:
        return printable(super().__str__())


class DoesNotFit(VideotuneError):
    """Something was skipped, or does not fit; the text says what to change."""

    exit_code = SKIPPED
