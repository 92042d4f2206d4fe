"""The media index: media info and content scans of files, remembered from one start to the next.

A file is identified by path (relative to the dataset that holds the index), size and
modification time, a content by the hash of its bytes: a file that was moved or copied
is only hashed. The index is a database (``index_database``):

    files: path -> size, mtime_ns, key of its content
    contents: id + suffix -> {"info", "until", "scan", "problem", "sound"}

"sound" is the sound scan, which only runs that read sound need.

It may have come with a dataset, so all of its values are checked.
"""

import json
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from videotune import files
from videotune.data.archives import FileProgressFn, silent
from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import REASONS, ClipProblem, check_opens, stat_of
from videotune.data.index_database import FileRow, IndexDatabase
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import mirrors_folder, name_in_mirror, size_of
from videotune.data.old_index import take_over
from videotune.data.sound_scan import SoundScan
from videotune.data.workers import Call, default_workers

INDEX_NAME = "index.sqlite"
"""Name of the index in a cache folder."""

INDEX_VERSION = 6
"""Increase it whenever ``probe`` or ``scan_content`` returns something else for the
same file.
"""

SAVE_EVERY = 5.0
"""Seconds of a long scan after which the index is saved."""

SLOWEST_DISK = 10e6
"""Bytes a second. A file's time limit grows by the time to hash it at this rate."""

LONGEST_SCAN = 3600.0
"""The limit grows by ``SLOWEST_DECODER`` for each second to be scanned, up to this many
seconds.
"""

SLOWEST_DECODER = 20.0
"""Seconds that decoding one second of a clip may take: 8K takes so long on one thread."""

MIRRORED = "s3:"
"""How the names of files begin that are on an object store."""

LOOKED_UP_TOGETHER = 500
"""Files whose rows are read from the index together."""

AHEAD = 64
"""Clips submitted to the workers before their turn, or more with many workers: one that
hangs holds up the others only if this many are queued behind it.
"""

ContentRow = dict[str, Any]
"""A content in the index, with the keys that the head of this module lists."""

Answer = dict[str, Any]
"""What a task of ``worker_process`` returned."""

ID_DIGITS = 32
"""Digits of a content's id, with which its key begins."""

_ID = re.compile("[0-9a-f]{32}")
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that a damaged or hostile index can raise."""


class FileStamp(NamedTuple):
    """Size and modification time of a file; if both are the same, it is unchanged."""

    size: int
    mtime_ns: int


class Examined(NamedTuple):
    """The result of examining a file."""

    id: str
    """Hash of the file's bytes; "" if they cannot be read."""

    info: MediaInfo | None = None
    scan: ContentScan | None = None
    sound: SoundScan | None = None
    """Scan of its sound; None without a usable track, and until ``listen`` is called."""

    problem: ClipProblem | None = None
    """Why the clip cannot be used. If only the scan failed, there is media info too."""


