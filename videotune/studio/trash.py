"""The bin of a project or of the studio: removed files stay there until restored or
deleted.
"""

import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import Count, Moment, PathText, read_typed, write_json
from videotune.studio.projects import (
    CLIPS,
    DELETED_PREFIX,
    ORIGINALS,
    REMOVED,
    inside,
    visible_files,
)

BIN = "bin"
"""The folder of the bin.

Each item is a folder in it with an ``item.json`` and its files, named 0, 1, 2, …
"""

OLD_FOLDERS = (REMOVED, ORIGINALS)
"""Folders in which earlier versions kept removed clips; each of these clips is an item
too.
"""


@dataclass(frozen=True)
class TrashItem:
    """An item of the bin."""

    id: str

    kind: str
    """clip, run, checkpoint, …"""

    title: str

    when: Moment
    """Time of removal, in seconds since 1970."""

    bytes: Count

    lay: list[PathText]
    """The original path of each file, relative to the folder that has the bin."""


def move_to_trash(home: Path, kind: str, title: str, paths: Sequence[Path]) -> str:
    """Move files and folders into the bin as one item.

    The item records the original paths before the first file is moved, so an
    interrupted move can be restored.

    Args:
        home: folder of the project or of the studio.
        kind: kind of the item.
        title: name that the bin shows.
        paths: files and folders below ``home``.

    Returns:
        The id of the item.
    """
    folder = home / BIN / f"{time.time_ns():x}"
    folder.mkdir(parents=True)
    item = TrashItem(
        id=folder.name,
        kind=kind,
        title=title,
        when=time.time(),
        bytes=sum(_disk_usage(path) for path in paths),
        lay=[path.relative_to(home).as_posix() for path in paths],
    )
    write_json(folder / "item.json", asdict(item))

    for number, path in enumerate(paths):
        os.replace(path, folder / str(number))
    return folder.name


def _disk_usage(path: Path) -> int:
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")))


def list_items(home: Path) -> list[TrashItem]:
    """Return the items of the bin, newest first."""
    items = []
    for folder in OLD_FOLDERS:
        for path in visible_files(home / folder):
            if path.suffix.lower() != ".txt":
                items.append(_old_item(home, path.relative_to(home).as_posix()))

    for path in (home / BIN).glob("[!.]*/item.json"):
        items.append(_item_or_placeholder(path))
    return sorted(items, key=lambda item: -item.when)


def _item_or_placeholder(path: Path) -> TrashItem:
    """Return the item of a file; if it is damaged, one that reports it."""
    folder = path.parent
    try:
        item: TrashItem = read_typed(path, TrashItem)
        return replace(item, id=folder.name)
    except (OSError, ValueError) as error:
        return TrashItem(
            id=folder.name,
            kind="damaged",
            title=f"{folder.name}: its item.json is damaged ({error})",
            when=0.0,
            bytes=0,
            lay=[],
        )


def _old_item(home: Path, id: str) -> TrashItem:
    """Return the item of a clip, with its caption, in a folder of an earlier version."""
    path = inside(home, id)
    file_stat = path.stat()
    clip = Path(id.partition("/")[2])
    caption = clip.with_suffix(".txt")

    return TrashItem(
        id=id,
        kind="clip",
        title=path.name,
        when=file_stat.st_ctime,
        bytes=file_stat.st_size,
        lay=[f"{CLIPS}/{clip.as_posix()}", f"{CLIPS}/{caption.as_posix()}"],
    )


def _moves(home: Path, id: str) -> list[tuple[Path, Path]]:
    """Return each file of an item that is in the bin, with its original path."""
    try:
        if id.split("/")[0] in OLD_FOLDERS:
            item = _old_item(home, id)
            clip = home / id
            files = [clip, clip.with_suffix(".txt")]
        else:
            item = read_typed(inside(home / BIN, id) / "item.json", TrashItem)
            files = [home / BIN / id / str(number) for number in range(len(item.lay))]
    except (OSError, ValueError) as error:
        raise VideotuneError(
            "it is no longer in the bin, or its item.json is damaged: restore its files "
            f"by hand from {home / BIN}"
        ) from error

    return [
        (path, inside(home, original))
        for path, original in zip(files, item.lay, strict=True)
        if os.path.lexists(path)
    ]


def restore(home: Path, id: str) -> None:
    """Move the files of an item back to their original paths.

    Raises:
        VideotuneError: if such a path is taken; then nothing is moved.
    """
    moves = _moves(home, id)
    for _, original in moves:
        if os.path.lexists(original):
            raise VideotuneError(
                f"{original.relative_to(home)} already exists: rename or remove it, "
                "then restore"
            )

    for path, original in moves:
        original.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, original)
    shutil.rmtree(home / BIN / id, ignore_errors=True)


def delete(home: Path, id: str) -> None:
    """Delete an item for good, also a damaged one."""
    if id.split("/")[0] in OLD_FOLDERS:
        for path, _ in _moves(home, id):
            path.unlink()
        return

    folder = inside(home / BIN, id)
    if not folder.is_dir():
        raise VideotuneError("it is no longer in the bin")
    # Under another name first, so that a killed studio leaves no half item.
    deleted = home / BIN / f"{DELETED_PREFIX}{secrets.token_hex(4)}"
    os.replace(folder, deleted)
    shutil.rmtree(deleted, ignore_errors=True)
