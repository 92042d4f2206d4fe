"""What a clip reveals of the video that it was cut from: its name, its duration and its
pictures; of a million clips as arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from videotune.data.packed_rows import PackedTexts


@dataclass(frozen=True)
class SourceClip:
    """The data of a clip that reveals its source."""

    path: PurePosixPath
    """Path that begins with the dataset's name."""

    seconds: float = 0.0

    signatures: tuple[str, ...] = ()
    """Signatures of the content scan: first, middle and last frame, or one of an image.
    """


class SourceClipTable:
    """Clips of which names and durations are in memory.

    Args:
        paths: path of each clip, which begins with the dataset's name.
        seconds: duration of each clip.
        signatures_of: returns the signatures of a clip by its number.
        rows: numbers of the clips that the table has, in its order.
    """

    def __init__(
        self,
        paths: PackedTexts,
        seconds: array[float],
        signatures_of: Callable[[int], tuple[str, ...]],
        rows: NDArray[np.int32],
    ) -> None:
        self._paths = paths
        self._seconds = seconds
        self._signatures_of = signatures_of
        self.rows = rows

    @classmethod
    def of(cls, clips: Sequence[SourceClip] | SourceClipTable) -> SourceClipTable:
        """Return clips as a table."""
        if isinstance(clips, SourceClipTable):
            return clips
        return cls(
            paths=PackedTexts(clip.path.as_posix() for clip in clips),
            seconds=array("d", [clip.seconds for clip in clips]),
            signatures_of=lambda number: clips[number].signatures,
            rows=np.arange(len(clips), dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def path(self, position: int) -> PurePosixPath:
        """Return the path of a clip."""
        return PurePosixPath(self._paths[self.rows[position]])

    def seconds(self, position: int) -> float:
        """Return the duration of a clip."""
        return self._seconds[self.rows[position]]

    def signatures(self, position: int) -> tuple[str, ...]:
        """Return the signatures of a clip."""
        return self._signatures_of(int(self.rows[position]))

    def take(self, positions: NDArray[np.int32]) -> SourceClipTable:
        """Return the clips at these positions, in this order."""
        rows = self.rows[positions]
        return SourceClipTable(self._paths, self._seconds, self._signatures_of, rows)

    def path_order(self) -> NDArray[np.int32]:
        """Return the positions of the clips in path order."""
        paths = [self._paths.encoded(row) for row in self.rows.tolist()]
        order = sorted(range(len(paths)), key=paths.__getitem__)
        return np.array(order, np.int32)