class MediaIndex:
    """Media info and content scans by file, read from an index or else from the
    workers.

    The index is saved in batches, and when a call is interrupted. Problems that may go
    away (missing rights, a decoder that crashed or hung) are not remembered.

    Args:
        path: the index file; None keeps nothing.
        progress: called with (files done, files in all, current file).
    """

    def __init__(self, path: Path | None, progress: FileProgressFn = silent) -> None:
        self.path = path
        self._notes: list[str] = []
        self._progress = progress
        self._saved_at = 0.0
        versions = {"version": str(INDEX_VERSION), "av": version("av")}
        self._database = IndexDatabase(path, versions)
        if path is not None:
            self._notes += take_over(path, self._database, INDEX_VERSION, self._name)

    @property
    def notes(self) -> list[str]:
        """Reports of an index that was damaged or cannot be written."""
        return [*self._database.notes, *self._notes]

    def examine(
        self,
        paths: Sequence[Path],
        roots: Sequence[Path],
        until: float,
    ) -> list[Examined]:
        """Return media info and content scan of each file; start workers only if
        needed.

        A remembered scan counts only if it covered the same part of the clip, so
        results do not depend on earlier runs.

        Args:
            paths: files of the datasets that are used now.
            roots: folders of the datasets; entries of files that have vanished from them
                are dropped.
            until: seconds of each clip to scan.
        """
        lookups = self._look_up_all(paths, until)
        missing = [
            (path, result)
            for path, result in zip(paths, lookups, strict=True)
            if isinstance(result, FileStamp)
        ]

        examined: list[Examined] = []
        has_changed = False
        self._saved_at = time.monotonic()
        try:
            with closing(self._examine_in_workers(missing, until)) as answers:
                for path, result in zip(paths, lookups, strict=True):
                    self._progress(len(examined), len(paths), str(path))
                    if isinstance(result, FileStamp):
                        result = self._store(path, result, next(answers), until)
                        # Without an id nothing was stored.
                        has_changed = has_changed or result.id != ""
                    examined.append(result)
                    self._save_if_due()

            self._progress(len(paths), len(paths), "")
            # Only now: until here the content of a moved file is known by its old path.
            has_dropped = self._drop_vanished(paths, roots)
            if has_changed or has_dropped:
                self._database.drop_unused_contents()
        finally:
            # close saves the batch; the next use reopens the database.
            self._database.close()
        return examined

    def listen(
        self, clips: Sequence[tuple[Path, Examined]], until: float
    ) -> list[Examined]:
        """Return examined clips with their sound scans; start workers only if needed.

        It may be called after ``examine``, which closes the database: the next use
        reopens it.

        Args:
            clips: path of each file, and the result of examining it.
            until: seconds of each clip to scan.
        """
        keys = []
        path_by_key: dict[str, Path] = {}
        for path, clip in clips:
            may_have_sound = clip.problem is None and clip.info and not clip.info.still
            key = _content_key(clip.id, path) if may_have_sound else ""
            keys.append(key)
            if key:
                path_by_key[key] = path
        rows = self._rows(list(path_by_key))
        for (_, clip), key in zip(clips, keys, strict=True):
            # Another process has dropped the content since it was examined.
            if key and key not in rows:
                rows[key] = _row_of(clip, until)
        missing = {
            key: path
            for key, path in path_by_key.items()
            if not _has_listened(rows[key], until)
        }

        failures: dict[str, str] = {}
        self._saved_at = time.monotonic()
        try:
            answers = self._listen_in_workers(missing, rows, until)
            with closing(answers):
                for position, (key, answer) in enumerate(answers):
                    self._progress(position, len(missing), str(missing[key]))
                    if isinstance(answer, ClipProblem):
                        failures[key] = answer.detail
                    else:
                        self._store_sound(key, rows[key], answer)
                    self._save_if_due()
        finally:
            self._database.close()

        listened = []
        for (path, clip), key in zip(clips, keys, strict=True):
            if key in failures:
                clip = _with_failure(path, clip, failures[key], until)
            elif key:
                row = rows[key]
                info = MediaInfo.from_json(row["info"] | {"path": str(path)})
                clip = clip._replace(info=info)
                if info.sound is not None:
                    scan = SoundScan.from_json(row["sound"])
                    clip = clip._replace(sound=scan)
            listened.append(clip)
        return listened

    def _save_if_due(self) -> None:
        """Save the batch if the last time is ``SAVE_EVERY`` seconds ago."""
        if time.monotonic() - self._saved_at >= SAVE_EVERY:
            self._database.flush()
            self._saved_at = time.monotonic()

    def _rows(self, keys: Sequence[str]) -> dict[str, ContentRow]:
        """Return the rows of contents, of those that have one."""
        return {
            key: json.loads(value)
            for key, value in self._database.contents(keys).items()
        }

    def _listen_in_workers(
        self, missing: dict[str, Path], rows: dict[str, ContentRow], until: float
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield the workers' answers for contents, each read from one file, by key."""
        if not missing:
            return
        pool = default_workers()

        def calls() -> Iterator[Call]:
            for key, path in missing.items():
                info = rows[key]["info"] | {"path": str(path.absolute())}
                size = 0
                with suppress(OSError):  # the worker reports a file that has vanished
                    size = size_of(path, path.stat())
                read_seconds = size / SLOWEST_DISK
                limit = pool.limit + read_seconds + min(until, LONGEST_SCAN)
                yield "listen", {"info": info, "until": until}, limit

        with closing(pool.map(calls(), AHEAD)) as answers:
            yield from zip(missing, answers, strict=True)

    def _store_sound(self, key: str, row: ContentRow, answer: Answer) -> None:
        """Store what ``worker_process.listen`` returned for a content."""
        sound = {name: answer[name] for name in ("sound", "unusable_sound")}
        row["info"] = row["info"] | sound
        row["sound"] = answer["scan"]
        self._database.put_content(key, json.dumps(row))

    def _name(self, path: Path) -> str:
        """Return the name of a file in the index.

        It is text in any case; the name of a file may not be.
        """
        mirrored = name_in_mirror(path)
        if mirrored is not None:
            # The same on every machine, so that an index may be of another one.
            name = os.path.join(MIRRORED, mirrored)
        elif self.path is None:
            name = str(path.absolute())
        else:
            name = files.name_in_cache(self.path.parent, path)
        return (
            name if name.isascii() else name.encode(errors="backslashreplace").decode()
        )

    def _path_of(self, name: str) -> str:
        """Return the path of a file by its name in the index, see ``_name``."""
        if name.startswith(os.path.join(MIRRORED, "")):
            return os.path.join(mirrors_folder(), name[len(MIRRORED) + 1 :])
        if self.path is None:
            return name
        # The names of an index in a dataset begin there, and others are absolute.
        return os.path.join(self.path.parent.absolute().parent, name)

    def _drop_vanished(self, paths: Sequence[Path], roots: Sequence[Path]) -> bool:
        """Drop entries of files below ``roots`` that no longer exist; return whether there
        were any.

        Files that exist keep their entries, also if this config does not use them, such as
        masks or what ``max_clips`` leaves out. Those in ``paths`` are known to exist.
        """
        names = self._database.names() - {self._name(path) for path in paths}
        folders = [self._name(root) for root in roots]
        vanished_names = []
        for name in names:
            is_of_datasets = any(_is_below(name, folder) for folder in folders)
            if is_of_datasets and not os.path.exists(self._path_of(name)):
                vanished_names.append(name)
        if vanished_names:
            self._database.drop_files(vanished_names)
        return bool(vanished_names)

    def _examine_in_workers(
        self, missing: Sequence[tuple[Path, FileStamp]], until: float
    ) -> Generator[Any, None, None]:
        """Yield the workers' answers for files, in order; known contents are only
        hashed.
        """
        if not missing:
            return
        pool = default_workers()

        # Ids of remembered contents that a file may have, by its size and suffix.
        candidate_ids: dict[tuple[int, str], set[str]] = {}
        for path, stamp in missing:
            candidate_ids[stamp.size, _suffix_of(path)] = set()
        sizes = sorted({stamp.size for _, stamp in missing})
        known_files = self._database.files_of_sizes(sizes)
        values = self._database.contents([row.content for row in known_files.values()])
        for name, row in known_files.items():
            ids = candidate_ids.get((row.size, _suffix_of(name)))
            if ids is not None and self._remembered(Path(name), row, values, until):
                ids.add(row.content[:ID_DIGITS])

        def calls() -> Iterator[Call]:
            for path, stamp in missing:
                arguments = {
                    "path": str(path.absolute()),
                    "until": until,
                    "known_ids": sorted(candidate_ids[stamp.size, _suffix_of(path)]),
                }
                hash_seconds = stamp.size / SLOWEST_DISK
                decode_seconds = SLOWEST_DECODER * min(until, LONGEST_SCAN)
                yield "examine", arguments, pool.limit + hash_seconds + decode_seconds

        yield from pool.map(calls(), max(AHEAD, 4 * pool.count))

    def _look_up_all(
        self, paths: Sequence[Path], until: float
    ) -> list[Examined | FileStamp]:
        """Return what is remembered of each file, or its problem if it cannot be opened;
        for a file that must be examined, its stamp.
        """
        lookups: list[Examined | FileStamp] = []
        for first in range(0, len(paths), LOOKED_UP_TOGETHER):
            part = paths[first : first + LOOKED_UP_TOGETHER]
            names = [self._name(path) for path in part]
            rows = self._database.files(names)
            values = self._database.contents(
                [row.content for row in rows.values() if isinstance(row.content, str)]
            )
            for path, name in zip(part, names, strict=True):
                lookups.append(self._look_up(path, rows.get(name), values, until))
        return lookups

    def _look_up(
        self, path: Path, row: FileRow | None, values: dict[str, str], until: float
    ) -> Examined | FileStamp:
        """Return what ``_look_up_all`` does of one file, by the rows that it may have."""
        try:
            stat = stat_of(path)
            stamp = FileStamp(size_of(path, stat), stat.st_mtime_ns)
            if row is None or FileStamp(row.size, row.mtime_ns) != stamp:
                return stamp
            # Nobody opens a file that has not changed, so whether it still opens is asked
            # here. A worker opens those whose stamp is returned.
            check_opens(path)
        except ClipProblem as problem:
            return Examined("", problem=problem)
        remembered = self._remembered(path, row, values, until)
        return stamp if remembered is None else remembered

    def _remembered(
        self, path: Path, file_row: FileRow, values: dict[str, str], until: float
    ) -> Examined | None:
        """Return what is remembered of a content, with this file's path in its media info; drop
        a damaged row.

        Returns None if the content is not in the index, was scanned for another part of
        the clip, or is damaged.

        Args:
            path: the file.
            file_row: its row.
            values: JSON of contents by key.
            until: seconds of the clip to scan.
        """
        key = file_row.content
        try:
            content_id = key[:ID_DIGITS]
            if not _ID.fullmatch(content_id) or key != _content_key(content_id, path):
                raise ValueError("a file's row has a wrong type")
            if key not in values:
                return None
            return _examined_from_row(content_id, json.loads(values[key]), path, until)
        except _DAMAGE:
            if isinstance(key, str):
                self._database.drop_content(key)
            if not self.notes:
                self._notes.append(
                    f"the index {self.path} was damaged in part; those files are read again"
                )
            return None

    def _store(
        self, path: Path, stamp: FileStamp, answer: Answer | ClipProblem, until: float
    ) -> Examined:
        """Store a worker's answer, unless the next attempt may give another.

        Args:
            path: the file.
            stamp: its size and modification time.
            answer: what ``worker_process.examine`` returned, or the worker's failure.
            until: second up to which the content was scanned.
        """
        if isinstance(answer, ClipProblem):
            return Examined("", problem=answer)

        if not answer["id"]:
            return Examined("", problem=_problem_from_json(answer["problem"]))

        key = _content_key(answer["id"], path)
        values = self._store_content(key, answer, until)
        file_row = FileRow(stamp.size, stamp.mtime_ns, key)
        self._database.put_file(self._name(path), file_row)

        examined = self._remembered(path, file_row, values, until)
        if examined is not None:
            return examined

        # Another process has dropped the content since its hash was known.
        assert answer.keys() == {"id"}
        with closing(self._examine_in_workers([(path, stamp)], until)) as answers:
            return self._store(path, stamp, next(answers), until)

    def _store_content(self, key: str, answer: Answer, until: float) -> dict[str, str]:
        """Store a content, unless it was known and only hashed; return its JSON by key.

        The result is empty if another process has dropped a known content.
        """
        row = {name: value for name, value in answer.items() if name != "id"}
        if not row:
            return self._database.contents([key])

        row["until"] = until
        _drop_path(row)
        value = json.dumps(row)
        self._database.put_content(key, value)
        return {key: value}


def _examined_from_row(
    content_id: str, row: ContentRow, path: Path, until: float
) -> Examined | None:
    """Return a content by its row, with a file's path in its media info; None if another
    part of it was scanned.

    Raises:
        _DAMAGE: one of these, if the row is damaged.
    """
    info = None
    if "info" in row:
        info = MediaInfo.from_json(row["info"] | {"path": str(path)})
        scanned_seconds = min(row["until"], info.seconds)
        if scanned_seconds != min(until, info.seconds):
            return None
    scan = ContentScan.from_json(row["scan"]) if "scan" in row else None
    problem = _problem_from_json(row["problem"]) if scan is None else None
    return Examined(content_id, info, scan, problem=problem)


def _row_of(clip: Examined, until: float) -> ContentRow:
    """Return the row of a usable clip whose first ``until`` seconds were scanned."""
    assert clip.info is not None
    assert clip.scan is not None
    row = {"info": clip.info.to_json(), "scan": clip.scan.to_json(), "until": until}
    _drop_path(row)
    return row


def _with_failure(path: Path, clip: Examined, detail: str, until: float) -> Examined:
    """Return a clip whose sound scan failed. If the file no longer opens, that is the
    clip's problem, and not one of its sound.

    Args:
        path: the file.
        clip: the result of examining it.
        detail: how the scan failed.
        until: seconds that were to be scanned.
    """
    try:
        stat_of(path)
        check_opens(path)
    except ClipProblem as problem:
        return clip._replace(problem=problem)
    return clip._replace(sound=SoundScan(until, problem=detail))


def _has_listened(row: ContentRow, until: float) -> bool:
    """Return whether the sound scan of a content covers its first ``until`` seconds."""
    if "sound" not in row["info"]:  # the row is of an earlier version
        return False
    if row["info"]["sound"] is None:
        return True
    try:
        scanned_seconds = SoundScan.from_json(row["sound"]).until
    except _DAMAGE:
        return False
    seconds = MediaInfo.from_json(row["info"] | {"path": ""}).seconds
    return min(scanned_seconds, seconds) == min(until, seconds)


def _drop_path(row: ContentRow) -> None:
    """Remove the path of the file that a content was read from.

    Others may have the same content.
    """
    info = row.get("info")
    if isinstance(info, dict):
        info.pop("path", None)


def _is_below(name: str, folder: str) -> bool:
    """Whether a file is in a folder, both by their names in the index."""
    if folder == os.curdir:
        is_outside = name.startswith(os.path.join(os.pardir, ""))
        return not is_outside and not os.path.isabs(name)
    return name.startswith(os.path.join(folder, ""))


def _content_key(content_id: str, path: str | Path) -> str:
    """Return a content's key: ``probe`` depends on the bytes and on the suffix."""
    return content_id + _suffix_of(path)


def _suffix_of(path: str | Path) -> str:
    """Return the suffix in lower case."""
    return os.path.splitext(path)[1].lower()


def _problem_from_json(value: Any) -> ClipProblem:
    """Restore a problem from the index; raise ValueError or TypeError if it is invalid."""
    reason, detail = value
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("not a valid problem of a clip")
    return ClipProblem(reason, detail)
