"""What a media index knows of files, of which only numbers are in memory."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from videotune.data.index_rows import (
    Examined,
    FileStamp,
    suffix_of,
)
from videotune.data.packed_rows import SpilledRows

LOOKED_UP_TOGETHER = 500
"""Files whose rows are read from the index together."""


class FilesToExamine:
    """Files that must be examined, in their order.

    Args:
        paths: all files; some of them are missing in the index.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._positions = array("q")
        self._sizes = array("q")
        self._times = array("q")

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, position: int, stamp: FileStamp) -> None:
        """Add a file by its position among all."""
        self._positions.append(position)
        self._sizes.append(stamp.size)
        self._times.append(stamp.mtime_ns)

    def __iter__(self) -> Iterator[tuple[Path, FileStamp]]:
        columns = (
            self._positions,
            self._sizes,
            self._times,
        )
        for position, size, mtime_ns in zip(*columns, strict=True):
            yield self._paths[position], FileStamp(size, mtime_ns)

    def by_size(self) -> Iterator[set[tuple[int, str]]]:
        """Yield the different (size, suffix) of the files, some sizes at a time."""
        sizes = np.frombuffer(self._sizes, np.int64)
        order = np.argsort(sizes, kind="stable")
        for first in range(0, len(order), LOOKED_UP_TOGETHER):
            part = order[first : first + LOOKED_UP_TOGETHER].tolist()
            sizes_and_suffixes = set()
            for row in part:
                path = self._paths[self._positions[row]]
                sizes_and_suffixes.add((self._sizes[row], suffix_of(path)))
            yield sizes_and_suffixes


class Lookups:
    """What the index knows of files.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.results: SpilledRows[Examined | None] = SpilledRows()
        """Result of each file; None until a worker has examined it."""
        self.to_examine = FilesToExamine(paths)
        self._is_unknown = bytearray()
        self._name_hashes = array("q")

    def add(self, name: str, result: Examined | FileStamp) -> None:
        """Add what is known of the next file."""
        self._name_hashes.append(hash(name))
        self._is_unknown.append(isinstance(result, FileStamp))
        if isinstance(result, FileStamp):
            self.to_examine.add(len(self.results), result)
            self.results.append(None)
        else:
            self.results.append(result)

    def is_unknown(self, position: int) -> bool:
        """Return whether a file was not known and must be examined."""
        return bool(self._is_unknown[position])

    def hashes_of_names(self) -> NDArray[np.int64]:
        """Return the hashes of all names, sorted."""
        hashes = np.frombuffer(self._name_hashes, np.int64)
        return np.sort(hashes)


def without_hashes(names: Sequence[str], sorted_hashes: NDArray[np.int64]) -> list[str]:
    """Return the names whose hash is not one of these."""
    if not len(sorted_hashes):
        return list(names)
    hashes = np.array([hash(name) for name in names], np.int64)
    positions = np.searchsorted(sorted_hashes, hashes)
    last_position = len(sorted_hashes) - 1
    positions = np.minimum(positions, last_position)
    is_present = sorted_hashes[positions] == hashes
    absent_rows = np.flatnonzero(~is_present)
    return [names[row] for row in absent_rows.tolist()]
