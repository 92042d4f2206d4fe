"""What a scan remembers of each of a million clips: rows in a file without a name, and
texts and numbers in arrays.

A row that is read is a new object. Changing it changes nothing here.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from videotune import files
from videotune.errors import VideotuneError

Row = TypeVar("Row")

UNWRITTEN_BYTES = 1 << 20
"""Bytes of the last rows that are still in memory. A small set never has a file."""

READ_TOGETHER = 1 << 14
"""Bytes that are read from the file at once, since the next rows are asked for next."""


class SpilledRows(Sequence[Row]):
    """Objects of which only the place in a file is in memory.

    The file is in the user's cache folder, has no name and is gone when the process
    ends.

    Args:
        rows: the first rows.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._begins = array("q")
        self._lengths = array("I")
        self._file: IO[bytes] | None = None
        self._written = 0
        """Bytes in the file; ``_tail`` follows them."""
        self._tail = bytearray()
        self._window = b""
        """A part of the file that was read last."""
        self._window_begin = 0
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._begins)

    def append(self, row: Row) -> None:
        """Add a row."""
        begin, length = self._write(row)
        self._begins.append(begin)
        self._lengths.append(length)

    def __setitem__(self, index: int, row: Row) -> None:
        """Replace a row; the bytes of the old one stay in the file."""
        self._begins[index], self._lengths[index] = self._write(row)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        begin = self._begins[index]
        row: Row = pickle.loads(self._read(begin, self._lengths[index]))
        return row

    def __iter__(self) -> Iterator[Row]:
        for position in range(len(self)):
            yield self[position]

    def _write(self, row: Row) -> tuple[int, int]:
        """Write a row, and return where it begins and its length."""
        content = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
        begin = self._written + len(self._tail)
        self._tail += content
        if len(self._tail) >= UNWRITTEN_BYTES:
            if self._file is None:
                self._file = spill_file()
            write_spilled(self._file, self._tail, self._written)
            self._written += len(self._tail)
            self._tail.clear()
        return begin, len(content)

    def _read(self, begin: int, length: int) -> bytes | bytearray:
        """Return bytes of the file or of what will follow in it."""
        if begin >= self._written:
            first = begin - self._written
            return self._tail[first : first + length]

        offset = begin - self._window_begin
        if offset < 0 or offset + length > len(self._window):
            assert self._file is not None
            self._file.seek(begin)
            self._window = self._file.read(max(length, READ_TOGETHER))
            self._window_begin = begin
            offset = 0
        return self._window[offset : offset + length]


class SpilledBytes:
    """An array of bytes (N, columns), which grows, in a file without a name.

    Args:
        columns: bytes of a row.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._file: IO[bytes] | None = None
        self._written = 0
        """Bytes in the file; ``_tail`` follows them."""
        self._tail = bytearray()

    def extend(self, rows: NDArray[np.uint8]) -> None:
        """Add rows (n, columns)."""
        self._tail += rows.tobytes()
        if len(self._tail) >= UNWRITTEN_BYTES:
            self._write_tail()

    def _write_tail(self) -> None:
        if self._file is None:
            self._file = spill_file()
        write_spilled(self._file, self._tail, self._written)
        self._written += len(self._tail)
        self._tail.clear()

    def take(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """Return the rows at these positions (n, columns)."""
        content = bytearray()
        for position in positions.tolist():
            begin = position * self._columns
            if begin < self._written:
                assert self._file is not None
                self._file.seek(begin)
                content += self._file.read(self._columns)
            else:
                first = begin - self._written
                content += self._tail[first : first + self._columns]
        return np.frombuffer(content, np.uint8).reshape(-1, self._columns)

    def mapped(self) -> MappedBytes:
        """Return all rows as an array. None may be added any more."""
        if self._file is None:
            return MappedBytes(self._tail, self._columns)
        self._write_tail()
        content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return MappedBytes(content, self._columns)


class MappedBytes:
    """An array of bytes (N, columns) that is read from a file.

    Args:
        content: the file, or bytes in memory.
        columns: bytes of a row.
    """

    def __init__(self, content: mmap.mmap | bytearray, columns: int) -> None:
        self._content = content
        self.array = np.frombuffer(content, np.uint8).reshape(-1, columns)
        """(N, columns)."""

    def release(self) -> None:
        """Take the pages that were read out of this process's memory."""
        if isinstance(self._content, mmap.mmap):
            release_pages(self._content)


def spill_file() -> IO[bytes]:
    """Return a new file without a name, in the user's cache folder if that can be
    written: the folder of temporary files may be in memory.
    """
    try:
        folder = files.user_cache() / "scans"
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError:
        return tempfile.TemporaryFile(buffering=0)


def write_spilled(file: IO[bytes], content: bytes | bytearray, begin: int) -> None:
    """Write bytes into a file of ``spill_file``.

    Raises:
        VideotuneError: if the disk is full.
    """
    try:
        file.seek(begin)
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
    except OSError as error:
        raise VideotuneError(
            f"{files.user_cache()} cannot be written while the clips are read ({error.strerror}): a scan "
            "needs some 4 kB a clip there. Free some space, or set XDG_CACHE_HOME to another folder."
        ) from error


def release_pages(mapped: mmap.mmap) -> None:
    """Take a file's pages out of this process's memory, where the system can; the next
    read brings them back.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def return_free_memory() -> None:
    """Give memory that is free back to the system.

    The C library keeps what is free between pieces that are in use: after each part of a
    large scan that is some hundred bytes a clip.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # not in musl
            libc.malloc_trim(0)
