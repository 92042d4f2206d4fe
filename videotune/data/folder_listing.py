"""The files of a dataset folder: a walk that follows links, and leaves out what videotune
wrote: training runs and contact sheets.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from videotune.data.clip_file import (
    CAPTION_SUFFIXES,
    CLIP_FOLDERS,
    CLIP_SUFFIXES,
)
from videotune.data.folder_walk import LinkGuard
from videotune.errors import VideotuneError

RUN_FILES = ("config.json", "journal.jsonl")
"""A folder that has both is a training run."""

SHEET_FILES = ("index.html", "sheet-001.jpg")
"""A folder that has both is a contact sheet."""

FILES_OF_OUTPUTS = {"a training run": RUN_FILES, "a contact sheet": SHEET_FILES}
"""By what videotune wrote, the files by which its folder is known."""


class FolderListing(NamedTuple):
    """The files of a dataset folder."""

    is_linked: dict[str, bool]
    """Whether a link led to a file, by the file's path."""

    output_folders: dict[str, str]
    """Folders that videotune wrote, whose files are left out, with what each is."""

    outside_captions: dict[str, bool]
    """Whether a link led to a file of the ``captions`` folder beside the dataset folder, by
    the file's path.
    """


def list_folder(root: Path) -> FolderListing:
    """List the files of a dataset folder and, if it is itself a ``videos`` folder, those
    of the ``captions`` folder beside it.
    """
    output_folders: dict[str, str] = {}
    outside_captions: dict[str, bool] = {}
    captions_folder = expected_captions_folder(root, root)
    try:
        is_linked = {
            path.removeprefix(f".{os.sep}"): is_link
            for path, is_link in walk(str(root), output_folders)
        }
        if captions_folder != root and captions_folder.is_dir():
            outside_captions = dict(walk(str(captions_folder), {}))
    except OSError as error:
        raise VideotuneError(
            f"The folder {error.filename} cannot be read: {error.strerror}."
        ) from error
    return FolderListing(is_linked, output_folders, outside_captions)


def check_names(paths: Iterable[str]) -> None:
    """Raise VideotuneError for a file name that is not UTF-8, or that has a line break: it
    could look like a line of its own where the name is printed.
    """
    for path in paths:
        if "\n" in path or "\r" in path:
            raise VideotuneError(
                f"The file name {path!r} has a line break. Rename the file."
            )
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise VideotuneError(_name_message(path)) from error


def _name_message(path: str) -> str:
    """Describe a file name that Python could not read, with a remedy."""
    content = os.fsencode(path)
    try:
        name = content.decode()
    except UnicodeDecodeError:
        return f"The file name {path!r} is not valid UTF-8. Rename the file."
    return (
        f"The file name {name!r} cannot be read: Python takes file names for "
        f"{sys.getfilesystemencoding()} here. Set PYTHONUTF8=1."
    )


def walk(folder: str, output_folders: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the files below a folder, each with whether a link led to it.

    Args:
        folder: where to begin.
        output_folders: receives the folders that videotune wrote, whose files are not
            yielded, with what each is.
    """
    yield from _walk_from(folder, LinkGuard(), frozenset(), False, output_folders)


def _walk_from(
    folder: str,
    guard: LinkGuard,
    ancestors: frozenset[str],
    via_link: bool,
    output_folders: dict[str, str],
) -> Iterator[tuple[str, bool]]:
    """Do what ``walk`` does for a folder within it.

    Args:
        folder: the folder.
        guard: stops at circular links.
        ancestors: real paths of the folders above.
        via_link: whether a link led to the folder.
        output_folders: as in ``walk``.
    """
    inner_ancestors = guard.enter(folder, ancestors)
    if inner_ancestors is None:
        return

    with os.scandir(folder) as scanned_entries:
        entries = [entry for entry in scanned_entries if not entry.name.startswith(".")]
    names = {entry.name for entry in entries}
    for output, marks in FILES_OF_OUTPUTS.items():
        if names.issuperset(marks):
            output_folders[folder] = output
            return

    for entry in entries:
        is_link = via_link or entry.is_symlink()
        if _is_folder(entry):
            yield from _walk_from(
                entry.path, guard, inner_ancestors, is_link, output_folders
            )
        else:
            yield entry.path, is_link


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder.

    A link in a circle, or into a folder that may not be entered, is a file if it is named
    like a clip or a caption: that one is skipped, and not the whole dataset.

    Raises:
        OSError: if any other entry cannot be looked at.
    """
    try:
        return entry.is_dir()
    except OSError:
        suffix = os.path.splitext(entry.name)[1].lower()
        if suffix in (*CLIP_SUFFIXES, *CAPTION_SUFFIXES):
            return False
        raise


def named_path(path: Path) -> Path:
    """Return a path that ends with the name of its folder, which "." and "sub/.." do not."""
    return path.resolve() if path.name in ("", "..") else path


def expected_captions_folder(root: Path, folder: Path) -> Path:
    """Return the folder in which the captions of a folder's clips are expected.

    It is below the ``captions`` sibling of the nearest videos/ or images/, else the
    folder itself.
    """
    for ancestor in (folder, *folder.parents):
        clip_folder = named_path(ancestor)
        if clip_folder.name in CLIP_FOLDERS:
            return clip_folder.with_name("captions") / folder.relative_to(ancestor)
        if ancestor == root:
            break
    return folder
