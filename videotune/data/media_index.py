"""The media index: media info and content scans of files, remembered between scans.

A file is identified by path (relative to the dataset that holds the index), size and
modification time, a content by the hash of its bytes: a file that was moved or copied
is only hashed. The index is one JSON file:

    {
      "version", "av",
      "files": {path: {size, mtime_ns, id}},
      "contents": {id + suffix: {"info", "until", "scan", "problem", "sound"}}
    }

"sound" is the sound scan, which only runs that read sound need.

It may have come with a dataset, so all of its values are checked.
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
from videotune.data.file_checks import REASONS, ClipProblem, check_opens, stat_of
from videotune.data.media_info import MediaInfo
from videotune.data.sound_scan import SoundScan
from videotune.data.workers import Call, default_workers

INDEX_VERSION = 6
"""Increase it whenever ``probe`` or ``scan_content`` returns something else for the
same file.
"""

SAVE_EVERY = 60.0
"""Seconds of a long scan after which the index is saved."""

SLOWEST_DISK = 10e6
"""Bytes a second. A file's time limit grows by the time to hash it at this rate."""

LONGEST_SCAN = 3600.0
"""Seconds of a clip, at most, that its time limit grows by."""

SLOWEST_DECODER = 20.0
"""Seconds per second of a clip, by which its time limit grows: 8K takes so long on one
thread."""

AHEAD = 64
"""Clips submitted to the workers before their turn: one that hangs holds up the others
only if this many are queued behind it.
"""

