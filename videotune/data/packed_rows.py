"""What a scan remembers of each of a million clips: rows in a file without a name, and
texts and numbers in arrays.

A row that is read is a new object. Changing it changes nothing here.
"""

import mmap
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.files import user_cache

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
    """An array of bytes (N, columns) in a file without a name.

    Args:
        parts: its rows, in parts (n, columns).
        columns: bytes of a row.
    """

    def __init__(self, parts: Iterable[NDArray[np.uint8]], columns: int) -> None:
        self._map: mmap.mmap | None = None
        file: IO[bytes] | None = None
        tail = bytearray()
        written = 0
        for part in parts:
            tail += part.tobytes()
            if len(tail) >= UNWRITTEN_BYTES:
                file = file or spill_file()
                write_spilled(file, tail, written)
                written += len(tail)
                tail.clear()

        content: bytearray | mmap.mmap = tail
        if file is not None:
            write_spilled(file, tail, written)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = self._map
            file.close()
        self.array = np.frombuffer(content, np.uint8).reshape(-1, columns)
        """(N, columns)."""

    def release(self) -> None:
        """Take the pages that were read out of this process's memory."""
        if self._map is not None:
            release_pages(self._map)


class PackedTexts(Sequence[str]):
    """Texts in one array of bytes.

    Args:
        texts: the first texts.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._content = bytearray()
        self._ends = array("q", [0])
        for text in texts:
            self.append(text)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, text: str) -> None:
        """Add a text."""
        self._content += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._content))

    def encoded(self, index: int) -> bytes:
        """Return a text in UTF-8. These bytes have the order of the texts."""
        begin = self._ends[index]
        return bytes(self._content[begin : self._ends[index + 1]])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        return self.encoded(position).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for position in range(len(self)):
            yield self[position]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedTexts):
            return self._ends == other._ends and self._content == other._content
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def fixed_width(self) -> NDArray[np.bytes_]:
        """Return the texts as an array of type S (N,)."""
        lengths = np.diff(np.frombuffer(self._ends, np.int64))
        width = int(lengths.max(initial=1))
        if len(self) and width and (lengths == width).all():
            return np.frombuffer(bytes(self._content), f"S{width}")
        return np.array([self.encoded(row) for row in range(len(self))], np.bytes_)


class PackedPaths(Sequence[Path]):
    """Paths in one array of bytes.

    Args:
        paths: the first paths.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._texts = PackedTexts(map(str, paths))

    def __len__(self) -> int:
        return len(self._texts)

    def append(self, path: Path) -> None:
        """Add a path."""
        self._texts.append(str(path))

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [Path(text) for text in self._texts[index]]
        return Path(self._texts[index])

    def __iter__(self) -> Iterator[Path]:
        return map(Path, self._texts)


class TextNumbers:
    """Numbers of different texts, which are known by their 64-bit hashes.

    That two of a million texts have one hash is less likely than 1 : 10⁷.
    """

    def __init__(self) -> None:
        self._hashes = array("q")
        self._sorted: NDArray[np.int64] = np.zeros(0, np.int64)
        self._numbers: NDArray[np.int32] = np.zeros(0, np.int32)

    def add(self, text: str) -> None:
        """Add a text, for the first time or once more."""
        self._hashes.append(hash(text))

    def number_all(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Number the different texts in the order of their first.

        Returns:
            The number of each text that was added (N,), and the position of the first
            text of each number (K,).
        """
        hashes = np.frombuffer(self._hashes, np.int64)
        self._sorted, firsts, ranks = np.unique(
            hashes, return_index=True, return_inverse=True
        )
        order = np.argsort(firsts, kind="stable")
        self._numbers = np.empty(len(order), np.int32)
        self._numbers[order] = np.arange(len(order), dtype=np.int32)
        return self._numbers[ranks], firsts[order].astype(np.int32)

    def count(self) -> int:
        """Return how many different texts there are."""
        return len(np.unique(np.frombuffer(self._hashes, np.int64)))

    def number_of(self, text: str) -> int | None:
        """Return the number of a text after ``number_all``; None if it was not added."""
        wanted = hash(text)
        rank = int(np.searchsorted(self._sorted, wanted))
        if rank == len(self._sorted) or self._sorted[rank] != wanted:
            return None
        return int(self._numbers[rank])


class Growing(Generic[Row]):
    """Numbers of one type that grow, and are an array without a copy.

    Args:
        dtype: their type.
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._content = bytearray()

    def extend(self, values: Sequence[Row]) -> None:
        """Add numbers."""
        self._content += np.asarray(values, self._dtype).tobytes()

    def array(self) -> NDArray[Any]:
        """Return all numbers (N,). None may be added while it is used."""
        return np.frombuffer(self._content, self._dtype)


def spill_file() -> IO[bytes]:
    """Return a new file without a name, in the user's cache folder if that can be
    written: the folder of temporary files may be in memory.
    """
    try:
        folder = user_cache() / "scans"
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
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise VideotuneError(
            f"{user_cache()} cannot be written while the clips are read ({error.strerror}): a scan "
            "needs some 4 kB a clip there. Free some space, or set XDG_CACHE_HOME to another folder."
        ) from error


def release_pages(mapped: mmap.mmap) -> None:
    """Take a file's pages out of this process's memory, where the system can; the next
    read brings them back.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
