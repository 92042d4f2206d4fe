"""What a reader of files and answers from elsewhere takes at most: bytes, nesting, words
and seconds.

Every reader has its bound from here. A bound is far above what is published and far
below what would hurt.
"""

import errno
import os
import stat
import time
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from videotune.errors import VideotuneError

CONFIG_BYTES = 1 << 20
"""A config file."""

CAPTION_BYTES = 1 << 20
"""A file of captions, which has some lines of at most some hundred words."""

CONFIG_DEPTH = 12
"""Nested values of a config."""

CONFIG_NODES = 20_000
"""Values of a config. YAML's parser takes a tenth of a millisecond for each, and so does
finding out whose config it is.
"""

KEY_PARTS = 100
"""Parts of one dotted key in TOML, whose parser takes time by their square."""

SCRIPT_WORDS = 20_000
"""Arguments of all commands in a script, variables substituted."""

SCRIPT_LETTERS = 1 << 20
"""Letters of these arguments."""

MODEL_FILE_BYTES = 64 << 20
"""A JSON file of a base model; published indices of shards have some MB."""

MODEL_FILE_DEPTH = 32
"""Nested values of such a file."""

ADAPTER_BYTES = 8 << 30
"""An adapter file; published ones have a few hundred MB."""

DELTA_NUMBERS = 1 << 27
"""Numbers of one module's ΔW, 1 GB in float64; the largest of a published model has
7·10⁷.
"""

ROTATION_SIDE = 2048
"""Side of one block of OFT; a product of such blocks takes a second."""

RECORD_BYTES = 256 << 20
"""A JSON file of a run; the account of 100,000 clips has 60 MB."""

RECORD_DEPTH = 32
"""Nested values of such a file."""

EXPORT_ENTRIES = 4_000
"""Exports of a run; reports and the model card compare them with one another."""

ANSWER_BYTES = 4 << 20
"""An answer of a caption server."""

ANSWER_SECONDS = 120.0
"""Seconds for an answer of a caption server, from the connection to its last byte."""

HUB_SECONDS = 60.0
"""Seconds for an answer of the Hub without a file, to its last byte."""


READ_PIECE = 1 << 20
"""Bytes that are read at a time."""


def require_file(path: Path, subject: str = "") -> None:
    """Refuse a path that is neither a file nor a folder: opening a pipe waits for ever.

    A path that does not exist, and one that cannot be looked at, is left to the reader.

    Args:
        path: the path; a link is followed.
        subject: begins the error, such as a key; "" begins with the path.

    Raises:
        VideotuneError: for a pipe, a socket or a device.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return

    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    prefix = f"{subject}: " if subject else ""
    raise VideotuneError(
        f"{prefix}{path} is {kind}, neither a file nor a folder. Name a file on the disk"
    )


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it; what is not a regular file is refused and never waited for.

    It looks at what it has opened. A path that is looked at first may lead to a pipe when
    it is opened, and a link to /dev/stdin leads each process to another file.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: Path, most: int, subject: str) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.
        most: bytes, at most.
        subject: what the file is, such as "a config", for the error.

    Raises:
        VideotuneError: for a larger file, and for a pipe, a socket or a device.
        OSError: if it cannot be read.
    """
    require_file(path)
    with open_regular(path) as file:
        content = read_at_most(file, most + 1)
    if len(content) > most:
        size = max(len(content), path.stat().st_size)
        raise VideotuneError(
            f"{path} has {size:,} bytes; {subject} has at most {most:,}"
        )
    return content


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Return up to ``most`` bytes of a file.

    Python sets as much memory aside as one call is asked to read, so each asks for a
    piece.
    """
    content = bytearray()
    while len(content) < most:
        piece = file.read(min(READ_PIECE, most - len(content)))
        if not piece:
            break
        content += piece
    return bytes(content)


def too_deep(value: Any, most: int) -> str | None:
    """Return the dotted key of a value that is nested more than ``most`` deep, or None.

    Neither time nor stack grow with the depth.
    """
    level: list[tuple[str, Any]] = [("", value)]

    for _ in range(most + 1):
        inner_level: list[tuple[str, Any]] = []
        for key, outer in level:
            if isinstance(outer, Mapping):
                inner_level += [
                    (f"{key}.{name}", entry) for name, entry in outer.items()
                ]
            elif isinstance(outer, list):
                inner_level += [
                    (f"{key}.{index}", entry) for index, entry in enumerate(outer)
                ]

        if not inner_level:
            return None
        level = inner_level

    return level[0][0].removeprefix(".")


def can_be_path(text: str) -> bool:
    """Return whether a path can have this text: no NUL, and no half a letter but those
    that stand for a byte which is not UTF-8.
    """
    try:
        return b"\0" not in text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False


def has_more_values(value: Any, most: int) -> bool:
    """Return whether a JSON-like value consists of more than ``most`` values.

    Objects and lists count too. It stops at the first one that is too many.
    """
    waiting = [value]
    count = 0
    while waiting and count <= most:
        outer = waiting.pop()
        count += 1
        if isinstance(outer, Mapping):
            waiting += outer.values()
        elif isinstance(outer, list):
            waiting += outer
    return count > most


class Deadline:
    """A moment after which something takes too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self.left == 0.0
