"""The media info and content scans of files, remembered, so that a second scan neither reads nor opens one.

A file is known by its path, size and time of change, a content by the hash of its bytes: a file that was moved or copied is
hashed, and nothing else is asked of it again. The index is one JSON file:

    {"version", "av", "files": {path: {size, mtime_ns, id}}, "contents": {id + suffix: {"info" | "problem", "scan"}}}

It may have come with a dataset, so that nothing in it is trusted.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from videotune import files

from .archives import Progress
from .content_scan import ContentScan
from .file_checks import REASONS, ClipProblem, stat_of
from .media_info import MediaInfo
from .workers import Call, DecoderCrash, Workers, default_workers

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

Row = dict[str, Any]
Identified = tuple[str, MediaInfo | ClipProblem]
"""A file's id (a hash of its bytes; "" where they cannot be read), and its media info or the problem with it."""

_T = TypeVar("_T")
_ID = re.compile("[0-9a-f]{32}")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What an index can raise that is damaged, or that a dataset brought."""


class MediaIndex:
    """The index at ``path`` (None: nothing is remembered), and ``workers`` (None: the process's own) for what it lacks.

    It is written anew, whole, when something changed: at the end of each call, every minute, and when a call is
    interrupted. What may be otherwise next time (rights, a decoder that crashed or hung) is not remembered. No worker is
    started when everything is known. ``notes`` report an index that was damaged, or cannot be written.
    """

    def __init__(self, path: Path | None, progress: Progress | None = None, workers: Workers | None = None) -> None:
        self.path = path
        self.notes: list[str] = []
        self._progress = progress
        self._pool = workers
        self._changed = False
        self._files: dict[str, Row] = {}
        self._contents: dict[str, Row] = {}
        self._read()

    def identify(self, paths: Sequence[Path], roots: Sequence[Path]) -> list[Identified]:
        """What each file is, from the index where size and time of change agree, else by hashing and probing it.

        Entries of files below ``roots`` that are gone are dropped; others stay.
        """
        rows = [(path, *self._remembered(path)) for path in paths]
        unknown = [(path, stamp) for path, stamp, found in rows if found is None]
        identified = []
        with closing(self._steps(rows, lambda row: str(row[0]))) as steps, closing(self._probe(unknown)) as answers:
            for path, stamp, found in steps:
                identified.append(found or self._learn(path, stamp, next(answers)))
        inside, folders = {_name(path) for path in paths}, tuple(os.path.join(_name(root), "") for root in roots)
        gone = [name for name in self._files if name not in inside and name.startswith(folders)]
        for name in gone:  # not earlier: a moved file's content is known by it
            del self._files[name]
        self._changed |= bool(gone)
        self._write()
        return identified

    def content_scans(self, identified: Sequence[Identified], until: float) -> list[ContentScan | ClipProblem | None]:
        """The content scan of each file's first ``until`` seconds, or None where it has no media info.

        A remembered scan counts if it is of the same stretch of the clip, so that no run before this one decides what is
        found. Clips that the index does not hold are scanned each time.
        """
        infos = {_key(clip_id, info.path): info for clip_id, info in identified if isinstance(info, MediaInfo)}
        found = {key: scan for key, info in infos.items() if (scan := self._remembered_scan(key, info, until))}
        missing = [info for key, info in infos.items() if key not in found]
        calls = (
            ("content_scan", {"info": info, "until": until}, SLOWEST_DECODER * min(info.seconds, until))
            for info in missing
        )
        with (
            closing(self._steps(list(infos.items()), lambda row: row[1].path)) as steps,
            closing(self._map(calls)) as answers,
        ):
            for key, info in steps:
                if key in found:
                    continue
                answer = next(answers)
                if isinstance(answer, ClipProblem):
                    found[key], row = answer, {"until": until, "problem": [answer.reason, answer.detail]}
                else:
                    found[key], row = ContentScan.from_json(answer), answer
                if key in self._contents and not isinstance(answer, DecoderCrash) and self._is_unchanged(info):
                    self._contents[key] = {**self._contents[key], "scan": row}
                    self._changed = True
        return [
            found[_key(clip_id, info.path)] if isinstance(info, MediaInfo) else None for clip_id, info in identified
        ]

    def _steps(self, items: Sequence[_T], name: Callable[[_T], str]) -> Generator[_T, None, None]:
        """Each item, reported; meanwhile and at the end, whatever that is, the index is written."""
        written = time.monotonic()
        report = self._progress or (lambda done, total, text: None)
        try:
            for done, item in enumerate(items):
                report(done, len(items), name(item))
                yield item
                if time.monotonic() - written >= SAVE_EVERY:
                    self._write()
                    written = time.monotonic()
            report(len(items), len(items), "")
        finally:
            self._write()

    def _map(self, calls: Iterator[tuple[str, Row, float]]) -> Generator[Any, None, None]:
        """The workers' answers to (task, arguments, seconds beyond the usual limit), in order."""
        first = next(calls, None)
        if first is None:
            return
        pool = self._pool or default_workers()

        def limited() -> Iterator[Call]:
            for task, arguments, seconds in (first, *calls):
                yield task, arguments, pool.limit + seconds

        yield from pool.map(limited(), AHEAD)

    def _probe(self, unknown: Sequence[tuple[Path, Row]]) -> Generator[Any, None, None]:
        """The workers' answers for these files, in order. Contents known by another name are hashed only."""
        alike: dict[tuple[int, str], set[str]] = {(stamp["size"], _key("", path)): set() for path, stamp in unknown}
        for name, row in self._files.items():
            ids = alike.get((row["size"], _key("", name)))
            if ids is not None and self._known(Path(name), row["id"]) is not None:
                ids.add(row["id"])
        yield from self._map(
            (
                "probe",
                {"path": _name(path), "unless": sorted(alike[stamp["size"], _key("", path)])},
                stamp["size"] / SLOWEST_DISK,
            )
            for path, stamp in unknown
        )

    def _remembered(self, path: Path) -> tuple[Row, Identified | None]:
        """The file's stamp, and what it is if the index knows that file unchanged."""
        try:
            stat = stat_of(path)
        except ClipProblem as problem:
            return {}, ("", problem)
        stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        row = self._files.get(_name(path), {})
        if stamp != {"size": row.get("size"), "mtime_ns": row.get("mtime_ns")}:
            return stamp, None
        known = self._known(path, row["id"])
        if known is None:
            self._contents.pop(_key(row["id"], path), None)
            self._changed = True
            if not self.notes:
                self.notes.append(f"the index {self.path} was damaged in part; those files are read again")
        return stamp, known

    def _known(self, path: Path, clip_id: str) -> Identified | None:
        """A content as a file has it; None where the index does not hold it or is damaged there."""
        try:
            content = self._contents[_key(clip_id, path)]
            if "problem" in content:
                return clip_id, _problem(content)
            return clip_id, MediaInfo.from_json(content["info"] | {"path": str(path)})
        except _DAMAGE:
            return None

    def _learn(self, path: Path, stamp: Row, answer: Any) -> Identified:
        """Put a worker's answer into the index, unless it may be another next time."""
        if isinstance(answer, ClipProblem):
            return "", answer
        clip_id = answer.pop("id")
        if not clip_id:
            return "", _problem(answer)
        if "info" in answer:
            answer["info"].pop("path")
        if answer:
            self._contents[_key(clip_id, path)] = answer
        self._files[_name(path)] = {**stamp, "id": clip_id}
        self._changed = True
        known = self._known(path, clip_id)
        assert known is not None
        return known

    def _remembered_scan(self, key: str, info: MediaInfo, until: float) -> ContentScan | ClipProblem | None:
        try:
            row = self._contents[key]["scan"]
            if min(row["until"], info.seconds) != min(until, info.seconds):
                return None
            return _problem(row) if "problem" in row else ContentScan.from_json(row)
        except _DAMAGE:
            return None  # it is scanned again

    def _is_unchanged(self, info: MediaInfo) -> bool:
        """Whether the file that was scanned still is the one that the index knows, so that the scan is its content's."""
        row = self._files.get(_name(Path(info.path)), {})
        try:
            stat = os.stat(info.path)
        except OSError:
            return False
        return (stat.st_size, stat.st_mtime_ns) == (row.get("size"), row.get("mtime_ns"))

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
                if not (isinstance(row["size"], int) and isinstance(row["mtime_ns"], int) and _ID.fullmatch(row["id"])):
                    raise ValueError("a file's row lacks something")
            if not all(isinstance(row, dict) for row in value["contents"].values()):
                raise TypeError("a content is no object")
            self._files, self._contents = value["files"], value["contents"]
        except (OSError, *_DAMAGE) as error:
            self.notes.append(f"the index {self.path} was damaged ({type(error).__name__}) and has been rebuilt")
            self._changed = True

    def _write(self) -> None:
        """Write the index whole if it has changed, without contents that no file has."""
        if self.path is None or not self._changed:
            return
        used = {_key(row["id"], name) for name, row in self._files.items()}
        contents = {key: row for key, row in self._contents.items() if key in used}
        value = {"version": INDEX_VERSION, "av": version("av"), "files": self._files, "contents": contents}
        try:
            files.write_text(self.path, json.dumps(value))  # ASCII, since a file's name may be no valid text
        except OSError as error:
            note = f"{self.path.parent} cannot be written ({error.strerror}): the clips are read again next time"
            self.notes += [note] if note not in self.notes else []
        self._changed = False


def _name(path: Path) -> str:
    return str(path.absolute())


def _key(clip_id: str, path: str | Path) -> str:
    """A content's name: what ``probe`` says depends on the bytes, and on whether the suffix calls them an image."""
    return clip_id + os.path.splitext(path)[1].lower()


def _problem(row: Row) -> ClipProblem:
    """A problem as the index keeps it; ValueError for another."""
    reason, detail = row["problem"]
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("no problem that clips have")
    return ClipProblem(reason, detail)
