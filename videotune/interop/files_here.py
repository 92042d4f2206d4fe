"""Whether this machine has a file that a config names.

Whoever sent the config may be allowed to see the files of one folder only. For them all
other files are missing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_seen_folder: ContextVar[Path | None] = ContextVar("_seen_folder", default=None)


@contextmanager
def seen_within(folder: Path | None) -> Iterator[None]:
    """Let only the files below a folder be found; with None, all files of this machine."""
    token = _seen_folder.set(folder)
    try:
        yield
    finally:
        _seen_folder.reset(token)


def is_file(path: Path) -> bool:
    """Return whether a path is a file that may be seen."""
    return _may_be_looked_at(path) and os.path.isfile(path) and _leads_below(path)


def exists(path: Path) -> bool:
    """Return whether a path is a file or folder that may be seen."""
    return _may_be_looked_at(path) and os.path.exists(path) and _leads_below(path)


def _may_be_looked_at(path: Path) -> bool:
    """Return whether a path is below the folder by its name."""
    folder = _seen_folder.get()
    if folder is None:
        return True
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _leads_below(path: Path) -> bool:
    """Return whether a path that exists is below the folder with all links followed."""
    folder = _seen_folder.get()
    return folder is None or path.resolve().is_relative_to(folder.resolve())
