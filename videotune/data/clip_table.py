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
from videotune.data.packed_rows import release_pages
from videotune.data.packed_texts import PackedTexts
from videotune.types import Clip, Pacing

Row = TypeVar("Row")

RELEASED_AFTER = 1 << 24
"""Bytes of a file's pages that were read, after which they leave memory."""


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
        encoded = [name.encode() for name in ids]
        return cls(np.array(encoded, np.bytes_))

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

        ends = np.searchsorted(
            self.array,
            wanted,
            side="right",
            sorter=self._order,
        )
        ranks = np.maximum(ends - 1, 0)
        positions = self._order[ranks]
        is_equal = self.array[positions] == wanted
        return np.where(is_equal, positions, -1)


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
        self._read_bytes = 0
        """Bytes of the pages that were read and are still in memory, at most."""
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
        text = self._content[begin:end]
        row = self._convert(json.loads(text))
        self._count_read(len(text))
        return row

    def __iter__(self) -> Iterator[Row]:
        for position in range(len(self)):
            yield self[position]

    def _count_read(self, row_bytes: int) -> None:
        """Let the pages that were read leave memory when they are many."""
        self._read_bytes += row_bytes + mmap.PAGESIZE
        if self._read_bytes > RELEASED_AFTER and isinstance(self._content, mmap.mmap):
            release_pages(self._content)
            self._read_bytes = 0


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
        ids = [clip.id for clip in clips]
        held_out = [clip.held_out for clip in clips]
        still = [clip.still for clip in clips]
        regularization = [clip.kind == "regularization" for clip in clips]
        repeats = [clip.repeats for clip in clips]

        numbers: dict[Pacing, int] = {}
        pacing = []
        for clip in clips:
            number = numbers.setdefault(clip.pacing, len(numbers))
            pacing.append(number)
        return cls(
            ids=IdArray.of(ids),
            held_out=np.array(held_out, bool),
            still=np.array(still, bool),
            regularization=np.array(regularization, bool),
            repeats=np.array(repeats, np.int32),
            pacing=np.array(pacing, np.int32),
            pacings=tuple(numbers),
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
