"""What a dataset brings along is not trusted: its cache folder may have been made to change files elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from videotune.errors import VideotuneError


def refuse_links(folder: Path) -> None:
    """VideotuneError where a cache folder holds a link: what is written or deleted through one lies elsewhere."""
    places = [folder]
    for place in places:
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
        link = next((entry.path for entry in found if entry.is_symlink()), None)
        if link is not None:
            raise VideotuneError(
                f"{link} is a link, and a cache holds none: something else may be overwritten through it. Delete the "
                "link, or set cache_dir to another folder."
            )
        if place is folder:  # an archive's own files lie deeper
            places += [Path(entry.path) for entry in found if entry.is_dir()]


def refuse_linked_folder(folder: Path) -> Path:
    """The cache folder of a dataset; VideotuneError where it is a link, which a person names with cache_dir alone."""
    if folder.is_symlink():
        raise VideotuneError(
            f"{folder} is a link to {os.path.realpath(folder)}, and the dataset may have brought it. Delete the link, or "
            "set cache_dir to that folder."
        )
    return folder
