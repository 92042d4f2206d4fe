"""Errors written for the person: what is wrong, where, and how to mend it."""

from __future__ import annotations

DONE, FAILED, SKIPPED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; an error; something was skipped or does not fit; interrupted and saved."""


class VideotuneError(ValueError):
    """A mistake that the person can mend. The command line prints its text without a traceback."""

    exit_code = FAILED


class DoesNotFit(VideotuneError):
    """Something was skipped, or does not fit; the text says what to change."""

    exit_code = SKIPPED
