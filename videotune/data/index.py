"""What is known of each file by path, size and time of change, so that a second scan neither reads nor opens one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from videotune import files

from .facts import ClipProblem, Facts
from .probe import probe

INDEX_VERSION = 1
"""Raised whenever ``probe`` would say something else of the same file."""

Progress = Callable[[int, int, str], None]
"""Told (how many files are done, of how many, which is next)."""


@dataclass(frozen=True)
class Known:
    """A file's id (a hash of its bytes), and its facts or the problem (reason, detail) that it is."""

    id: str
    facts: Facts | None = None
    problem: tuple[str, str] | None = None


def identify(
    paths: Sequence[Path], roots: Sequence[Path], index_path: Path | None, progress: Progress | None = None
) -> tuple[list[Known], list[str]]:
    """What each file is, from the index where size and time of change agree, else by hashing and probing it.

    The index is written anew, whole, when something changed, also when the scan is interrupted. Entries of files below
    ``roots`` that are gone are dropped; others stay. Also returns notes: an index that could not be read is said.
    """
    old, notes = _read(index_path)
    inside = {str(path.absolute()) for path in paths}
    gone = {name for name in old if name not in inside and any(_below(name, root) for root in roots)}
    new = {name: row for name, row in old.items() if name not in gone}
    known: list[Known] = []
    try:
        for done, path in enumerate(paths):
            if progress is not None:
                progress(done, len(paths), str(path))
            known.append(_look_up(path, new))
        if progress is not None:
            progress(len(paths), len(paths), "")
    finally:
        if index_path is not None and (new != old or notes):
            files.write_json(index_path, {"version": INDEX_VERSION, "av": version("av"), "files": new})
    return known, notes


def _below(name: str, root: Path) -> bool:
    return Path(name).is_relative_to(root.absolute())


def _look_up(path: Path, rows: dict[str, Any]) -> Known:
    """The row of this file, made anew in ``rows`` if it is not there or the file has changed."""
    name = str(path.absolute())
    try:
        stat = path.stat()
        stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        row = rows.get(name)
        if row is not None and all(row[key] == value for key, value in stamp.items()):
            return _known(path, row)
        rows.pop(name, None)
        clip_id = files.hash_file(path)
    except OSError as error:  # not kept: rights may change while size and time do not
        return Known("", problem=("unreadable", error.strerror or str(error)))
    try:
        facts = probe(path)
    except ClipProblem as problem:
        rows[name] = stamp | {"id": clip_id, "problem": [problem.reason, problem.detail]}
        return Known(clip_id, problem=(problem.reason, problem.detail))
    rows[name] = stamp | {"id": clip_id, "facts": {k: v for k, v in facts.to_json().items() if k != "path"}}
    return Known(clip_id, facts)


def _known(path: Path, row: dict[str, Any]) -> Known:
    if "problem" in row:
        reason, detail = row["problem"]
        return Known(row["id"], problem=(reason, detail))
    return Known(row["id"], Facts.from_json({"path": str(path)} | row["facts"]))


def _read(index_path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The index's rows, or none with a note where the file is damaged; another version's are made anew without one."""
    if index_path is None or not index_path.exists():
        return {}, []
    try:
        value = files.read_json(index_path)
        if (value["version"], value["av"]) != (INDEX_VERSION, version("av")):
            return {}, []
        rows = {
            str(name): {"size": row["size"], "mtime_ns": row["mtime_ns"], **row} for name, row in value["files"].items()
        }
        for name, row in rows.items():
            _known(Path(name), row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"the index {index_path} was damaged ({type(error).__name__}) and has been rebuilt"]
    return rows, []
