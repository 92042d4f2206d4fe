"""Clips, their media info and their accounts as rows of files, read when they are asked
for; and the facts of clips that decide a schedule as arrays.
"""

import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from videotune.data.media_info import MediaInfo
from videotune.data.packed_rows import PackedTexts, release_pages
from videotune.types import Clip, Pacing

Row = TypeVar("Row")

RELEASED_AFTER = 1 << 24
"""Bytes of rows that were read in turn, after which their pages leave memory."""


class IdArray(Sequence[str]):
    """Ids in one array of bytes.

    Args:
        array: (N,) of type S.
    """

    def __init__(self, array: NDArray[np.bytes_]) -> None:
        self.array = array

    @classmethod
    def of(cls, ids: Sequence[str]) -> "IdArray":
        """Return ids as an array."""
        if isinstance(ids, IdArray):
            return ids
        if isinstance(ids, PackedTexts):
            return cls(ids.fixed_width())
        return cls(np.array([name.encode() for name in ids], np.bytes_))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "IdArray": ...
    def __getitem__(self, index: int | slice) -> "str | IdArray":
        if isinstance(index, slice):
            return IdArray(self.array[index])
        return str(self.array[index].decode())

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.array, kind="stable")

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the position of each id, -1 if it is not here; of equal ids the last."""
        wanted = IdArray.of(ids).array
        if not len(self.array) or not len(wanted):
            return np.full(len(wanted), -1)
        ranks = (
            np.searchsorted(self.array, wanted, side="right", sorter=self._order) - 1
        )
        positions = self._order[np.maximum(ranks, 0)]
        return np.where(self.array[positions] == wanted, positions, -1)


class RowFile(Sequence[Row]):
    """JSON rows of a file, one a line.

    Args:
        path: the file.
        offsets: (N + 1,) where the rows begin, and where the last one ends.
        convert: makes what is asked for of a row's value.

    Raises:
        OSError, ValueError: if the file is missing or torn.
    """

    def __init__(
        self,
        path: Path,
        offsets: NDArray[np.int64],
        convert: Callable[[Any], Row] = lambda value: value,
    ) -> None:
        self._offsets = offsets
        self._convert = convert
        self._content: mmap.mmap | bytes = b""
        if path.stat().st_size != offsets[-1]:
            raise ValueError(f"{path} is torn")
        if len(offsets) > 1:
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        begin, end = self._offsets[position : position + 2].tolist()
        return self._convert(json.loads(self._content[begin:end]))

    def __iter__(self) -> Iterator[Row]:
        released_at = 0
        for position in range(len(self)):
            yield self[position]
            read_bytes = int(self._offsets[position]) - released_at
            if read_bytes > RELEASED_AFTER and isinstance(self._content, mmap.mmap):
                release_pages(self._content)
                released_at += read_bytes


class MappedRows(Sequence[Row]):
    """Rows to each of which something is done when it is asked for.

    Args:
        rows: the rows.
        change: what is done to a row.
    """

    def __init__(self, rows: Sequence[Row], change: Callable[[Row], Row]) -> None:
        self._rows = rows
        self._change = change

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._change(row) for row in self._rows[index]]
        return self._change(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._change, self._rows)


def map_rows(rows: Sequence[Row], change: Callable[[Row], Row]) -> Sequence[Row]:
    """Change each row: now if they are in memory, else when they are asked for."""
    if isinstance(rows, list | tuple):
        return [change(row) for row in rows]
    return MappedRows(rows, change)


@dataclass(frozen=True, eq=False)
class ClipColumns:
    """The facts of clips that decide a schedule, (N,) each."""

    ids: IdArray
    held_out: NDArray[np.bool_]
    still: NDArray[np.bool_]
    regularization: NDArray[np.bool_]
    repeats: NDArray[np.int32]
    pacing: NDArray[np.int32]
    """Index of the pacing."""
    pacings: tuple[Pacing, ...]

    @classmethod
    def of(cls, clips: Sequence[Clip]) -> "ClipColumns":
        """Return the columns of clips."""
        if isinstance(clips, ClipTable):
            return clips.columns
        pacings = tuple(dict.fromkeys(clip.pacing for clip in clips))
        numbers = {pacing: number for number, pacing in enumerate(pacings)}
        return cls(
            ids=IdArray.of([clip.id for clip in clips]),
            held_out=np.array([clip.held_out for clip in clips], bool),
            still=np.array([clip.still for clip in clips], bool),
            regularization=np.array(
                [clip.kind == "regularization" for clip in clips], bool
            ),
            repeats=np.array([clip.repeats for clip in clips], np.int32),
            pacing=np.array([numbers[clip.pacing] for clip in clips], np.int32),
            pacings=pacings,
        )


class ClipTable(Sequence[Clip]):
    """Clips of which only the columns are in memory.

    Args:
        columns: facts of the clips.
        rows: the clips.
    """

    def __init__(self, columns: ClipColumns, rows: RowFile[Clip]) -> None:
        self.columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Clip: ...
    @overload
    def __getitem__(self, index: slice) -> list[Clip]: ...
    def __getitem__(self, index: int | slice) -> Clip | list[Clip]:
        return self._rows[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(
            clip == another for clip, another in zip(self, other, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(self))


class RowsById(Mapping[str, Row]):
    """Rows by id; of equal ids the last row.

    Args:
        ids: id of each row.
        rows: the rows.
    """

    def __init__(self, ids: IdArray, rows: Sequence[Row]) -> None:
        self._ids = ids
        self._rows = rows

    def __len__(self) -> int:
        return len(np.unique(self._ids.array))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self._ids))

    def __getitem__(self, name: str) -> Row:
        (position,) = self._ids.positions([name]).tolist()
        if position < 0:
            raise KeyError(name)
        return self._rows[position]


def clips_by_id(clips: Sequence[Clip]) -> Mapping[str, Clip]:
    """Return clips by id."""
    if isinstance(clips, ClipTable):
        return RowsById(clips.columns.ids, clips)
    return {clip.id: clip for clip in clips}


class MediaSizes(Mapping[str, tuple[int, int]]):
    """(width, height) of media by id.

    Args:
        media: media info by id.
    """

    def __init__(self, media: Mapping[str, MediaInfo]) -> None:
        self._media = media

    def __len__(self) -> int:
        return len(self._media)

    def __iter__(self) -> Iterator[str]:
        return iter(self._media)

    def __getitem__(self, name: str) -> tuple[int, int]:
        info = self._media[name]
        return info.width, info.height


def clip_from_json(value: dict[str, Any]) -> Clip:
    """Restore a clip from its fields."""
    value["captions"] = tuple(value["captions"])
    value["caption_weights"] = tuple(value["caption_weights"])
    value["pacing"] = Pacing(**value["pacing"])
    return Clip(**value)
