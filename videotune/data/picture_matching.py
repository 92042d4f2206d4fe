"""Match the pictures of clips: near-duplicates, and clips that share frames.

Compares the signatures that content scans make of the first, middle and last frame.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from videotune.data.content_scan import GRID
from videotune.data.packed_rows import SpilledBytes
from videotune.data.source_clips import SourceClip, SourceClipTable

NEAR = 0.2
"""Largest difference of matching frames, as a share of their own structure.

Re-encodes at half the size and CRF 35 differ by at most 0.10, frames 1/24 s apart by
less than 0.2 in most shots, frames of unrelated clips by more than 1.
"""

NEAR_LEVELS = 10.0
"""Largest difference of matching frames in levels of 255, however rich the picture is.
"""

RICH_LEVELS = 6.0
"""Weakest structure of a picture that counts: its distance from a plane fitted to it.
"""

PLAIN_SHARE = 0.6
"""Largest share of a picture within 4 levels of one tone.

Black, titles and drawings on a flat ground have 0.75 and more; real clips at most 0.26.
"""

COMMON = 4
"""A frame found in more than this many other videos is a logo or a title: then the
middle frames must match too.
"""

Vectors = NDArray[np.float32]

BLOCK = 64
"""Frames whose neighbours are looked for at once."""

ROWS_TOGETHER = 1024
"""Frames that are turned into vectors at once."""

RELEASED_AFTER = 32 * BLOCK
"""Frames after whose comparison the pages of the signatures leave memory."""

CELLS = GRID * GRID
"""Cells of a signature's brightness; its two colours together have half as many."""

