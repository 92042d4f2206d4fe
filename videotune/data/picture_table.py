"""The pictures of clips as rows of levels, and which of them match."""

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
from videotune.data.source_clips import SourceClipTable

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


Vectors = NDArray[np.float32]


BLOCK = 64
"""Frames whose neighbours are looked for at once."""


ROWS_TOGETHER = 1024
"""Frames that are turned into vectors at once."""


RELEASED_AFTER = 8 * BLOCK
"""Frames after whose comparison the pages of the signatures leave memory."""


CELLS = GRID * GRID
"""Cells of a signature's brightness."""


COLOUR_CELLS = CELLS // 2
"""Cells of a signature's two colours."""


_CELLS_OF_PART = [CELLS, COLOUR_CELLS]

SCALES: Vectors = np.sqrt(
    np.repeat(
        np.array(_CELLS_OF_PART, np.float32),
        _CELLS_OF_PART,
    )
)
"""Divisors of a signature's levels; see ``PictureTable``."""


DIRECTIONS = 8
"""Directions along which neighbours are looked for, before all of a frame is compared."""


SAMPLED_ROWS = 20_000
"""Frames, at most, of which these directions are found."""


ROUNDING = 0.01
"""Levels by which rounding may move a frame along a direction."""


MIDDLE = 1
"""Position of the middle frame of a clip; 0 is its first, 2 its last."""


