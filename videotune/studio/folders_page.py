"""The dialog that chooses a folder or file of the computer of the studio.

A user at the computer may look wherever the studio can read. One who came in with the
password sees only what is below the folder of the projects (``PathRule``).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fastapi import APIRouter, Response
from huggingface_hub import constants

from videotune.errors import VideotuneError
from videotune.studio.paths import PathRule
from videotune.studio.web import CurrentPage, fragment, render

routes = APIRouter()

MAX_SHOWN = 500
"""Entries of a folder that the dialog shows."""

MAX_READ = 20_000
"""Entries of a folder that are read at most."""


@dataclass(frozen=True)
class FolderEntry:
    """A folder or file that the dialog offers."""

    name: str
    path: str
    is_folder: bool
    size: int = 0


@dataclass(frozen=True)
class FolderListing:
    """What the dialog shows of a folder."""

    folder: Path

    above: tuple[Path, ...]
    """The folders that it is in, the outermost first, as far as the user may see them."""

    entries: tuple[FolderEntry, ...]
    """Its folders, then its files."""

    count: int
    """Entries that the search selects, also those that are not shown."""

    is_cut: bool
    """Whether the folder has more entries than are read."""

    note: str = ""
    """Why another folder is shown than the one asked for."""


def list_folder(
    rule: PathRule,
    text: str,
    *,
    start: str = "",
    search: str = "",
    with_files: bool = False,
) -> FolderListing:
    """Return what the user may see of a folder.

    Args:
        rule: what the user may name.
        text: the folder, or a file in it; if it does not exist, the nearest folder above
            it that does. Empty: where the user starts.
        start: the folder in which the user starts, and that a relative path is in.
            Empty: see ``start_folder``.
        search: part of the names to show.
        with_files: whether files are shown, too.

    Raises:
        VideotuneError: if the user may not see the folder, or it cannot be read.
    """
    folder, note = _existing_folder(rule, text.strip(), start)
    try:
        with os.scandir(folder) as scan:
            items = list(islice(scan, MAX_READ + 1))
    except OSError as error:
        raise VideotuneError(
            f"{folder}: this folder cannot be read ({error.strerror})"
        ) from error

    entries = list(_entries(rule, folder, items[:MAX_READ], with_files=with_files))
    wanted = search.strip().casefold()
    selected = [entry for entry in entries if wanted in entry.name.casefold()]
    selected.sort(key=lambda entry: (not entry.is_folder, entry.name.casefold()))
    return FolderListing(
        folder=folder,
        above=_folders_above(rule, folder),
        entries=tuple(selected[:MAX_SHOWN]),
        count=len(selected),
        is_cut=len(items) > MAX_READ,
        note=note,
    )


def start_folder(rule: PathRule) -> Path:
    """Return the folder in which a user starts to look."""
    return rule.root.resolve() if rule.is_restricted else Path.home()


def known_folders(rule: PathRule) -> dict[str, Path]:
    """Return folders that users often look for, by their names."""
    folders = {"Projects": rule.root.resolve()}
    if not rule.is_restricted:
        folders |= {
            "Home": Path.home(),
            "Models of the Hub": Path(constants.HF_HUB_CACHE),
            "Computer": Path(Path.home().anchor),
        }
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def _existing_folder(rule: PathRule, text: str, start: str) -> tuple[Path, str]:
    """Return the folder to show for a text, and why it is another one."""
    if start and not os.path.isabs(os.path.expanduser(text)):
        text = os.path.join(start, text)
    if not text:
        return start_folder(rule), ""
    if "\0" in text:
        raise VideotuneError("the folder: a path has no null character")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise VideotuneError(f"{text[:200]!r}: there is no such user") from error
    if not path.is_absolute():
        # a name, such as that of a model of the Hub, is no place to look at
        return start_folder(rule), ""

    rule.check_path(str(path), "the folder")
    for candidate in (path, *path.parents):
        if os.path.isdir(candidate) and _may_see(rule, candidate):
            is_asked_for = candidate == path or path.is_file()
            note = "" if is_asked_for else f"{path} does not exist."
            return candidate.resolve(), note
    return start_folder(rule), f"{path} does not exist."


def _may_see(rule: PathRule, path: Path) -> bool:
    """Return whether the user may see a path; a visitor sees nothing hidden."""
    if not rule.allows(str(path)):
        return False
    if not rule.is_restricted:
        return True
    parts = path.resolve().relative_to(rule.root.resolve()).parts
    return not any(part.startswith(".") for part in parts)


def _entries(
    rule: PathRule, folder: Path, items: list["os.DirEntry[str]"], *, with_files: bool
) -> Iterator[FolderEntry]:
    """Yield the entries that the user may see."""
    for item in items:
        if item.name.startswith(".") or not _may_see(rule, folder / item.name):
            continue
        try:
            is_folder = item.is_dir()
            size = 0 if is_folder else item.stat().st_size
        except OSError:  # gone meanwhile, or a link to nothing
            continue
        if is_folder or (with_files and item.is_file()):
            yield FolderEntry(item.name, str(folder / item.name), is_folder, size)


def _folders_above(rule: PathRule, folder: Path) -> tuple[Path, ...]:
    return tuple(path for path in reversed(folder.parents) if _may_see(rule, path))


@routes.get("/folders")
def show(
    page: CurrentPage, path: str = "", q: str = "", kind: str = "", start: str = ""
) -> Response:
    """Send the content of the dialog: a folder's entries."""
    rule = page.path_rule
    with_files = kind == "file"
    try:
        listing = list_folder(rule, path, start=start, search=q, with_files=with_files)
    except VideotuneError as error:
        return fragment(
            render("folders", listing=None, error=str(error), known=known_folders(rule))
        )
    return fragment(
        render(
            "folders",
            listing=listing,
            error="",
            known=known_folders(rule),
            search=q,
            with_files=with_files,
            most=MAX_READ,
        )
    )