SCALES: Vectors = np.sqrt(
    np.repeat(np.array([CELLS, CELLS // 2], np.float32), [CELLS, CELLS // 2])
)
"""Divisors of a signature's levels; see ``_FrameTable``."""

DIRECTIONS = 8
"""Directions along which neighbours are looked for, before all of a frame is compared."""

SAMPLED_ROWS = 20_000
"""Frames, at most, of which these directions are found."""

ROUNDING = 0.01
"""Levels by which rounding may move a frame along a direction."""

MIDDLE = 1
"""Position of the middle frame of a clip; 0 is its first, 2 its last."""


def near_duplicates(
    clips: Sequence[SourceClip] | SourceClipTable,
) -> list[tuple[int, int]]:
    """Find pairs of clips that look nearly the same from beginning to end.

    Their first, middle and last frames match, and their durations agree to 20 % or half
    a second.

    Returns:
        Pairs (i, j): j looks like i, the first such clip in path order. Each clip is j
        at most once.
    """
    table = SourceClipTable.of(clips)
    order = table.path_order()
    ordered_clips = table.take(order)
    frames = _FrameTable(ordered_clips)

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
    clips: SourceClipTable, frames: _FrameTable, index_a: int, index_b: int
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
    clips: SourceClipTable, name_numbers: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Join sources whose frames match.

    Args:
        clips: the clips in path order.
        name_numbers: number of each clip's source by its name (N,), counted from 0.

    Returns:
        A label for each number; those of one source have the same, their smallest.
    """
    sources = _JoinedNumbers(int(name_numbers.max(initial=-1)) + 1)
    frames = _FrameTable(clips)

    def join(row: int, rows: NDArray[np.int64]) -> None:
        number = int(name_numbers[frames.clip[row]])
        for matching_number in np.unique(name_numbers[frames.clip[rows]]).tolist():
            sources.join(number, matching_number)

    # Middle frames join at once; others wait until it is known which frames are common.
    uncommon_rows = array("i")
    uncommon_matches = array("i")
    uncommon_ends = array("q", [0])
    is_common = np.zeros(len(frames.clip), bool)
    for row, matching_rows in frames.matches():
        is_common[row] = _other_names(frames, name_numbers, row, matching_rows) > COMMON
        if frames.position[row] == MIDDLE:
            join(row, matching_rows[frames.position[matching_rows] == MIDDLE])
        if not is_common[row]:
            uncommon_rows.append(row)
            uncommon_matches.frombytes(matching_rows.astype(np.int32).tobytes())
            uncommon_ends.append(len(uncommon_matches))

    for row, (begin, end) in zip(uncommon_rows, pairwise(uncommon_ends), strict=True):
        matching_rows = np.array(uncommon_matches[begin:end], np.int64)
        join(row, matching_rows[~is_common[matching_rows]])
    return sources.labels()


def _other_names(
    frames: _FrameTable,
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

    def join(self, a: int, b: int) -> None:
        """Join the sets of two numbers."""
        a = self.smallest(a)
        b = self.smallest(b)
        self._smaller[max(a, b)] = min(a, b)


class _FrameTable:
    """Signatures of all clips, ordered by mean brightness.

    Pictures with too little structure are left out. A row is kept as its 150 levels, a byte
    each, in a file. As vectors of float32 (``_vectors``) they would take four times as
    much, so only some rows at a time are.
    """

    def __init__(self, clips: SourceClipTable) -> None:
        counts = array("i")
        mean = array("f")
        structure = array("f")
        plain_share = array("f")

        def levels() -> Iterator[NDArray[np.uint8]]:
            for part in _signature_blocks(clips, counts):
                yield part
                brightness = part[:, :CELLS].astype(np.float32)
                mean.frombytes(brightness.mean(1).tobytes())
                part_structure, part_share = _structure(brightness)
                structure.frombytes(part_structure.tobytes())
                plain_share.frombytes(part_share.tobytes())

        self._levels = SpilledBytes(levels(), CELLS + CELLS // 2)
        self.counts = np.array(counts, np.int32)
        """How many pictures each clip has."""

        order = np.argsort(np.frombuffer(mean, np.float32), kind="stable")
        structures = np.frombuffer(structure, np.float32)
        plain_shares = np.frombuffer(plain_share, np.float32)
        is_rich = (structures >= RICH_LEVELS) & (plain_shares <= PLAIN_SHARE)
        self._frames = order[is_rich[order]].astype(np.int32)
        """Index of each row among all frames, those of one clip after the other."""

        clip_of_frame = np.repeat(
            np.arange(len(self.counts), dtype=np.int32), self.counts
        )
        self.clip = clip_of_frame[self._frames]
        """Index of each row's clip."""

        self._by_clip = np.argsort(self.clip, kind="stable").astype(np.int32)
        self._sorted_clips = self.clip[self._by_clip]
        self.position = _positions(self.counts)[self._frames]
        """0 for a first frame, 1 for a middle one and for images, 2 for a last one."""

        self._limit = np.minimum(NEAR * structures, NEAR_LEVELS)[self._frames]
        self._squares = np.empty(len(self._frames), np.float32)
        for rows in _blocks(len(self._frames)):
            self._squares[rows] = (self._vectors(rows) ** 2).sum(1)
            self._levels.release()

    def _vectors(self, rows: slice | NDArray[np.integer[Any]]) -> Vectors:
        """Return rows as vectors (n, 150), scaled so that a squared distance is the mean
        over the cells of brightness plus the mean over those of colour.
        """
        levels = self._levels.array[self._frames[rows]].astype(np.float32)
        vectors: Vectors = (levels - 128) / SCALES
        return vectors

    def matches(
        self, mask: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each row that matches rows of other clips, with those rows.

        Args:
            mask: (N,) rows that are compared; default is all.
        """
        rows = np.arange(len(self.clip)) if mask is None else np.flatnonzero(mask)
        if not len(rows):
            return
        projected = self._projected(rows)
        tree = cKDTree(projected)
        for begin in range(0, len(rows), BLOCK):
            if begin % RELEASED_AFTER == 0:
                self._levels.release()
            block = rows[begin : begin + BLOCK]
            near = tree.query_ball_point(
                projected[begin : begin + BLOCK],
                self._limit[block] + ROUNDING,
                return_sorted=True,
            )
            # All pairs (row, candidate) of the block, by row.
            counts = [len(candidates) for candidates in near]
            candidates = np.fromiter(chain.from_iterable(near), np.int64, sum(counts))
            yield from self._matches_among(np.repeat(block, counts), rows[candidates])

    def _matches_among(
        self, a: NDArray[np.int64], b: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each row in ``a`` that matches rows of other clips, with those rows.

        Args:
            a: the first rows of pairs (N,), in groups of the same row.
            b: the second rows of the pairs (N,).
        """
        is_other_clip = self.clip[a] != self.clip[b]
        a = a[is_other_clip]
        b = b[is_other_clip]
        is_match = np.empty(len(a), bool)
        for part in _blocks(len(a)):
            is_match[part] = self.agree(a[part], b[part])
        a = a[is_match]
        b = b[is_match]

        firsts = np.flatnonzero(np.diff(a, prepend=-1))
        for begin, end in pairwise([*firsts.tolist(), len(a)]):
            yield int(a[begin]), b[begin:end]

    def rows_of(self, clip: int) -> NDArray[np.int32]:
        """Return the rows of a clip."""
        begin, end = np.searchsorted(self._sorted_clips, [clip, clip + 1])
        return self._by_clip[begin:end]

    def _projected(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return rows along the few directions in which they differ most (N, k).

        Two rows are at most as far apart along these as they are altogether.
        """
        sample = rows[:: len(rows) // SAMPLED_ROWS + 1]
        total = np.zeros(self._levels.array.shape[1])
        products = np.zeros((len(total), len(total)))
        for part in _blocks(len(sample)):
            vectors = self._vectors(sample[part]).astype(np.float64)
            total += vectors.sum(0)
            products += vectors.T @ vectors
        scatter = products - np.outer(total, total) / len(sample)
        _, directions = np.linalg.eigh(scatter)  # the last differ most

        basis: Vectors = np.asarray(directions[:, -DIRECTIONS:], np.float32)
        # The tree wants float64, and would copy anything else.
        projected = np.empty((len(rows), DIRECTIONS), np.float64)
        for part in _blocks(len(rows)):
            projected[part] = self._vectors(rows[part]) @ basis
            self._levels.release()
        return projected

    def agree(
        self, a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Return for each pair of rows whether they match."""
        products = (self._vectors(a) * self._vectors(b)).sum(1)
        squared_limit = np.minimum(self._limit[a], self._limit[b]) ** 2
        squared_distance = self._squares[a] + self._squares[b] - 2 * products
        return np.asarray(squared_distance <= squared_limit)


def _signature_blocks(
    clips: SourceClipTable, counts: array[int]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the levels of all signatures, some rows (n, 150) at a time.

    Args:
        clips: the clips.
        counts: receives the number of each clip's signatures.
    """
    signatures: list[str] = []
    for position in range(len(clips)):
        of_clip = clips.signatures(position)
        counts.append(len(of_clip))
        signatures += of_clip
        if len(signatures) >= ROWS_TOGETHER:
            yield _levels_of(signatures[:ROWS_TOGETHER])
            del signatures[:ROWS_TOGETHER]
    if signatures:
        yield _levels_of(signatures)


def _levels_of(signatures: Sequence[str]) -> NDArray[np.uint8]:
    """Return the levels of signatures (n, 150)."""
    content = base64.b64decode("".join(signatures))
    return np.frombuffer(content, np.uint8).reshape(len(signatures), -1)


def _positions(counts: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return the position of each frame in its clip.

    Args:
        counts: frames of each clip. A clip has three, or else those are its middle.
    """
    first_frames = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum())) - np.repeat(first_frames, counts)
    positions[np.repeat(counts != 3, counts)] = MIDDLE
    return positions.astype(np.int8)


def _blocks(count: int) -> Iterator[slice]:
    """Yield slices of ROWS_TOGETHER rows that cover ``count`` rows."""
    for begin in range(0, count, ROWS_TOGETHER):
        yield slice(begin, min(begin + ROWS_TOGETHER, count))


def _structure(brightness: Vectors) -> tuple[Vectors, Vectors]:
    """Measure how much structure pictures have.

    Args:
        brightness: (N, 100).

    Returns:
        Distance from the nearest plane in levels, and the largest share of cells of one
        tone, (N,) each.
    """
    rows, columns = np.mgrid[:GRID, :GRID].reshape(2, -1) - (GRID - 1) / 2
    basis = np.stack([np.ones(GRID * GRID), rows, columns], 1)
    basis = (basis / np.linalg.norm(basis, axis=0)).astype(np.float32)
    residual = brightness - (brightness @ basis) @ basis.T

    median_level = np.median(brightness, 1, keepdims=True)
    plain_share = (np.abs(brightness - median_level) <= 4).mean(1, dtype=np.float32)
    return np.sqrt((residual**2).mean(1)), plain_share
