"""Ascending integers, such as the frame times of a clip, in a few bytes."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, overload


class PackedIntegers(Sequence[int]):
    """Ascending integers as text. Equal to a tuple of the same integers.

    Its length and its ends are at hand; whoever wants another element unpacks all.

    Args:
        text: what ``pack`` returned.
        values: what it stands for.
    """

    __slots__ = ("_ends", "_length", "_text")

    def __init__(self, text: str, values: Sequence[int]) -> None:
        self._text = text
        self._length = len(values)
        self._ends = (0, 0)
        if values:
            self._ends = (values[0], values[-1])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._values())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        length = self._length
        if length and isinstance(index, int):
            first, last = self._ends
            if index in (0, -length):
                return first
            if index in (-1, length - 1):
                return last
        return self._values()[index]

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, PackedIntegers):
            if self._text == other._text:
                return True
            return self._values() == other._values()
        if isinstance(other, tuple):
            return self._values() == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return repr(self._values())

    def _values(self) -> tuple[int, ...]:
        values = unpack(self._text, self._length)
        return tuple(values)


def pack(values: Sequence[int]) -> str:
    """Encode ascending integers as the first one and their steps: 0 1001 2002 -> "0
    1001x2".
    """
    first_values = values[:1]
    parts = [str(value) for value in first_values]

    steps = (
        following - value
        for value, following in pairwise(values)  # one fewer than there are values
    )
    for step, group in groupby(steps):
        repeats = len(list(group))
        part = f"{step}"
        if repeats > 1:
            part = f"{step}x{repeats}"
        parts.append(part)
    return " ".join(parts)


def unpack(text: str, most: int) -> list[int]:
    """Decode what ``pack`` wrote.

    Raises:
        ValueError: if the text is damaged or stands for more than ``most`` integers.
    """
    steps: list[int] = []
    for part in text.split():
        step_text, _, repeats_text = part.partition("x")
        step = int(step_text)
        repeats = int(repeats_text or 1)
        if len(steps) + repeats > most:
            raise ValueError(f"more than {most} frames")
        steps += [step] * repeats

    values = accumulate(steps)
    return list(values)
