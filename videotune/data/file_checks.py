"""What untrusted files may be: their types by their first bytes, the ways in which a clip can fail, and links refused."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from videotune.errors import VideotuneError

REASONS = (
    *(
        "unreadable",
        "empty",
        "not_a_video",
        "no_video_stream",
        "one_frame",
        "decode_error",
        "too_short",
    ),
    *("missing_caption", "empty_caption", "undecodable_caption", "duplicate", "missing_file"),
)
"""Why a clip can be left out: the codes that the accounting of a dataset uses."""

MAX_PIXELS = 1 << 27
"""The most that one picture may have: 134 million, four frames of 8K. Damaged headers and bombs promise more."""

ARCHIVES = ("zip", "tar", "gz", "bz2", "xz", "zst", "7z", "rar")
"""The types of ``type_of`` that are archives, or compressions of one."""

_HEAD_BYTES = 1024
_SIGNATURES = (
    *((4, box, "video") for box in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")),
    *((0, magic, "video") for magic in (b"\x1a\x45\xdf\xa3", b"FLV\x01", b"OggS", b"\0\0\1\xba", b"\0\0\1\xb3")),
    (0, b"\x30\x26\xb2\x75", "video"), (8, b"AVI ", "video"), (8, b"WEBP", "image"),
    *((0, magic, "image") for magic in (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*", b"GIF8")),
    (0, b"PK\3\4", "zip"), (0, b"PK\5\6", "zip"), (257, b"ustar", "tar"), (0, b"\x1f\x8b", "gz"), (0, b"BZh", "bz2"),
    (0, b"\xfd7zXZ\0", "xz"), (0, b"\x28\xb5\x2f\xfd", "zst"), (0, b"7z\xbc\xaf\x27\x1c", "7z"), (0, b"Rar!", "rar"),
)  # fmt: skip
"""Offset and bytes that tell a file's type."""


class ClipProblem(Exception):
    """One clip cannot be used: ``reason`` is one of ``REASONS``, ``detail`` explains it to the user."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def type_of(head: bytes) -> str:
    """ "video", "image", one of ``ARCHIVES``, or "" for a file that begins with ``head``, whatever its name says."""
    for offset, magic, kind in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return kind
    # MPEG transport: each packet begins with a G, every 188 bytes, or every 192 with four bytes before it
    return "video" if head[0:189:188] == b"GG" or head[4:197:192] == b"GG" else ""


def type_of_file(path: Path) -> str:
    """``type_of`` for a file; a .tar that has no magic, as all had before 1988, is one too. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return type_of(head) or ("tar" if head and path.name.lower().endswith(".tar") else "")


def stat_of(file: Path) -> os.stat_result:
    """The file's stat, without opening it; ClipProblem where it does not exist, and for a pipe, a socket or a device, whose
    reader might wait for ever."""
    try:
        found = file.stat()
    except FileNotFoundError as error:
        detail = (
            f"link to {os.readlink(file)}, which is missing"
            if file.is_symlink()
            else "there is no such file"
        )
        raise ClipProblem("missing_file", detail) from error
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ClipProblem("not_a_video", "is no regular file")
    return found


def head_of(file: Path) -> bytes:
    """The first bytes; ClipProblem when there are none or they cannot be read."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error
    if not head:
        raise ClipProblem("empty", "the file has 0 bytes")
    return head


def refuse_links(folder: Path) -> None:
    """VideotuneError where a cache folder holds a link: what is written or deleted through one is elsewhere."""
    for place in (folder, *folder.glob("*/")):  # an archive's own files lie deeper
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as entries:
            link = next((entry.path for entry in entries if entry.is_symlink()), None)
            if link is not None:
                raise VideotuneError(
                    f"{link} is a link, and a cache holds none. Delete it, or set another cache_dir."
                )


def refuse_linked_folder(folder: Path) -> Path:
    """The cache folder of a dataset; VideotuneError where it is a link, which only the user may name, with cache_dir."""
    if folder.is_symlink():
        remedy = "The dataset may have brought it: delete it, or set cache_dir to that folder."
        raise VideotuneError(f"{folder} is a link to {os.path.realpath(folder)}. {remedy}")
    return folder
