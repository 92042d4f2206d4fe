"""The media index: media info and content scans of files, remembered from one start to the next.

A file is identified by path (relative to the dataset that holds the index), size and
modification time, a content by the hash of its bytes: a file that was moved or copied
is only hashed. The index is a database (``index_database``):

    files: path -> size, mtime_ns, key of its content
    contents: id + suffix -> {"info", "until", "scan", "problem", "sound"}

"sound" is the sound scan, which only runs that read sound need.

A data set may have a million clips: what is looked up or read is written to a file as it
comes, and only numbers of each clip are in memory.
"""

import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune import files
from videotune.data.archives import FileProgressFn, silent
from videotune.data.file_checks import ClipProblem, check_opens, stat_of
from videotune.data.index_database import FileRow, IndexDatabase
from videotune.data.index_lookups import (
    LOOKED_UP_TOGETHER,
    FilesToExamine,
    Lookups,
    without_hashes,
)
from videotune.data.index_rows import (
    CONTENT_ID,
    DAMAGE,
    ID_DIGITS,
    Answer,
    ContentRow,
    Examined,
    FileStamp,
    content_key,
    examined_from_row,
    has_listened,
    is_below,
    problem_from_json,
    row_of,
    row_of_answer,
    suffix_of,
    with_failure,
)
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import mirrors_folder, name_in_mirror, size_of
from videotune.data.old_index import take_over
from videotune.data.packed_rows import SpilledRows
from videotune.data.sound_scan import SoundScan
from videotune.data.workers import Call, default_workers

INDEX_NAME = "index.sqlite"
"""Name of the index in a cache folder."""

INDEX_VERSION = 8
"""Increase it whenever ``probe`` or ``scan_content`` returns something else for the
same file.
"""

SAVE_EVERY = 5.0
"""Seconds of a long scan after which the index is saved."""

SLOWEST_DISK = 10e6
"""Bytes a second. A file's time limit grows by the time to hash it at this rate."""

LONGEST_SCAN = 3600.0
"""Most seconds of a clip that lengthen the time limit of its scan, each by
``SLOWEST_DECODER``.
"""

SLOWEST_DECODER = 20.0
"""Seconds that decoding one second of a clip may take: 8K takes so long on one thread."""

MIRRORED = "s3:"
"""How the names of files begin that are on an object store."""

