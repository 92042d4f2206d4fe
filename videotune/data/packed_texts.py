"""Texts, paths and the numbers of different texts, in a few bytes each."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

ENCODING = "utf-8"
"""Encoding of packed texts, whose bytes then have the order of the texts."""

ERRORS = "surrogatepass"
"""A name of a file may have half a surrogate pair for a byte that is not UTF-8."""


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
        self._content += text.encode(ENCODING, ERRORS)
        self._ends.append(len(self._content))

    def encoded(self, index: int) -> bytes:
        """Return a text as its bytes."""
        begin = self._ends[index]
        end = self._ends[index + 1]
        return bytes(self._content[begin:end])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        positions = range(len(self))
        if isinstance(index, slice):
            return [self[position] for position in positions[index]]
        content = self.encoded(positions[index])
        return content.decode(ENCODING, ERRORS)

    def __iter__(self) -> Iterator[str]:
        for position in range(len(self)):
            yield self[position]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedTexts):
            return list(self) == other
        if self._ends != other._ends:
            return False
        return self._content == other._content

    __hash__ = None  # type: ignore[assignment]

    def fixed_width(self) -> NDArray[np.bytes_]:
        """Return the texts as an array of type S (N,)."""
        ends = np.frombuffer(self._ends, np.int64)
        lengths = np.diff(ends)
        width = int(lengths.max(initial=1))
        if len(self) and (lengths == width).all():
            content = bytes(self._content)
            return np.frombuffer(content, f"S{max(1, width)}")

        encoded = []
        for row in range(len(self)):
            encoded.append(self.encoded(row))
        return np.array(encoded, np.bytes_)


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
            texts = self._texts[index]
            return [Path(text) for text in texts]
        text = self._texts[index]
        return Path(text)

    def __iter__(self) -> Iterator[Path]:
        return map(Path, self._texts)


class TextNumbers:
    """Numbers of different texts, which are known by their 64-bit hashes.

    That two of a million texts have one hash is less likely than 1 : 10⁷.
    """

    def __init__(self) -> None:
        self._hashes = array("q")
        self._sorted: NDArray[np.int64]
        """Different hashes, ascending."""
        self._numbers: NDArray[np.int32]
        """Number of the text of each of them."""

    def add(self, text: str) -> None:
        """Add a text, for the first time or once more."""
        text_hash = hash(text)
        self._hashes.append(text_hash)

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
        count = len(order)
        numbers = np.arange(count, dtype=np.int32)
        self._numbers = np.empty(count, np.int32)
        self._numbers[order] = numbers

        number_of_each = self._numbers[ranks]
        ordered_firsts = firsts[order]
        return number_of_each, ordered_firsts.astype(np.int32)

    def count(self) -> int:
        """Return how many different texts there are."""
        hashes = np.frombuffer(self._hashes, np.int64)
        different_hashes = np.unique(hashes)
        return len(different_hashes)

    def number_of(self, text: str) -> int | None:
        """Return the number of a text after ``number_all``; None if it was not added."""
        wanted = hash(text)
        rank = int(np.searchsorted(self._sorted, wanted))
        if rank == len(self._sorted):
            return None
        if self._sorted[rank] != wanted:
            return None
        return int(self._numbers[rank])
