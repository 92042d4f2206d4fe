"""The bin of a project, or of the studio: what was removed lies there until it is restored or deleted for good."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import checked, write_json
from videotune.studio.projects import CLIPS, ORIGINALS, REMOVED, inside, seen_files

BIN = "bin"
"""The folder of the bin; each item is a folder of it with its ``item.json`` and its files, named 0, 1, 2 …"""

OLD = (REMOVED, ORIGINALS)
"""Folders in which earlier versions kept clips that were removed; each of these clips is an item too."""


@dataclass(frozen=True)
class Item:
    """A thing in the bin: its name there, its kind (clip, run, checkpoint …), its title, when it was removed (seconds since
    1970), its size, and where each of its files lay below the home."""

    id: str
    kind: str
    title: str
    when: float
    bytes: int
    lay: list[str]


def throw(home: Path, kind: str, title: str, paths: Sequence[Path]) -> str:
    """Move files and folders into the bin of ``home`` as one item; returns its id.

    The item says where each file lay before the first file is moved, so that an interrupted move can be restored.
    """
    folder = home / BIN / f"{time.time_ns():x}"
    folder.mkdir(parents=True)
    size = sum(one.lstat().st_size for path in paths for one in (path, *path.rglob("*")))
    lay = [path.relative_to(home).as_posix() for path in paths]
    write_json(
        folder / "item.json", asdict(Item(folder.name, kind, title, time.time(), size, lay))
    )
    for number, path in enumerate(paths):
        os.replace(path, folder / str(number))
    return folder.name


def items(home: Path) -> list[Item]:
    """What lies in the bin, the newest first; a damaged item is left out."""
    old = (
        path
        for part in OLD
        for path in seen_files(home / part)
        if path.suffix.lower() != ".txt"
    )
    found = [_of_old(home, path.relative_to(home).as_posix()) for path in old]
    for path in (home / BIN).glob("*/item.json"):
        with suppress(OSError, ValueError):
            found.append(checked(Item, path.read_bytes()))
    return sorted(found, key=lambda item: -item.when)


def _of_old(home: Path, id: str) -> Item:
    """A clip in a folder of an earlier version, with its caption."""
    path = inside(home, id)
    (_, _, place) = id.partition("/")
    about = path.stat()
    lay = [f"{CLIPS}/{place}", f"{CLIPS}/{Path(place).with_suffix('.txt').as_posix()}"]
    return Item(id, "clip", path.name, about.st_ctime, about.st_size, lay)


def _places(home: Path, id: str) -> list[tuple[Path, Path]]:
    """Each file of an item that is in the bin, with the place where it lay."""
    try:
        if id.split("/")[0] in OLD:
            item = _of_old(home, id)
            path = home / id
            kept = [path, path.with_suffix(".txt")]
        else:
            item = checked(Item, (inside(home / BIN, id) / "item.json").read_bytes())
            kept = [home / BIN / id / str(number) for number in range(len(item.lay))]
    except (OSError, ValueError) as error:
        raise VideotuneError("it is no longer in the bin") from error
    return [
        (path, inside(home, place))
        for path, place in zip(kept, item.lay, strict=True)
        if os.path.lexists(path)
    ]


def restore(home: Path, id: str) -> None:
    """Put an item's files back where they lay.

    Raises VideotuneError where something is at such a place; then nothing is moved.
    """
    pairs = _places(home, id)
    if there := [place for _, place in pairs if os.path.lexists(place)]:
        raise VideotuneError(
            f"{there[0].relative_to(home)} is there already: rename or remove it, then restore"
        )
    for path, place in pairs:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    shutil.rmtree(home / BIN / id, ignore_errors=True)


def destroy(home: Path, id: str) -> None:
    """Delete an item for good."""
    for path, _ in _places(home, id):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(home / BIN / id, ignore_errors=True)
