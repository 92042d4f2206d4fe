"""Walk through folders whose links are followed, but not for ever."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from videotune.errors import VideotuneError

MOST_VISITS = 100
"""Times that one folder may be reached, by links from different places.

A stranger's dataset may have 40 folders with two links each to the next one, and so a
trillion ways to the last.
"""


class LinkGuard:
    """Stops a walk at circular links, and refuses links that lead to one folder again and
    again.
    """

    def __init__(self) -> None:
        self._visits: Counter[str] = Counter()

    def enter(self, folder: str, ancestors: frozenset[str]) -> frozenset[str] | None:
        """Return the ancestors of what is in a folder; None if a link leads in a circle.

        Args:
            folder: the folder that the walk has reached.
            ancestors: real paths of the folders on the way to it.

        Raises:
            VideotuneError: if more than ``MOST_VISITS`` ways lead to it.
        """
        real_path = os.path.realpath(folder)
        if real_path in ancestors:
            return None

        self._visits[real_path] += 1
        if self._visits[real_path] > MOST_VISITS:
            raise VideotuneError(
                f"{folder}: links lead to the folder {real_path} in more than {MOST_VISITS} ways. "
                "Remove links that are not needed."
            )
        return ancestors | {real_path}


def walk_folders(root: Path | str) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below a dataset's folder, and itself, with its files' names.

    Hidden folders are left out and links followed, as a dataset is read. A folder that
    cannot be read is left out too: what reads the clips reports it.

    Raises:
        VideotuneError: as ``LinkGuard.enter`` does.
    """
    guard = LinkGuard()
    waiting: list[tuple[str, frozenset[str]]] = [(str(root), frozenset())]
    while waiting:
        folder, ancestors = waiting.pop()
        inner_ancestors = guard.enter(folder, ancestors)
        if inner_ancestors is None:
            continue

        # Only the first level: os.walk itself would follow links in circles.
        for parent, folder_names, file_names in os.walk(folder):
            yield parent, file_names
            for name in folder_names:
                if not name.startswith("."):
                    waiting.append((os.path.join(parent, name), inner_ancestors))
            break
