"""Checks on untrusted files: type by the first bytes, reasons to refuse a clip, refused
links."""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from videotune.bounds import open_regular
from videotune.data.object_files import local_copy
from videotune.errors import VideotuneError

REASONS = (
    "unreadable",
    "empty",
    "not_a_video",
    "no_video_stream",
    "one_frame",
    "decode_error",
    "too_short",
    "missing_caption",
    "empty_caption",
    "undecodable_caption",
    "duplicate",
    "missing_file",
    "bad_mask",
    "bad_start_image",
    "bad_reference",
    "no_reference",
    "bad_control",
    "no_control",
    "no_sound",
    "sound_speed",
)
"""Codes of the reasons for which a clip is left out, as the dataset account uses them.
"""

MAX_PIXELS = 1 << 27
"""Most pixels of one picture: 134 million, four frames of 8K.

Damaged headers and decompression bombs declare more.
"""

ARCHIVES = ("zip", "tar", "gz", "bz2", "xz", "zst", "7z", "rar")
"""Results of ``type_of`` that are archives, or compressions of one."""

HEAD_BYTES = 1024
"""Bytes of a file's beginning that ``type_of`` needs."""

_SIGNATURES = (
    # MP4 and MOV: the type of the first box
    (4, b"ftyp", "video"),
    (4, b"moov", "video"),
    (4, b"mdat", "video"),
    (4, b"free", "video"),
    (4, b"skip", "video"),
    (4, b"wide", "video"),
    (4, b"pnot", "video"),
    # Matroska and WebM, FLV, Ogg, MPEG program and elementary streams, ASF, AVI
    (0, b"\x1a\x45\xdf\xa3", "video"),
    (0, b"FLV\x01", "video"),
    (0, b"OggS", "video"),
    (0, b"\0\0\1\xba", "video"),
    (0, b"\0\0\1\xb3", "video"),
    (0, b"\x30\x26\xb2\x75", "video"),
    (8, b"AVI ", "video"),
    (8, b"WEBP", "image"),
    (0, b"\x89PNG", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"BM", "image"),
    (0, b"II*\0", "image"),
    (0, b"MM\0*", "image"),
    (0, b"GIF8", "image"),
    (0, b"PK\3\4", "zip"),
    (0, b"PK\5\6", "zip"),
    (257, b"ustar", "tar"),
    (0, b"\x1f\x8b", "gz"),
    (0, b"BZh", "bz2"),
    (0, b"\xfd7zXZ\0", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zst"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z"),
    (0, b"Rar!", "rar"),
)
"""Offset, bytes at it, and the type of a file that has them. The first match counts."""


class ClipProblem(Exception):
    """Raised if one clip cannot be used; the rest of the dataset can.

    Args:
        reason: one of ``REASONS``.
        detail: explanation for the user, without the path.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["ClipProblem"], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


def type_of(head: bytes) -> str:
    """Return a file's type by its first bytes: "video", "image", one of ``ARCHIVES``,
    or "".
    """
    for offset, magic, file_type in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return file_type

    # MPEG transport streams: packets of 188 bytes begin with a G, in M2TS after 4 more
    # bytes.
    if head[0:189:188] == b"GG" or head[4:197:192] == b"GG":
        return "video"
    return ""


def type_of_file(path: Path) -> str:
    """Return ``type_of`` for a file, also "tar" for a .tar without a signature (before
    1988).

    Raises:
        OSError: if the file cannot be read.
    """
    with local_copy(path) as local, open_regular(local) as file:
        head = file.read(HEAD_BYTES)

    file_type = type_of(head)
    if not file_type and head and path.name.lower().endswith(".tar"):
        return "tar"
    return file_type


def stat_of(file: Path) -> os.stat_result:
    """Return the file's stat without opening it.

    Raises:
        ClipProblem: if the file does not exist, or is a pipe, a socket or a device, on
            which a reader might wait forever.
    """
    try:
        status = file.stat()
    except FileNotFoundError as error:
        detail = "there is no such file"
        if file.is_symlink():
            detail = f"link to {os.readlink(file)}, which is missing"
        raise ClipProblem("missing_file", detail) from error
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error

    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ClipProblem("not_a_video", "it is not a regular file")
    return status


def check_opens(file: Path) -> None:
    """Check that a file can be opened; read nothing of it.

    Raises:
        ClipProblem: "unreadable" if not, such as for want of rights.
    """
    try:
        os.close(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)))
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error


def head_of(file: Path) -> bytes:
    """Return the first bytes of a file.

    Raises:
        ClipProblem: if the file is empty or cannot be read.
    """
    with local_copy(file) as local:
        try:
            with open_regular(local) as stream:
                head = stream.read(HEAD_BYTES)
        except OSError as error:
            raise ClipProblem("unreadable", error.strerror or str(error)) from error

    if not head:
        raise ClipProblem("empty", "the file has 0 bytes")
    return head


def refuse_links(folder: Path, with_subfolders: Sequence[str] = ()) -> None:
    """Check that a cache folder contains no links: writes and deletes would follow
    them.

    Args:
        folder: the cache folder.
        with_subfolders: its folders that have subfolders of their own. The files of an
            unpacked archive, which are as deep, are not looked at.

    Raises:
        VideotuneError: if the folder or a folder in it contains a link.
    """
    directories = [folder, *folder.glob("*/")]
    for name in with_subfolders:
        directories += (folder / name).glob("*/")
    for directory in directories:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(directory) as entries,
        ):
            link = next((entry.path for entry in entries if entry.is_symlink()), None)
            if link is not None:
                raise VideotuneError(
                    f"{link} is a link, and a cache must not contain links. "
                    "Delete it, or set another cache_dir."
                )


def refuse_linked_folder(folder: Path) -> Path:
    """Return the cache folder of a dataset after checking that it is not a link.

    Only the user may choose a folder outside the dataset, by ``cache_dir``.

    Raises:
        VideotuneError: if the folder is a link.
    """
    if folder.is_symlink():
        raise VideotuneError(
            f"{folder} is a link to {os.path.realpath(folder)}. The dataset may have brought "
            "it: delete it, or set cache_dir to that folder."
        )
    return folder