IndexRow = dict[str, Any]

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

    The index is saved at the end, every minute, and when a call is interrupted.
    Problems that may go away (missing rights, a decoder that crashed or hung) are not
    remembered.

    Args:
        path: the index file; None keeps nothing.
        progress: called with (files done, files in all, current file).
    """

    def __init__(self, path: Path | None, progress: FileProgressFn = silent) -> None:
        self.path = path
        self.notes: list[str] = []
        """Reports of an index that was damaged or cannot be written."""

        self._progress = progress
        self._changed = False
        self._files: dict[str, IndexRow] = {}
        self._contents: dict[str, IndexRow] = {}
        self._read()

    def examine(
        self,
        paths: Sequence[Path],
        roots: Sequence[Path],
        until: float,
        unread: Sequence[Path] = (),
    ) -> list[Examined]:
        """Return media info and content scan of each file; start workers only if
        needed.

        A remembered scan counts only if it covered the same part of the clip, so
        results do not depend on earlier runs.

        Args:
            paths: files of all datasets.
            roots: folders of the datasets; entries of vanished files in them are
                dropped.
            until: seconds of each clip to scan.
            unread: files that are not read now, and whose entries stay.
        """
        lookups = [(path, *self._look_up(path, until)) for path in paths]
        missing = [
            (path, stamp) for path, stamp, remembered in lookups if remembered is None
        ]

        examined: list[Examined] = []
        saved_at = time.monotonic()
        try:
            with closing(self._examine_in_workers(missing, until)) as answers:
                for path, stamp, remembered in lookups:
                    self._progress(len(examined), len(paths), str(path))
                    if remembered is None:
                        remembered = self._store(path, stamp, next(answers), until)
                    examined.append(remembered)

                    if time.monotonic() - saved_at >= SAVE_EVERY:
                        self._write()
                        saved_at = time.monotonic()

            self._progress(len(paths), len(paths), "")
            # Only now: until here the content of a moved file is known by its old path.
            self._drop_vanished([*paths, *unread], roots)
        finally:
            self._write()
        return examined

    def listen(
        self, clips: Sequence[tuple[Path, Examined]], until: float
    ) -> list[Examined]:
        """Return examined clips with their sound scans; start workers only if needed.

        Args:
            clips: path of each file, and the result of examining it.
            until: seconds of each clip to scan.
        """
        keys = []
        missing: dict[str, Path] = {}
        for path, clip in clips:
            can_sound = clip.problem is None and clip.info and not clip.info.still
            key = _content_key(clip.id, path) if can_sound else ""
            keys.append(key)
            if key and not self._has_listened(key, until):
                missing[key] = path

        failures: dict[str, str] = {}
        try:
            answers = self._listen_in_workers(missing, until)
            with closing(answers):
                for position, (key, answer) in enumerate(answers):
                    self._progress(position, len(missing), str(missing[key]))
                    if isinstance(answer, ClipProblem):
                        failures[key] = answer.detail
                    else:
                        self._store_sound(key, answer)
        finally:
            self._write()

        listened = []
        for (path, clip), key in zip(clips, keys, strict=True):
            if key in failures:
                failed_scan = SoundScan(until, problem=failures[key])
                clip = clip._replace(sound=failed_scan)
            elif key:
                row = self._contents[key]
                info = MediaInfo.from_json(row["info"] | {"path": str(path)})
                clip = clip._replace(info=info)
                if info.sound is not None:
                    scan = SoundScan.from_json(row["sound"])
                    clip = clip._replace(sound=scan)
            listened.append(clip)
        return listened

    def _has_listened(self, key: str, until: float) -> bool:
        """Return whether the sound of a content is known up to a second."""
        row = self._contents[key]
        if "sound" not in row["info"]:  # of an earlier version
            return False
        if row["info"]["sound"] is None:
            return True
        try:
            scanned_seconds = SoundScan.from_json(row["sound"]).until
        except _DAMAGE:
            return False
        seconds = MediaInfo.from_json(row["info"] | {"path": ""}).seconds
        return min(scanned_seconds, seconds) == min(until, seconds)

    def _listen_in_workers(
        self, missing: dict[str, Path], until: float
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield the workers' answers for contents, each read from one file, by key."""
        if not missing:
            return
        pool = default_workers()

        def calls() -> Iterator[Call]:
            for key, path in missing.items():
                info = self._contents[key]["info"] | {"path": str(path.absolute())}
                read_seconds = path.stat().st_size / SLOWEST_DISK
                limit = pool.limit + read_seconds + min(until, LONGEST_SCAN)
                yield "listen", {"info": info, "until": until}, limit

        with closing(pool.map(calls(), AHEAD)) as answers:
            yield from zip(missing, answers, strict=True)

    def _store_sound(self, key: str, answer: IndexRow) -> None:
        """Store what ``worker_process.listen`` returned for a content."""
        row = self._contents[key]
        sound = {name: answer[name] for name in ("sound", "unusable_sound")}
        row["info"] = row["info"] | sound
        row["sound"] = answer["scan"]
        self._changed = True

    def _name(self, path: Path) -> str:
        """Return the name of a file in the index."""
        if self.path is None:
            return str(path.absolute())
        return files.name_in_cache(self.path.parent, path)

    def _drop_vanished(self, paths: Sequence[Path], roots: Sequence[Path]) -> None:
        """Drop entries of files below ``roots`` that are not in ``paths``."""
        present_names = {self._name(path) for path in paths}
        folders = [self._name(root) for root in roots]
        vanished_names = [
            name
            for name in self._files
            if name not in present_names
            and any(_is_below(name, folder) for folder in folders)
        ]
        for name in vanished_names:
            del self._files[name]
        self._changed |= bool(vanished_names)

    def _examine_in_workers(
        self, missing: Sequence[tuple[Path, IndexRow]], until: float
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
            candidate_ids[stamp["size"], _content_key("", path)] = set()
        for name, row in self._files.items():
            ids = candidate_ids.get((row["size"], _content_key("", name)))
            if (
                ids is not None
                and self._content(Path(name), row["id"], until) is not None
            ):
                ids.add(row["id"])

        def calls() -> Iterator[Call]:
            for path, stamp in missing:
                arguments = {
                    "path": str(path.absolute()),
                    "until": until,
                    "known_ids": sorted(
                        candidate_ids[stamp["size"], _content_key("", path)]
                    ),
                }
                hash_seconds = stamp["size"] / SLOWEST_DISK
                decode_seconds = SLOWEST_DECODER * min(until, LONGEST_SCAN)
                yield "examine", arguments, pool.limit + hash_seconds + decode_seconds

        yield from pool.map(calls(), AHEAD)

    def _look_up(self, path: Path, until: float) -> tuple[IndexRow, Examined | None]:
        """Return a file's size and modification time, and its entry if these are
        unchanged and the file can still be opened.
        """
        try:
            stat = stat_of(path)
            stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            row = self._files.get(self._name(path), {})
            is_unchanged = stamp.items() <= row.items()
            # A worker opens the others.
            if is_unchanged:
                check_opens(path)
        except ClipProblem as problem:
            return {}, Examined("", problem=problem)

        return stamp, self._content(path, row["id"], until) if is_unchanged else None

    def _content(self, path: Path, content_id: str, until: float) -> Examined | None:
        """Return a remembered content as the file ``path`` has it.

        Returns None if the content is not in the index, was scanned for another part of
        the clip, or is damaged; a damaged entry is dropped.
        """
        key = _content_key(content_id, path)

        try:
            row = self._contents[key]
            info = None
            if "info" in row:
                info = MediaInfo.from_json(row["info"] | {"path": str(path)})
                scanned_seconds = min(row["until"], info.seconds)
                if scanned_seconds != min(until, info.seconds):
                    return None
            scan = ContentScan.from_json(row["scan"]) if "scan" in row else None
            problem = _problem_from_json(row["problem"]) if scan is None else None
            return Examined(content_id, info, scan, problem=problem)
        except _DAMAGE:
            self._changed |= self._contents.pop(key, None) is not None
            if not self.notes:
                self.notes.append(
                    f"the index {self.path} was damaged in part; those files are read again"
                )
            return None

    def _store(
        self, path: Path, stamp: IndexRow, answer: Any, until: float
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

        content_id = answer.pop("id")
        if not content_id:
            return Examined("", problem=_problem_from_json(answer["problem"]))

        # A known content was only hashed.
        if answer:
            row = answer | {"until": until}
            _drop_path(row)
            self._contents[_content_key(content_id, path)] = row
        self._files[self._name(path)] = {**stamp, "id": content_id}
        self._changed = True

        examined = self._content(path, content_id, until)
        assert examined is not None
        return examined

    def _read(self) -> None:
        """Read the index file; leave the index empty if it is damaged or of another
        version.
        """
        if self.path is None or not self.path.exists():
            return

        try:
            value = files.read_json(self.path)
            if (value["version"], value["av"]) != (INDEX_VERSION, version("av")):
                self._changed = True
                return

            for row in value["files"].values():
                is_valid = (
                    isinstance(row["size"], int)
                    and isinstance(row["mtime_ns"], int)
                    and _ID.fullmatch(row["id"])
                )
                if not is_valid:
                    raise ValueError("a file's row has a wrong type")
            if not all(isinstance(row, dict) for row in value["contents"].values()):
                raise TypeError("a content is not an object")

            # Earlier versions named files in a dataset by absolute paths.
            self._files = {
                self._name(Path(name)) if os.path.isabs(name) else name: row
                for name, row in value["files"].items()
            }
            self._contents = value["contents"]
            for row in self._contents.values():
                _drop_path(row)
        except (OSError, *_DAMAGE) as error:
            self.notes.append(
                f"the index {self.path} was damaged ({type(error).__name__}) "
                "and has been rebuilt"
            )
            self._changed = True

    def _write(self) -> None:
        """Write the index if it has changed, without contents that no file has."""
        if self.path is None or not self._changed:
            return

        used_keys = {_content_key(row["id"], name) for name, row in self._files.items()}
        contents = {key: row for key, row in self._contents.items() if key in used_keys}
        value = {
            "version": INDEX_VERSION,
            "av": version("av"),
            "files": self._files,
            "contents": contents,
        }
        try:
            # json.dumps escapes all but ASCII: a file name may not be valid text.
            files.tag_cache(self.path.parent)
            files.write_text(self.path, json.dumps(value))
        except OSError as error:
            note = (
                f"{self.path.parent} cannot be written ({error.strerror}): "
                "the clips are read again next time"
            )
            if note not in self.notes:
                self.notes.append(note)
        self._changed = False


def _drop_path(row: IndexRow) -> None:
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
    return content_id + os.path.splitext(path)[1].lower()


def _problem_from_json(value: Any) -> ClipProblem:
    """Restore a problem from the index; raise ValueError or TypeError if it is invalid."""
    reason, detail = value
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("not a valid problem of a clip")
    return ClipProblem(reason, detail)
