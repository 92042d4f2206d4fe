"""Names of projects: the folder and the title that a new one gets, and what is refused."""

import os
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path

from videotune.errors import VideotuneError

MAX_TITLE_LENGTH = 80
MAX_NAME_LENGTH = 40

UNNAMED = "project"
"""Name of a folder whose title has no letter or digit of ASCII."""


RESERVED_NAMES = frozenset(
    [
        *("bin", "presets", "con", "prn", "aux", "nul"),
        *(f"com{number}" for number in range(10)),
        *(f"lpt{number}" for number in range(10)),
    ]
)
"""Names that no project gets: folders beside the projects, and devices of Windows."""


def free_title(title: str, taken: Collection[str]) -> str:
    """Return a title that is not taken: the same, or with a number."""
    if title not in taken:
        return title
    numbers = range(2, len(taken) + 3)
    candidates = (f"{title[: MAX_TITLE_LENGTH - 6]} {number}" for number in numbers)
    return next(candidate for candidate in candidates if candidate not in taken)


def free_folder(root: Path, title: str) -> Path:
    """Return a folder below ``root``, not there yet, whose name is made of a title."""
    stem = _folder_name(title)
    for number in range(1, 1000):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        if not os.path.lexists(folder):
            return folder
    raise VideotuneError(
        f"there are too many projects called {title!r}: use another name"
    )


def file_stem(folder_name: str, title: str) -> str:
    """Return the name with which files of a project begin outside of it: its folder's,
    unless the project was renamed since the folder was made.

    Args:
        folder_name: name of the project's folder.
        title: the name that the user gives it now.
    """
    stem = _folder_name(title)
    is_of_title = re.fullmatch(rf"{re.escape(stem)}(-\d+)?", folder_name)
    return folder_name if is_of_title or stem == UNNAMED else stem


def _folder_name(title: str) -> str:
    ascii_title = (
        unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    )
    name = re.sub(r"[^a-z0-9]+", "-", ascii_title.lower()).strip("-")
    name = name[:MAX_NAME_LENGTH].strip("-") or UNNAMED
    return f"project-{name}" if name in RESERVED_NAMES else name


def clean_title(title: str) -> str:
    """Return a title with its white space normalized.

    Raises:
        VideotuneError: if it is empty or too long.
    """
    title = " ".join(title.split())
    if not title:
        raise VideotuneError("a project needs a name: type one")
    if len(title) > MAX_TITLE_LENGTH:
        raise VideotuneError(
            f"the project name has {len(title)} characters: use at most {MAX_TITLE_LENGTH}"
        )
    return title
