"""What a dataset brings along is not trusted: its cache folder may have been made to change files elsewhere."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

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


def of_types(made: Any) -> None:
    """TypeError or ValueError where a field of this dataclass, made of what a file says, has not the type it declares."""
    for field in fields(made):
        kind, value = str(field.type), getattr(made, field.name)
        if kind.startswith("tuple[") and type(value) is tuple:
            inner = kind.removeprefix("tuple[").split(",")[0]
            values, kind = value, inner
        else:
            values = (value,)
        if any(not _is_of_type(one, kind) for one in values):
            raise TypeError(f"{field.name} is no {field.type}")


def _is_of_type(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("| None")
    kind = kind.removesuffix(" | None")
    return math.isfinite(value) if kind == "float" and type(value) in (int, float) else type(value).__name__ == kind
