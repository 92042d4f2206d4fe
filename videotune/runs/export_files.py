"""The files of a run that may be shared: real exports and previews, and nothing else.

``exports.json`` and its hashes are in the run folder, so they prove nothing about a
folder from someone else.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from videotune.bounds import require_file
from videotune.errors import VideotuneError
from videotune.files import hash_file, hash_path
from videotune.runs.schemas import read_record
from videotune.text import as_argument

RECORDS = ("config", "plan", "check", "exports")
"""JSON files of a run that the model card is made of."""

MARKED_FOLDER = "videotune.json"
"""A file in every folder that videotune exports."""

MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".md")
"""Files of an exported model that may be hard links to those of its base model."""

PREVIEW_SUFFIXES = (".mp4", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".webm")


def read_exports(run: Path) -> list[dict[str, Any]]:
    """Return the entries of ``exports.json``; the run's other records are checked too.

    Raises:
        VideotuneError: if nothing is exported, or if a record of the run is damaged or
            a link.
    """
    refuse_link(run, run / "journal.jsonl")
    for name in RECORDS:
        record = run / f"{name}.json"
        refuse_link(run, record)
        if record.is_file():
            read_record(record)

    path = run / "exports.json"
    if not path.is_file():
        raise VideotuneError(
            f"{run}: nothing is exported. Run: videotune export {as_argument(run)}"
        )
    entries: list[dict[str, Any]] = read_record(path)
    if not entries:
        raise VideotuneError(
            f"{run}: nothing is exported. Run: videotune export {as_argument(run)}"
        )
    return entries


def files_of_exports(
    run: Path, entries: Sequence[Mapping[str, Any]], folders: Sequence[Path] = ()
) -> dict[str, Path]:
    """Return the files of exports by their names in a repository.

    Each file is hashed once, however many entries or folders it belongs to.

    Args:
        run: the run folder.
        entries: the entries of ``exports.json``.
        folders: other folders that exports may be in.

    Raises:
        VideotuneError: if a file is elsewhere, is a link, was not written by an export,
            or was changed.
    """
    hash_real_file = cache(hash_file)

    def hash_once(path: Path) -> str:
        return hash_real_file(Path(os.path.realpath(path)))

    files: dict[str, Path] = {}
    checked_entries: set[tuple[Path, str]] = set()
    for entry in entries:
        path = run / str(entry["path"])
        _refuse_elsewhere(run, path, folders)
        if (path, entry["hash"]) not in checked_entries:
            checked_entries.add((path, entry["hash"]))
            files |= _files_of_export(run, path, entry["hash"], hash_once)
    return files


def _files_of_export(
    run: Path, path: Path, expected_hash: str, hash_once: Callable[[Path], str]
) -> dict[str, Path]:
    """Return the files of an export by their names in a repository.

    Args:
        run: the run folder.
        path: the export.
        expected_hash: of its entry.
        hash_once: returns the hash of a file's bytes.
    """
    require_file(path)
    if not path.exists():
        raise _changed(run, path)

    files = {path.name: path}
    if path.is_dir():
        files = {}
        for file in sorted(path.rglob("*")):
            if not file.is_dir() or file.is_symlink():
                files[file.relative_to(path.parent).as_posix()] = file
    for file in files.values():
        is_model_file = path.is_dir() and file.suffix in MODEL_SUFFIXES
        _refuse_other_file(run, file, may_be_shared=is_model_file)

    if hash_path(path, hash_once) != expected_hash:
        raise _changed(run, path)
    if path.is_dir() and not (path / MARKED_FOLDER).is_file():
        raise VideotuneError(
            f"{path} is no export of videotune: it has no {MARKED_FOLDER}."
            f" Write it again: videotune export {as_argument(run)}"
        )
    if path.is_file():
        _refuse_foreign_file(run, path)
    return files


def check_preview(run: Path, name: str) -> Path:
    """Return a preview's file.

    Args:
        run: the run folder.
        name: its path in the run folder.

    Raises:
        VideotuneError: if it is a link, elsewhere, or neither a video nor a picture.
    """
    path = run / name
    _refuse_elsewhere(run, path, ())
    if path.suffix.lower() not in PREVIEW_SUFFIXES:
        raise VideotuneError(f"{path} is neither a video nor a picture. Remove it")
    _refuse_other_file(run, path, may_be_shared=False)
    return path


def refuse_link(run: Path, path: Path) -> None:
    """Raise VideotuneError if a file of a run is a link, or the same file as another."""
    if not os.path.lexists(path):
        return
    _refuse_other_file(run, path, may_be_shared=False)


def _refuse_elsewhere(run: Path, path: Path, folders: Sequence[Path]) -> None:
    """Raise VideotuneError for a path that is outside the run, or leads out of it."""
    real_path = Path(os.path.realpath(path))
    roots = [Path(os.path.realpath(folder)) for folder in (run, *folders)]
    if not any(real_path.is_relative_to(root) for root in roots):
        raise VideotuneError(
            f"{path} is outside the run {run}, so it is not published."
            f" If it is this run's export, allow its folder: --exports {path.parent}"
        )


def _refuse_other_file(run: Path, path: Path, *, may_be_shared: bool) -> None:
    """Raise VideotuneError for what is not a file of its own.

    Args:
        run: the run, for the message.
        path: the file.
        may_be_shared: it may be a hard link, as a whole model shares its base's files.
    """
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        kind = "a link"
    elif not stat.S_ISREG(facts.st_mode):
        kind = "neither a file nor a folder"
    elif facts.st_nlink > 1 and not may_be_shared:
        kind = "a hard link to another file"
    else:
        return
    raise VideotuneError(
        f"{path} is {kind}, so it is not published. Put a copy in its place,"
        f" or write it again: videotune export {as_argument(run)}"
    )


def _refuse_foreign_file(run: Path, path: Path) -> None:
    """Raise VideotuneError for a file that no export of videotune wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            is_export = "videotune" in (file.metadata() or {})
    except (SafetensorError, OSError):
        is_export = False
    if not is_export:
        raise VideotuneError(
            f"{path} is no export of videotune: its header does not name it."
            f" Write it again: videotune export {as_argument(run)}"
        )


def _changed(run: Path, path: Path) -> VideotuneError:
    return VideotuneError(
        f"{path} is missing or damaged. Remove it and write it again: videotune export {as_argument(run)}"
    )