class PictureTable:
    """Signatures of all clips, ordered by mean brightness.

    Pictures with too little structure are left out. A row is kept as its 150 levels, a byte
    each, in a file. As vectors of float32 (``_vectors``) they would take four times as
    much, so only some rows at a time are.

    Args:
        table: the clips, which are taken in path order.
    """

    def __init__(self, table: SourceClipTable) -> None:
        clips = table.take(table.path_order())
        counts = array("i")
        mean = array("f")
        structure = array("f")
        plain_share = array("f")
        levels = SpilledBytes(CELLS + COLOUR_CELLS)
        for part in _signature_blocks(clips, counts):
            levels.extend(part)
            brightness = part[:, :CELLS].astype(np.float32)
            part_mean = brightness.mean(1)
            part_structure, part_share = _structure(brightness)
            mean.frombytes(part_mean.tobytes())
            structure.frombytes(part_structure.tobytes())
            plain_share.frombytes(part_share.tobytes())
        self.counts = np.array(counts, np.int32)
        """How many pictures each clip has."""

        means = np.frombuffer(mean, np.float32)
        structures = np.frombuffer(structure, np.float32)
        plain_shares = np.frombuffer(plain_share, np.float32)
        has_structure = structures >= RICH_LEVELS
        is_plain = plain_shares > PLAIN_SHARE
        is_rich = has_structure & ~is_plain

        order = np.argsort(means, kind="stable")
        rich_frames = order[is_rich[order]].astype(np.int32)
        """Index of each row among all frames, those of one clip after the other."""

        # Frames that are compared have nearly the same brightness, so that they are near
        # each other in the file.
        row_count = len(rich_frames)
        ordered_levels = SpilledBytes(CELLS + COLOUR_CELLS)
        for rows in _blocks(row_count):
            ordered_levels.extend(levels.take(rich_frames[rows]))
        self._levels = ordered_levels.mapped()

        clip_numbers = np.arange(len(self.counts), dtype=np.int32)
        clip_of_frame = np.repeat(clip_numbers, self.counts)
        self.clip = clip_of_frame[rich_frames]
        """Index of each row's clip."""

        rows_by_clip = np.argsort(self.clip, kind="stable")
        self._by_clip = rows_by_clip.astype(np.int32)
        self._sorted_clips = self.clip[self._by_clip]
        positions = _positions(self.counts)
        self.position = positions[rich_frames]
        """0 for a first frame, 1 for a middle one and for images, 2 for a last one."""

        limits = np.minimum(NEAR * structures, NEAR_LEVELS)
        self._limit = limits[rich_frames]
        self._squares = np.empty(row_count, np.float32)
        for rows in _blocks(row_count):
            squares = self._vectors(rows) ** 2
            self._squares[rows] = squares.sum(1)
            self._levels.release()

    def _vectors(self, rows: slice | NDArray[np.integer[Any]]) -> Vectors:
        """Return rows as vectors (n, 150), scaled so that a squared distance is the mean
        over the cells of brightness plus the mean over those of colour.
        """
        levels = self._levels.array[rows]
        centred = levels.astype(np.float32) - 128
        vectors: Vectors = centred / SCALES
        return vectors

    def matches(
        self, mask: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each row that matches rows of other clips, with those rows.

        Args:
            mask: (N,) rows that are compared; default is all.
        """
        if mask is None:
            rows = np.arange(len(self.clip))
        else:
            rows = np.flatnonzero(mask)
        if not len(rows):
            return

        projected = self._projected(rows)
        tree = cKDTree(projected)
        for begin in range(0, len(rows), BLOCK):
            if begin % RELEASED_AFTER == 0:
                self._levels.release()
            part = slice(begin, begin + BLOCK)
            block = rows[part]
            near = tree.query_ball_point(
                projected[part],
                self._limit[block] + ROUNDING,
                return_sorted=True,
            )

            # All pairs (row, candidate) of the block, by row.
            counts = [len(candidates) for candidates in near]
            all_near = chain.from_iterable(near)
            candidates = np.fromiter(all_near, np.int64, sum(counts))
            first_rows = np.repeat(block, counts)
            yield from self._matches_among(first_rows, rows[candidates])

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

        is_first = np.diff(a, prepend=-1)
        borders = np.flatnonzero(is_first).tolist()
        borders.append(len(a))
        for begin, end in pairwise(borders):
            row = int(a[begin])
            yield row, b[begin:end]

    def rows_of(self, clip: int) -> NDArray[np.int32]:
        """Return the rows of a clip."""
        begin, end = np.searchsorted(
            self._sorted_clips,
            [clip, clip + 1],
        )
        return self._by_clip[begin:end]

    def _projected(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return rows along the few directions in which they differ most (N, k).

        Two rows are at most as far apart along these as they are altogether.
        """
        sample_step = len(rows) // SAMPLED_ROWS + 1
        sample = rows[::sample_step]
        cells = self._levels.array.shape[1]
        total = np.zeros(cells)
        products = np.zeros((cells, cells))
        for part in _blocks(len(sample)):
            vectors = self._vectors(sample[part])
            exact_vectors = vectors.astype(np.float64)
            total += exact_vectors.sum(0)
            products += exact_vectors.T @ exact_vectors
            self._levels.release()

        squared_mean = np.outer(total, total) / len(sample)
        scatter = products - squared_mean
        _, directions = np.linalg.eigh(scatter)
        # The last differ most.
        last_directions = directions[:, -DIRECTIONS:]
        basis: Vectors = np.asarray(last_directions, np.float32)

        # The tree wants float64, and would copy anything else.
        projected = np.empty((len(rows), DIRECTIONS), np.float64)
        for part in _blocks(len(rows)):
            part_vectors = self._vectors(rows[part])
            projected[part] = part_vectors @ basis
            self._levels.release()
        return projected

    def agree(
        self, a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Return for each pair of rows whether they match."""
        vectors_a = self._vectors(a)
        vectors_b = self._vectors(b)
        products = (vectors_a * vectors_b).sum(1)
        squares = self._squares[a] + self._squares[b]
        squared_distance = squares - 2 * products

        limit = np.minimum(
            self._limit[a],
            self._limit[b],
        )
        squared_limit = limit**2
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
    text = "".join(signatures)
    content = base64.b64decode(text)
    levels = np.frombuffer(content, np.uint8)
    return levels.reshape(len(signatures), -1)


def _positions(counts: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return the position of each frame in its clip.

    Args:
        counts: frames of each clip. A clip has three, or else those are its middle.
    """
    first_frames = np.cumsum(counts) - counts
    frame_count = int(counts.sum())
    frames = np.arange(frame_count)
    positions = frames - np.repeat(first_frames, counts)

    has_only_middles = np.repeat(counts != 3, counts)
    positions[has_only_middles] = MIDDLE
    return positions.astype(np.int8)


def _blocks(count: int) -> Iterator[slice]:
    """Yield slices of ROWS_TOGETHER rows that cover ``count`` rows."""
    for begin in range(0, count, ROWS_TOGETHER):
        end = min(begin + ROWS_TOGETHER, count)
        yield slice(begin, end)


def _structure(brightness: Vectors) -> tuple[Vectors, Vectors]:
    """Measure how much structure pictures have.

    Args:
        brightness: (N, 100).

    Returns:
        Distance from the nearest plane in levels, and the largest share of cells of one
        tone, (N,) each.
    """
    centre = (GRID - 1) / 2
    cells = np.mgrid[:GRID, :GRID].reshape(2, -1)
    rows, columns = cells - centre
    level = np.ones(CELLS)
    planes = np.stack([level, rows, columns], 1)
    lengths = np.linalg.norm(planes, axis=0)
    basis = (planes / lengths).astype(np.float32)
    coordinates = brightness @ basis
    residual = brightness - coordinates @ basis.T
    mean_square = (residual**2).mean(1)

    median_level = np.median(brightness, 1, keepdims=True)
    distances = np.abs(brightness - median_level)
    is_of_one_tone = distances <= 4
    plain_share = is_of_one_tone.mean(1, dtype=np.float32)
    return np.sqrt(mean_square), plain_share
