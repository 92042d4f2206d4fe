"""Windows as arrays: ten million of them take 240 MB, and a ``Window`` is made of one
when it is asked for.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from videotune.data.packed_texts import PackedTexts
from videotune.types import ClipShape, Window

ROWS_TOGETHER = 4096
"""Rows that an iteration turns into numbers at once."""

Companions = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class WindowTable(Sequence[Window]):
    """Windows in an order, each as an owner, a kind, a start and an end.

    An *owner* is the number of a pair (clip, its companions). In a library each clip has
    one owner; a clip whose windows have different companions has several. A *kind* is the
    number of everything else that windows can share: shape, sampling, resize and so on.

    A table is equal to any sequence of the same windows.
    """

    clip_ids: Sequence[str]
    """Id of the clip, by owner."""
    companions: Mapping[int, Companions]
    """Companions, by owner; owners without companions are left out."""
    kinds: tuple[Window, ...]
    """By kind, a window that has it, without clip, companions and times."""
    owner: NDArray[np.int32]
    """Owner of each window (N,)."""
    kind: NDArray[np.int32]
    """Kind of each window (N,)."""
    start: NDArray[np.float64]
    """(N,)."""
    end: NDArray[np.float64]
    """(N,)."""
    rows: NDArray[np.int32] | None = field(default=None)
    """Which of the N windows there are, in order, perhaps several times. None: all."""

    @classmethod
    def of(cls, windows: Iterable[Window]) -> "WindowTable":
        """Return the table of windows."""
        if isinstance(windows, WindowTable):
            return windows
        builder = WindowTableBuilder()
        builder.add(windows)
        return builder.table()

    def __len__(self) -> int:
        return len(self.owner) if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> "WindowTable": ...
    def __getitem__(self, index: int | slice) -> "Window | WindowTable":
        if isinstance(index, slice):
            return self.take(np.arange(len(self), dtype=np.int32)[index])
        position = range(len(self))[index]
        row = position if self.rows is None else int(self.rows[position])
        return self._window(
            owner=int(self.owner[row]),
            kind=int(self.kind[row]),
            start=float(self.start[row]),
            end=float(self.end[row]),
        )

    def __iter__(self) -> Iterator[Window]:
        for first in range(0, len(self), ROWS_TOGETHER):
            last = min(first + ROWS_TOGETHER, len(self))
            rows: Any = slice(first, last)
            if self.rows is not None:
                rows = self.rows[rows]

            columns = (
                self.owner,
                self.kind,
                self.start,
                self.end,
            )
            lists = [column[rows].tolist() for column in columns]
            for owner, kind, start, end in zip(*lists, strict=True):
                yield self._window(owner, kind, start, end)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WindowTable | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(
            window == another for window, another in zip(self, other, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"WindowTable({list(self)!r})"

    def _window(self, owner: int, kind: int, start: float, end: float) -> Window:
        window_kind = self.kinds[kind]
        return Window(
            self.clip_ids[owner],
            start,
            end,
            window_kind.shape,
            window_kind.sampling,
            window_kind.swaps,
            window_kind.resize,
            window_kind.flip,
            self.companions.get(owner, ()),
        )

    def take(self, positions: NDArray[np.integer[Any]]) -> "WindowTable":
        """Return the windows at these positions, in this order; the columns are shared."""
        rows = positions if self.rows is None else self.rows[positions]
        return replace(self, rows=rows.astype(np.int32, copy=False))

    def owners(self) -> NDArray[np.int32]:
        """Return the owner of each window."""
        return self.owner if self.rows is None else self.owner[self.rows]

    def map_kinds(self, value: Callable[[Window], Any], dtype: Any) -> NDArray[Any]:
        """Return ``value`` for each window (N,); it is called once for each kind."""
        values = np.array([value(kind) for kind in self.kinds], dtype)
        if not len(values):
            return np.zeros(0, dtype)
        return values[self._kind_of_each()]

    def _kind_of_each(self) -> NDArray[np.int32]:
        """Return the kind of each window."""
        if self.rows is None:
            return self.kind
        return self.kind[self.rows]

    def used_kinds(self) -> list[Window]:
        """Return the kinds that at least one window has, in the order of their first."""
        values, firsts = np.unique(self._kind_of_each(), return_index=True)
        by_first = values[np.argsort(firsts)]
        return [self.kinds[index] for index in by_first]

    def shape_counts(self) -> dict[ClipShape, int]:
        """Return how many windows have each shape."""
        windows_of_kind = np.bincount(self._kind_of_each(), minlength=len(self.kinds))
        counts: dict[ClipShape, int] = {}
        for kind, count in zip(self.kinds, windows_of_kind.tolist(), strict=True):
            if count:
                earlier_count = counts.get(kind.shape, 0)
                counts[kind.shape] = earlier_count + count
        return counts

    def used_clip_ids(self) -> set[str]:
        """Return the ids of the clips that have a window."""
        return {self.clip_ids[owner] for owner in np.unique(self.owners()).tolist()}


class WindowTableBuilder:
    """Collects windows for a table."""

    def __init__(self) -> None:
        self._clip_ids = PackedTexts()
        self._companions: dict[int, Companions] = {}
        self._owners: dict[tuple[str, Companions], int] = {}
        self._kinds: dict[Window, int] = {}
        self._owner = array("i")
        self._kind = array("i")
        self._start = array("d")
        self._end = array("d")

    def add(self, windows: Iterable[Window]) -> None:
        """Append windows, in any order of clips."""
        for window in windows:
            name = (window.clip_id, window.companions)
            owner = self._owners.get(name)
            if owner is None:
                owner = self._add_owner(window)
                self._owners[name] = owner
            self._append(owner, window)

    def add_clip(self, windows: Sequence[Window]) -> None:
        """Append the windows of a clip that was not added before, which all have the same
        companions.
        """
        if windows:
            owner = self._add_owner(windows[0])
            for window in windows:
                self._append(owner, window)

    def _add_owner(self, window: Window) -> int:
        """Add the clip of a window with its companions."""
        owner = len(self._clip_ids)
        self._clip_ids.append(window.clip_id)
        if window.companions:
            self._companions[owner] = window.companions
        return owner

    def _append(self, owner: int, window: Window) -> None:
        kind = _kind_of(window)
        self._owner.append(owner)
        self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._start.append(window.start)
        self._end.append(window.end)

    def table(self) -> WindowTable:
        """Return the table of all windows. None may be added any more."""
        return WindowTable(
            clip_ids=self._clip_ids,
            companions=self._companions,
            kinds=tuple(self._kinds),
            owner=np.frombuffer(self._owner, np.int32),
            kind=np.frombuffer(self._kind, np.int32),
            start=np.frombuffer(self._start, np.float64),
            end=np.frombuffer(self._end, np.float64),
        )


def _kind_of(window: Window) -> Window:
    """Return a window without its clip and times."""
    return Window(
        "",
        0.0,
        0.0,
        window.shape,
        window.sampling,
        window.swaps,
        window.resize,
        window.flip,
    )


def most_expensive_first(shape: ClipShape) -> tuple[int, ClipShape]:
    """Sort key of shapes: most pixels first, and of equal ones those with sound."""
    pixels = shape.frames * shape.height * shape.width
    return -pixels - shape.sound, shape


def earlier_copies(windows: Sequence[Window]) -> NDArray[np.int64]:
    """Return for each window how many windows before it are the same."""
    if isinstance(windows, WindowTable) and windows.rows is not None:
        rows = windows.rows
    else:
        numbers: dict[Window, int] = {}
        number_of_each = [
            numbers.setdefault(window, len(numbers)) for window in windows
        ]
        rows = np.array(number_of_each, np.int32)

    # Within the rows in order, the position counted from the first of its group.
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = sorted_rows[1:] != sorted_rows[:-1]

    positions = np.arange(len(rows))
    firsts = np.where(is_first, positions, 0)
    first_of_group = np.maximum.accumulate(firsts)
    earlier = np.empty(len(rows), np.int64)
    earlier[order] = positions - first_of_group
    return earlier
