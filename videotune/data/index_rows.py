"""Rows of the media index: what they say of a file and of a content.

An index may have come with a dataset, so all of its values are checked.
"""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import REASONS, ClipProblem, check_opens, stat_of
from videotune.data.media_info import MediaInfo
from videotune.data.sound_scan import SoundScan

ContentRow = dict[str, Any]
"""A content in the index, with the keys that the head of ``media_index`` lists."""

Answer = dict[str, Any]
"""What a task of ``worker_process`` returned."""

ID_DIGITS = 32
"""Digits of a content's id, with which its key begins."""

CONTENT_ID = re.compile("[0-9a-f]{32}")
DAMAGE = (
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


def examined_from_row(
    content_id: str, row: ContentRow, path: Path, until: float
) -> Examined | None:
    """Return a content by its row, with a file's path in its media info; None if another
    part of it was scanned.

    Raises:
        DAMAGE: one of these, if the row is damaged.
    """
    info = None
    if "info" in row:
        info = MediaInfo.from_json(row["info"] | {"path": str(path)})
        scanned_seconds = min(row["until"], info.seconds)
        if scanned_seconds != min(until, info.seconds):
            return None
    scan = ContentScan.from_json(row["scan"]) if "scan" in row else None
    problem = problem_from_json(row["problem"]) if scan is None else None
    return Examined(content_id, info, scan, problem=problem)


def row_of_answer(answer: Answer, path: Path, until: float) -> ContentRow:
    """Return the row of a content that a worker has examined; empty if the worker has only
    hashed it, because it was known.

    Args:
        answer: what ``worker_process.examine`` returned.
        path: the file.
        until: seconds of the clip that were to be scanned.

    Raises:
        ClipProblem: if a value of the file is impossible, which no index may hold.
    """
    row = {name: value for name, value in answer.items() if name != "id"}
    if not row:
        return row
    row["until"] = until
    drop_path(row)
    try:
        examined_from_row(answer["id"], row, path, until)
    except DAMAGE as error:
        raise ClipProblem("unreadable", f"its container is damaged: {error}") from error
    return row


def row_of(clip: Examined, until: float) -> ContentRow:
    """Return the row of a usable clip whose first ``until`` seconds were scanned."""
    assert clip.info is not None
    assert clip.scan is not None
    row = {"info": clip.info.to_json(), "scan": clip.scan.to_json(), "until": until}
    drop_path(row)
    return row


def with_failure(path: Path, clip: Examined, detail: str, until: float) -> Examined:
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


def has_listened(row: ContentRow, until: float) -> bool:
    """Return whether the sound scan of a content covers its first ``until`` seconds."""
    if "sound" not in row["info"]:  # the row is of an earlier version
        return False
    if row["info"]["sound"] is None:
        return True
    try:
        scanned_seconds = SoundScan.from_json(row["sound"]).until
    except DAMAGE:
        return False
    seconds = MediaInfo.from_json(row["info"] | {"path": ""}).seconds
    return min(scanned_seconds, seconds) == min(until, seconds)


def drop_path(row: ContentRow) -> None:
    """Remove the path of the file that a content was read from.

    Others may have the same content.
    """
    info = row.get("info")
    if isinstance(info, dict):
        info.pop("path", None)


def is_below(name: str, folder: str) -> bool:
    """Whether a file is in a folder, both by their names in the index."""
    if folder == os.curdir:
        is_outside = name.startswith(os.path.join(os.pardir, ""))
        return not is_outside and not os.path.isabs(name)
    return name.startswith(os.path.join(folder, ""))


def content_key(content_id: str, path: str | Path) -> str:
    """Return a content's key: ``probe`` depends on the bytes and on the suffix."""
    return content_id + suffix_of(path)


def suffix_of(path: str | Path) -> str:
    """Return the suffix in lower case."""
    return os.path.splitext(path)[1].lower()


def problem_from_json(value: Any) -> ClipProblem:
    """Restore a problem from the index; raise ValueError or TypeError if it is invalid."""
    reason, detail = value
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("not a valid problem of a clip")
    return ClipProblem(reason, detail)
