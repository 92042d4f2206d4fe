"""The media info and content scans of files, remembered, so that a second scan neither reads nor opens one.

A file is known by its path, size and time of change, a content by the hash of its bytes: a file that was moved or copied is
hashed, and nothing else is asked of it again. The index is one JSON file:

    {"version", "av", "files": {path: {size, mtime_ns, id}}, "contents": {id + suffix: {"info", "until", "scan", "problem"}}}

It may have come with a dataset, so that nothing in it is trusted.
"""

import json
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from videotune import files
from videotune.data.archives import FileProgressFn, silent
from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import REASONS, ClipProblem, stat_of
from videotune.data.media_info import MediaInfo
from videotune.data.workers import Call, default_workers

INDEX_VERSION = 5
"""Raised whenever ``probe`` or ``scan_content`` would say something else of the same file."""

SAVE_EVERY = 60.0
"""Seconds of a long scan after which what is known so far is written down."""

SLOWEST_DISK = 10e6
"""Bytes a second: beyond the usual time limit a file gets as long as this takes, since all of it is hashed."""

SLOWEST_DECODER = 20.0
"""Seconds for each second of a clip, beyond the usual time limit: one thread on 8K is about so slow."""

AHEAD = 64
"""Clips given to the workers before their turn: one that hangs holds up the others only when so many wait behind it."""

IndexRow = dict[str, Any]

_ID = re.compile("[0-9a-f]{32}")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What an index can raise that is damaged, or that a dataset brought."""


class Examined(NamedTuple):
    """A file's id (a hash of its bytes; "" where they cannot be read), its media info and content scan, or the problem with
    it; a scan's problem comes with media info."""

    id: str
    info: MediaInfo | None = None
    scan: ContentScan | None = None
    problem: ClipProblem | None = None


