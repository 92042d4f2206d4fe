"""Match the pictures of clips: near-duplicates, and clips that share frames.

Compares the signatures that content scans make of the first, middle and last frame.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from videotune.data.picture_table import MIDDLE, PictureTable
from videotune.data.source_clips import SourceClip, SourceClipTable

COMMON = 4
"""A frame found in more than this many other videos is a logo or a title: then the
middle frames must match too.
"""


def near_duplicates(
    clips: Sequence[SourceClip] | SourceClipTable,
    pictures: PictureTable | None = None,
) -> list[tuple[int, int]]:
    """Find pairs of clips that look nearly the same from beginning to end.

    Their first, middle and last frames match, and their durations agree to 20 % or half
    a second.

    Args:
        clips: the clips, in any order.
        pictures: their pictures, if they are at hand.

    Returns:
        Pairs (i, j): j looks like i, the first such clip in path order. Each clip is j
        at most once.
    """
    table = SourceClipTable.of(clips)
    order = table.path_order()
    ordered_clips = table.take(order)
    frames = pictures or PictureTable(table)

    pairs = []
    for row, matching_rows in frames.matches(frames.position == MIDDLE):
        clip = int(frames.clip[row])
        for other_clip in sorted(set(frames.clip[matching_rows].tolist())):
            if other_clip >= clip:
                break
            if _are_near_duplicates(ordered_clips, frames, clip, other_clip):
                pairs.append((int(order[other_clip]), int(order[clip])))
                break
    return sorted(pairs)


def _are_near_duplicates(
    clips: SourceClipTable, frames: PictureTable, index_a: int, index_b: int
) -> bool:
    """Return whether all frames of two clips match, and their durations agree."""
    seconds_a = clips.seconds(index_a)
    seconds_b = clips.seconds(index_b)
    tolerance = max(0.5, 0.2 * max(seconds_a, seconds_b))
    if abs(seconds_a - seconds_b) > tolerance:
        return False

    # A frame without structure is not in the table.
    rows_a = frames.rows_of(index_a)
    rows_b = frames.rows_of(index_b)
    frame_counts = frames.counts[[index_a, index_b]].tolist()
    counts = {len(rows_a), len(rows_b), *frame_counts}
    if len(counts) > 1:
        return False
    return bool(frames.agree(rows_a, rows_b).all())


def join_by_pictures(
    frames: PictureTable, name_numbers: NDArray[np.int32]
) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """Join sources whose frames match.

    Args:
        frames: the pictures of the clips.
        name_numbers: number of each clip's source by its name (N,), counted from 0.

    Returns:
        A label for each number; those of one source have the same, their smallest. And
        for each join two clips, in path order, whose frames match.
    """
    largest_number = int(name_numbers.max(initial=-1))
    sources = _JoinedNumbers(largest_number + 1)
    pairs: list[tuple[int, int]] = []

    def join(row: int, rows: NDArray[np.int64]) -> None:
        clip = int(frames.clip[row])
        number = int(name_numbers[clip])
        matching_clips = np.unique(frames.clip[rows])
        for matching_clip in matching_clips.tolist():
            matching_number = int(name_numbers[matching_clip])
            is_new = sources.join(number, matching_number)
            if is_new:
                first, second = sorted((clip, matching_clip))
                pairs.append((first, second))

    # Middle frames join at once; others wait until it is known which frames are common.
    uncommon_rows = array("i")
    uncommon_matches = array("i")
    uncommon_ends = array("q", [0])
    is_common = np.zeros(len(frames.clip), bool)
    for row, matching_rows in frames.matches():
        name_count = _other_names(frames, name_numbers, row, matching_rows)
        is_common[row] = name_count > COMMON
        if frames.position[row] == MIDDLE:
            is_middle = frames.position[matching_rows] == MIDDLE
            join(row, matching_rows[is_middle])
        if not is_common[row]:
            uncommon_rows.append(row)
            uncommon_matches.frombytes(matching_rows.astype(np.int32).tobytes())
            uncommon_ends.append(len(uncommon_matches))

    for row, (begin, end) in zip(uncommon_rows, pairwise(uncommon_ends), strict=True):
        matching_rows = np.array(uncommon_matches[begin:end], np.int64)
        join(row, matching_rows[~is_common[matching_rows]])
    return sources.labels(), sorted(pairs)


def _other_names(
    frames: PictureTable,
    name_numbers: NDArray[np.int32],
    row: int,
    matching_rows: NDArray[np.int64],
) -> int:
    """Return in how many sources, apart from its own, a frame is found."""
    present = np.unique(name_numbers[frames.clip[matching_rows]])
    own_name = name_numbers[frames.clip[row]]
    return len(present) - int(own_name in present)


class _JoinedNumbers:
    """Sets of numbers that are joined, each known by its smallest number (union-find).

    Args:
        count: numbers from 0.
    """

    def __init__(self, count: int) -> None:
        self._smaller = array("i", range(count))
        """A number of the same set that is smaller, or the number itself."""

    def smallest(self, number: int) -> int:
        """Return the smallest number of a number's set."""
        smaller = self._smaller
        while smaller[number] != number:
            smaller[number] = smaller[smaller[number]]
            number = smaller[number]
        return number

    def labels(self) -> NDArray[np.int32]:
        """Return the smallest number of each number's set."""
        return np.array(
            [self.smallest(number) for number in range(len(self._smaller))], np.int32
        )

    def join(self, a: int, b: int) -> bool:
        """Join the sets of two numbers; return whether they were two."""
        a = self.smallest(a)
        b = self.smallest(b)
        self._smaller[max(a, b)] = min(a, b)
        return a != b
