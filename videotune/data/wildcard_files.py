"""Wildcards from files: ``__colour__`` in a caption stands for a line of
``wildcards/colour.txt`` in the dataset's folder, ``__animals/cats__`` for one of
``wildcards/animals/cats.txt``.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from videotune.bounds import read_limited
from videotune.data.captions import split_variants
from videotune.errors import VideotuneError

WILDCARD_FOLDER = "wildcards"

MAX_FILE_BYTES = 1 << 20
"""Most bytes of a file."""

MAX_LINE_LETTERS = 10_000
"""Most letters of a line."""

MAX_FILES = 1000
"""Most files that the captions of a dataset name."""

_NAME = re.compile(r"__([^\W_][\w-]*?(?:/[^\W_][\w-]*?)*)__")
"""A name has no dots, so it leads out of the folder only by a link."""


class WildcardFiles:
    """The wildcard files of a dataset, each read when a caption names it.

    Args:
        home: the dataset's folder.
        within: files that are links may lead out of this folder only to others of their
            kind.
    """

    def __init__(self, home: Path, within: Path) -> None:
        self.folder = home / WILDCARD_FOLDER
        self._within = within
        self._lines: dict[str, tuple[str, ...]] = {}

    def replace(self, text: str, choose: Callable[[int], int]) -> str:
        """Return a text with a line in the place of each wildcard.

        Args:
            text: the text.
            choose: returns the index of one of so many lines.

        Raises:
            VideotuneError: if a file does not exist or cannot be used.
        """

        def line_of(match: re.Match[str]) -> str:
            lines = self._lines_of(match[1], text)
            return lines[choose(len(lines))]

        return _NAME.sub(line_of, text)

    def refuse_unresolved(self, text: str, most_nesting: int) -> None:
        """Raise VideotuneError if a text still has a wildcard, after so many times."""
        match = _NAME.search(text)
        if match is not None:
            raise VideotuneError(
                f"{self._path_of(match[1])}: its lines lead from wildcard to wildcard more than "
                f"{most_nesting} times, perhaps in a circle. Take {match[0]} out of one of them."
            )

    def _path_of(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def _lines_of(self, name: str, text: str) -> tuple[str, ...]:
        """Return the lines of a file.

        Args:
            name: the name of the wildcard.
            text: the caption that has it, for the error.
        """
        if name in self._lines:
            return self._lines[name]
        if len(self._lines) >= MAX_FILES:
            raise VideotuneError(
                f"{self.folder}: the captions name more than {MAX_FILES} wildcards. "
                "Join some of their files."
            )

        path = self._path_of(name)
        if not path.exists():
            raise VideotuneError(
                f"datasets.caption_wildcards: the caption {text[:60]!r} has __{name}__, and {path} does "
                "not exist. Write it, one text in each line, or take the wildcard out of the caption."
            )
        self._refuse_foreign(path)

        lines = _read_lines(path)
        self._lines[name] = lines
        return lines

    def _refuse_foreign(self, path: Path) -> None:
        """Raise VideotuneError if a file is a link out of the dataset: captions would show
        any text file of this computer.
        """
        target = os.path.realpath(path)
        is_inside = Path(target).is_relative_to(os.path.realpath(self._within))
        if not is_inside:
            raise VideotuneError(
                f"{path} is a link to {target}, outside {self.folder.parent}. "
                "Put the file itself there."
            )


def _read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a file that are neither blank nor begin with #."""
    try:
        text = read_limited(path, MAX_FILE_BYTES, "a file of wildcards").decode(
            "utf-8-sig"
        )
    except OSError as error:
        raise VideotuneError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise VideotuneError(f"{path} is not UTF-8 text. Save it as UTF-8.") from error
    if "\0" in text:
        raise VideotuneError(f"{path} is not UTF-8 text. Save it as UTF-8.")

    lines = [line for line in split_variants(text) if not line.startswith("#")]
    if not lines:
        raise VideotuneError(f"{path} has no line. Write one text in each line.")
    longest = max(len(line) for line in lines)
    if longest > MAX_LINE_LETTERS:
        raise VideotuneError(
            f"{path} has a line of {longest} characters; {MAX_LINE_LETTERS} are used. Shorten it."
        )
    return tuple(lines)