class MediaIndex:
    """The index at ``path`` (None: nothing is remembered); the process's own workers answer for what it lacks.

    It is written anew, whole, when something changed: at the end, every minute, and when a call is interrupted. What may be
    otherwise next time (rights, a decoder that crashed or hung) is not remembered. ``notes`` report an index that was
    damaged, or cannot be written.
    """

    def __init__(self, path: Path | None, progress: FileProgressFn = silent) -> None:
        self.path = path
        self._progress = progress
        self.notes: list[str] = []
        self._changed = False
        self._files: dict[str, IndexRow] = {}
        self._contents: dict[str, IndexRow] = {}
        self._read()

    def examine(
        self, paths: Sequence[Path], roots: Sequence[Path], until: float
    ) -> list[Examined]:
        """What each file is, with its first ``until`` seconds scanned; from the index, else from the workers.

        The index counts where size and time of change agree, and where its scan is of the same stretch of the clip, so that
        no run before this one decides what is found. Entries of files below ``roots`` that are gone are dropped; others
        stay. No worker is started when everything is known.
        """
        rows = [(path, *self._remembered(path, until)) for path in paths]
        unknown = [(path, stamp) for path, stamp, found in rows if found is None]
        examined: list[Examined] = []
        written = time.monotonic()
        try:
            with closing(self._ask(unknown, until)) as answers:
                for path, stamp, found in rows:
                    self._progress(len(examined), len(paths), str(path))
                    examined.append(found or self._learn(path, stamp, next(answers), until))
                    if time.monotonic() - written >= SAVE_EVERY:
                        self._write()
                        written = time.monotonic()
            self._progress(len(paths), len(paths), "")
            inside = {_name(path) for path in paths}
            folders = tuple(os.path.join(_name(root), "") for root in roots)
            gone = [
                name for name in self._files if name not in inside and name.startswith(folders)
            ]
            for name in gone:  # not earlier: a moved file's content is known by it
                del self._files[name]
            self._changed |= bool(gone)
        finally:
            self._write()
        return examined

    def _ask(
        self, unknown: Sequence[tuple[Path, IndexRow]], until: float
    ) -> Generator[Any, None, None]:
        """The workers' answers for these files, in order. Contents known by another name are hashed only."""
        if not unknown:
            return
        pool = default_workers()
        alike: dict[tuple[int, str], set[str]] = {
            (stamp["size"], _key("", path)): set() for path, stamp in unknown
        }
        for name, row in self._files.items():
            ids = alike.get((row["size"], _key("", name)))
            if ids is not None and self._known(Path(name), row["id"], until) is not None:
                ids.add(row["id"])

        def calls() -> Iterator[Call]:
            for path, stamp in unknown:
                known = sorted(alike[stamp["size"], _key("", path)])
                limit = (
                    pool.limit
                    + stamp["size"] / SLOWEST_DISK
                    + SLOWEST_DECODER * min(until, 3600.0)
                )
                yield "examine", {"path": _name(path), "until": until, "known": known}, limit

        yield from pool.map(calls(), AHEAD)

    def _remembered(self, path: Path, until: float) -> tuple[IndexRow, Examined | None]:
        """The file's stamp, and what it is if the index knows that file unchanged."""
        try:
            stat = stat_of(path)
        except ClipProblem as problem:
            return {}, Examined("", problem=problem)
        stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        row = self._files.get(_name(path), {})
        return stamp, self._known(
            path, row["id"], until
        ) if stamp.items() <= row.items() else None

    def _known(self, path: Path, clip_id: str, until: float) -> Examined | None:
        """A content as a file has it; None where the index does not hold it so far, or is damaged there."""
        key = _key(clip_id, path)
        try:
            row = self._contents[key]
            info = (
                MediaInfo.from_json(row["info"] | {"path": str(path)})
                if "info" in row
                else None
            )
            if info is not None and min(row["until"], info.seconds) != min(until, info.seconds):
                return None
            scan = ContentScan.from_json(row["scan"]) if "scan" in row else None
            problem = None if scan is not None else _problem(row["problem"])
            return Examined(clip_id, info, scan, problem)
        except _DAMAGE:
            self._changed |= self._contents.pop(key, None) is not None
            if not self.notes:
                self.notes.append(
                    f"the index {self.path} was damaged in part; those files are read again"
                )
            return None

    def _learn(self, path: Path, stamp: IndexRow, answer: Any, until: float) -> Examined:
        """Put a worker's answer into the index, unless it may be another next time."""
        if isinstance(answer, ClipProblem):
            return Examined("", problem=answer)
        clip_id = answer.pop("id")
        if not clip_id:
            return Examined("", problem=_problem(answer["problem"]))
        if answer:
            self._contents[_key(clip_id, path)] = answer | {"until": until}
        self._files[_name(path)] = {**stamp, "id": clip_id}
        self._changed = True
        known = self._known(path, clip_id, until)
        assert known is not None
        return known

    def _read(self) -> None:
        """Read the index; it stays empty, with a note, where it is damaged; another version's is made anew without one."""
        if self.path is None or not self.path.exists():
            return
        try:
            value = files.read_json(self.path)
            if (value["version"], value["av"]) != (INDEX_VERSION, version("av")):
                self._changed = True
                return
            for row in value["files"].values():
                if not (
                    isinstance(row["size"], int)
                    and isinstance(row["mtime_ns"], int)
                    and _ID.fullmatch(row["id"])
                ):
                    raise ValueError("a file's row lacks something")
            if not all(isinstance(row, dict) for row in value["contents"].values()):
                raise TypeError("a content is no object")
            self._files = value["files"]
            self._contents = value["contents"]
        except (OSError, *_DAMAGE) as error:
            self.notes.append(
                f"the index {self.path} was damaged ({type(error).__name__}) and has been rebuilt"
            )
            self._changed = True

    def _write(self) -> None:
        """Write the index whole if it has changed, without contents that no file has."""
        if self.path is None or not self._changed:
            return
        used = {_key(row["id"], name) for name, row in self._files.items()}
        contents = {key: row for key, row in self._contents.items() if key in used}
        value = {
            "version": INDEX_VERSION,
            "av": version("av"),
            "files": self._files,
            "contents": contents,
        }
        try:
            files.write_text(
                self.path, json.dumps(value)
            )  # ASCII, since a file's name may be no valid text
        except OSError as error:
            note = f"{self.path.parent} cannot be written ({error.strerror}): the clips are read again next time"
            self.notes += [note] if note not in self.notes else []
        self._changed = False


def _name(path: Path) -> str:
    return str(path.absolute())


def _key(clip_id: str, path: str | Path) -> str:
    """A content's name: what ``probe`` says depends on the bytes, and on whether the suffix calls them an image."""
    return clip_id + os.path.splitext(path)[1].lower()


def _problem(value: Any) -> ClipProblem:
    """A problem as the index keeps it; ValueError for another."""
    reason, detail = value
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("no problem that clips have")
    return ClipProblem(reason, detail)