CALLS_AHEAD = 64
"""Clips submitted to the workers before their turn, or more with many workers: one that
hangs holds up the others only if this many are queued behind it.
"""


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
    ) -> Sequence[Examined]:
        """Return media info and content scan of each file; start workers only if
        needed.

        A remembered scan counts only if it covered the same part of the clip, so
        results do not depend on earlier runs.

        Args:
            paths: files of the datasets that are used now.
            roots: folders of the datasets; entries of files that have vanished from them
                are dropped.
            until: seconds of each clip to scan.

        Returns:
            A result for each file, which is read when it is asked for.
        """
        lookups = self._look_up_all(paths, until)
        results: SpilledRows[Any] = lookups.results
        has_changed = False
        self._saved_at = time.monotonic()
        try:
            answers = self._examine_in_workers(lookups.to_examine, until)
            with closing(answers):
                # One stamp and one answer for each missing file, in their order.
                stamps = iter(lookups.to_examine)
                for position, path in enumerate(paths):
                    self._progress(position, len(paths), str(path))
                    if lookups.is_unknown(position):
                        _, stamp = next(stamps)
                        result = self._store(path, stamp, next(answers), until)
                        results[position] = result
                        # Without an id nothing was stored.
                        has_changed = has_changed or result.id != ""
                    self._save_if_due()

            self._progress(len(paths), len(paths), "")
            # Only now: until here the content of a moved file is known by its old path.
            has_dropped = self._drop_vanished(lookups.hashes_of_names(), roots)
            if has_changed or has_dropped:
                self._database.drop_unused_contents()
        finally:
            # close saves the batch; the next use reopens the database.
            self._database.close()
        return results

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
        # 1. Which contents may have sound, and what is remembered of them.
        keys = []
        path_by_key: dict[str, Path] = {}
        for path, clip in clips:
            may_have_sound = clip.problem is None and clip.info and not clip.info.still
            key = content_key(clip.id, path) if may_have_sound else ""
            keys.append(key)
            if key:
                path_by_key[key] = path
        rows = self._rows(list(path_by_key))
        for (_, clip), key in zip(clips, keys, strict=True):
            # If another process has dropped the content since it was examined.
            if key and key not in rows:
                rows[key] = row_of(clip, until)

        # 2. Scan the sound of the others.
        missing = {}
        for key, path in path_by_key.items():
            if not has_listened(rows[key], until):
                missing[key] = path
        failures = self._scan_sound(missing, rows, until)

        # 3. Join the scans with the clips.
        listened = []
        for (path, clip), key in zip(clips, keys, strict=True):
            if key in failures:
                clip = with_failure(path, clip, failures[key], until)
            elif key:
                row = rows[key]
                info = MediaInfo.from_json(row["info"] | {"path": str(path)})
                clip = clip._replace(info=info)
                if info.sound is not None:
                    scan = SoundScan.from_json(row["sound"])
                    clip = clip._replace(sound=scan)
            listened.append(clip)
        return listened

    def _scan_sound(
        self, missing: dict[str, Path], rows: dict[str, ContentRow], until: float
    ) -> dict[str, str]:
        """Scan the sound of contents in workers, and put the scans into their rows and into
        the index. Return what went wrong, by key.
        """
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
        return failures

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

        with closing(pool.map(calls(), CALLS_AHEAD)) as answers:
            yield from zip(missing, answers, strict=True)

    def _store_sound(self, key: str, row: ContentRow, answer: Answer) -> None:
        """Store what ``worker_process.listen`` returned for a content."""
        sound = {name: answer[name] for name in ("sound", "unusable_sound")}
        row["info"] = row["info"] | sound
        row["sound"] = answer["scan"]
        self._database.put_content(key, json.dumps(row))

    def _name(self, path: Path) -> str:
        """Return the name of a file in the index.

        It is always valid text; a file's name may have bytes that are not UTF-8.
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

    def _drop_vanished(
        self, used_hashes: NDArray[np.int64], roots: Sequence[Path]
    ) -> bool:
        """Drop entries of files below ``roots`` that no longer exist; return whether there
        were any.

        Files that exist keep their entries, also if this config does not use them, such as
        masks or what ``max_clips`` leaves out.

        Args:
            used_hashes: hashes of the names of files that are known to exist, sorted.
            roots: folders of the datasets.
        """
        folders = [self._name(root) for root in roots]
        has_dropped = False
        for names in self._database.names():
            vanished_names = []
            for name in without_hashes(names, used_hashes):
                is_of_datasets = any(is_below(name, folder) for folder in folders)
                if is_of_datasets and not os.path.exists(self._path_of(name)):
                    vanished_names.append(name)

            if vanished_names:
                self._database.drop_files(vanished_names)
                has_dropped = True
        return has_dropped

    def _known_ids(
        self, missing: FilesToExamine, until: float
    ) -> dict[tuple[int, str], set[str]]:
        """Return ids of remembered contents that missing files may have, by size and
        suffix.
        """
        ids: dict[tuple[int, str], set[str]] = {}
        for sizes_and_suffixes in missing.by_size():
            sizes = sorted({size for size, _ in sizes_and_suffixes})
            known_files = [
                (name, row)
                for name, row in self._database.files_of_sizes(sizes).items()
                if (row.size, suffix_of(name)) in sizes_and_suffixes
            ]

            for first in range(0, len(known_files), LOOKED_UP_TOGETHER):
                part = known_files[first : first + LOOKED_UP_TOGETHER]
                values = self._database.contents([row.content for _, row in part])
                for name, row in part:
                    if self._remembered(Path(name), row, values, until):
                        size_and_suffix = (row.size, suffix_of(name))
                        content_ids = ids.setdefault(size_and_suffix, set())
                        content_ids.add(row.content[:ID_DIGITS])
        return ids

    def _examine_in_workers(
        self, missing: FilesToExamine, until: float
    ) -> Generator[Any, None, None]:
        """Yield the workers' answers for files, in order; known contents are only
        hashed.
        """
        if not len(missing):
            return
        pool = default_workers()
        candidate_ids = self._known_ids(missing, until)

        def calls() -> Iterator[Call]:
            for path, stamp in missing:
                known_ids = candidate_ids.get((stamp.size, suffix_of(path)), ())
                arguments = {
                    "path": str(path.absolute()),
                    "until": until,
                    "known_ids": sorted(known_ids),
                }
                hash_seconds = stamp.size / SLOWEST_DISK
                decode_seconds = SLOWEST_DECODER * min(until, LONGEST_SCAN)
                yield "examine", arguments, pool.limit + hash_seconds + decode_seconds

        yield from pool.map(calls(), max(CALLS_AHEAD, 4 * pool.count))

    def _look_up_all(self, paths: Sequence[Path], until: float) -> Lookups:
        """Return what is remembered of each file, or its problem if it cannot be opened."""
        lookups = Lookups(paths)
        for first in range(0, len(paths), LOOKED_UP_TOGETHER):
            part = paths[first : first + LOOKED_UP_TOGETHER]
            names = [self._name(path) for path in part]
            rows = self._database.files(names)
            values = self._database.contents(
                [row.content for row in rows.values() if isinstance(row.content, str)]
            )
            for path, name in zip(part, names, strict=True):
                lookups.add(name, self._look_up(path, rows.get(name), values, until))
        return lookups

    def _look_up(
        self, path: Path, row: FileRow | None, values: dict[str, str], until: float
    ) -> Examined | FileStamp:
        """Return what is remembered of a file by the rows that it may have, or its problem;
        its stamp if it must be examined.
        """
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
            is_id = CONTENT_ID.fullmatch(content_id) is not None
            if not is_id or key != content_key(content_id, path):
                raise ValueError("a file's row has a wrong type")
            if key not in values:
                return None
            return examined_from_row(content_id, json.loads(values[key]), path, until)

        except DAMAGE:
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
            return Examined("", problem=problem_from_json(answer["problem"]))

        try:
            row = row_of_answer(answer, path, until)
        except ClipProblem as problem:
            return Examined("", problem=problem)

        key = content_key(answer["id"], path)
        if row:
            values = {key: json.dumps(row)}
            self._database.put_content(key, values[key])
        else:
            values = self._database.contents([key])
        file_row = FileRow(stamp.size, stamp.mtime_ns, key)
        self._database.put_file(self._name(path), file_row)

        examined = self._remembered(path, file_row, values, until)
        if examined is not None:
            return examined

        # The worker only hashed it, because its content was known. Since then another
        # process has dropped the row, or the row is damaged.
        assert answer.keys() == {"id"}
        missing = FilesToExamine([path])
        missing.add(0, stamp)
        with closing(self._examine_in_workers(missing, until)) as answers:
            return self._store(path, stamp, next(answers), until)
