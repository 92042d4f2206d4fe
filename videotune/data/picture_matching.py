"""Match the pictures of clips: near-duplicates, and clips that share frames.

Compares the signatures that content scans make of the first, middle and last frame.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from videotune.data.content_scan import GRID

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

BLOCK = 64
"""Frames whose neighbours are looked for at once."""

DIRECTIONS = 8
"""Directions along which neighbours are looked for, before all of a frame is compared."""

SAMPLED_ROWS = 20_000
"""Frames, at most, of which these directions are found."""

ROUNDING = 0.01
"""Levels by which rounding may move a frame along a direction."""

MIDDLE = 1
"""Position of the middle frame of a clip; 0 is its first, 2 its last."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class SourceClip:
    """The data of a clip that reveals its source."""

    path: PurePosixPath
    """Path that begins with the dataset's name."""

    seconds: float = 0.0

    signatures: tuple[str, ...] = ()
    """Signatures of the content scan: first, middle and last frame, or one of an image.
    """


def path_order(clips: Sequence[SourceClip]) -> list[int]:
    """Return the indices of clips in path order."""
    return sorted(range(len(clips)), key=lambda index: clips[index].path.as_posix())


def near_duplicates(clips: Sequence[SourceClip]) -> list[tuple[int, int]]:
    """Find pairs of clips that look nearly the same from beginning to end.

    Their first, middle and last frames match, and their durations agree to 20 % or half
    a second.

    Returns:
        Pairs (i, j): j looks like i, the first such clip in path order. Each clip is j
        at most once.
    """
    order = path_order(clips)
    ordered_clips = [clips[index] for index in order]
    frames = _FrameTable(ordered_clips)

    pairs = []
    for row, matching_rows in frames.matches(frames.position == MIDDLE):
        clip = int(frames.clip[row])
        for other_clip in sorted(set(frames.clip[matching_rows].tolist())):
            if other_clip >= clip:
                break
            if _are_near_duplicates(ordered_clips, frames, clip, other_clip):
                pairs.append((order[other_clip], order[clip]))
                break
    return sorted(pairs)


def _are_near_duplicates(
    clips: Sequence[SourceClip], frames: "_FrameTable", index_a: int, index_b: int
) -> bool:
    """Return whether all frames of two clips match, and their durations agree."""
    clip_a = clips[index_a]
    clip_b = clips[index_b]
    tolerance = max(0.5, 0.2 * max(clip_a.seconds, clip_b.seconds))
    if abs(clip_a.seconds - clip_b.seconds) > tolerance:
        return False

    # A frame without structure is not in the table.
    rows_a = frames.rows_of(index_a)
    rows_b = frames.rows_of(index_b)
    counts = {len(rows_a), len(rows_b), len(clip_a.signatures), len(clip_b.signatures)}
    if len(counts) > 1:
        return False
    return bool(frames.agree(rows_a, rows_b).all())


def join_by_pictures(clips: Sequence[SourceClip], names: Sequence[str]) -> list[int]:
    """Join sources whose frames match.

    Args:
        clips: the clips in path order.
        names: source of each clip by its name.

    Returns:
        A label for each clip; clips of one source have the same.
    """
    number_by_name = {name: number for number, name in enumerate(dict.fromkeys(names))}
    name_numbers = np.array([number_by_name[name] for name in names], np.int64)
    sources = _JoinedNumbers(len(number_by_name))
    frames = _FrameTable(clips)

    def join(row: int, rows: NDArray[np.int64]) -> None:
        number = int(name_numbers[frames.clip[row]])
        for matching_number in np.unique(name_numbers[frames.clip[rows]]).tolist():
            sources.join(number, matching_number)

    # Middle frames join at once; others wait until it is known which frames are common.
    uncommon_matches: list[tuple[int, NDArray[np.int64]]] = []
    is_common = np.zeros(len(frames.clip), bool)
    for row, matching_rows in frames.matches():
        is_common[row] = _other_names(frames, name_numbers, row, matching_rows) > COMMON
        if frames.position[row] == MIDDLE:
            join(row, matching_rows[frames.position[matching_rows] == MIDDLE])
        if not is_common[row]:
            uncommon_matches.append((row, matching_rows))

    for row, matching_rows in uncommon_matches:
        join(row, matching_rows[~is_common[matching_rows]])
    return [sources.smallest(number) for number in name_numbers.tolist()]


def _other_names(
    frames: "_FrameTable",
    name_numbers: NDArray[np.int64],
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
        self._smaller = list(range(count))
        """A number of the same set that is smaller, or the number itself."""

    def smallest(self, number: int) -> int:
        """Return the smallest number of a number's set."""
        smaller = self._smaller
        while smaller[number] != number:
            smaller[number] = smaller[smaller[number]]
            number = smaller[number]
        return number

    def join(self, a: int, b: int) -> None:
        """Join the sets of two numbers."""
        a = self.smallest(a)
        b = self.smallest(b)
        self._smaller[max(a, b)] = min(a, b)


class _FrameTable:
    """Signatures of all clips as vectors (N, 150), ordered by mean brightness.

    Pictures with too little structure are left out.
    """

    def __init__(self, clips: Sequence[SourceClip]) -> None:
        clip_indices: list[int] = []
        positions: list[int] = []
        signatures: list[str] = []
        for index, clip in enumerate(clips):
            for position, signature in enumerate(clip.signatures):
                clip_indices.append(index)
                positions.append(position if len(clip.signatures) == 3 else MIDDLE)
                signatures.append(signature)

        cells = GRID * GRID
        levels = np.frombuffer(base64.b64decode("".join(signatures)), np.uint8)
        raw = levels.astype(np.float32).reshape(len(clip_indices), cells + cells // 2)
        brightness = raw[:, :cells]
        structure, plain_share = _structure(brightness)
        mean = brightness.mean(1)

        order = np.argsort(mean, kind="stable")
        is_rich = (structure >= RICH_LEVELS) & (plain_share <= PLAIN_SHARE)
        order = order[is_rich[order]]

        self.clip = np.array(clip_indices, np.int64)[order]
        """Index of each row's clip."""

        self._by_clip = np.argsort(self.clip, kind="stable")
        self._sorted_clips = self.clip[self._by_clip]
        self.position = np.array(positions, np.int64)[order]
        """0 for a first frame, 1 for a middle one and for images, 2 for a last one."""

        self._limit = np.minimum(NEAR * structure, NEAR_LEVELS)[order]
        # Scaled so that a squared distance is the mean over the cells of brightness
        # plus the mean over those of colour.
        cell_counts = [cells] * cells + [cells // 2] * (cells // 2)
        self._vectors = (raw[order] - 128) / np.sqrt(np.array(cell_counts, np.float32))
        self._squares = (self._vectors**2).sum(1)

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
            block = rows[begin : begin + BLOCK]
            near = tree.query_ball_point(
                projected[begin : begin + BLOCK],
                self._limit[block] + ROUNDING,
                return_sorted=True,
            )
            for row, candidates in zip(block.tolist(), near, strict=True):
                others = rows[candidates]
                others = others[self.clip[others] != self.clip[row]]
                if len(others):
                    others = others[self.agree(np.array([row]), others)]
                if len(others):
                    yield row, others

    def rows_of(self, clip: int) -> NDArray[np.int64]:
        """Return the rows of a clip."""
        begin, end = np.searchsorted(self._sorted_clips, [clip, clip + 1])
        return self._by_clip[begin:end]

    def _projected(self, rows: NDArray[np.int64]) -> Vectors:
        """Return rows along the few directions in which they differ most (N, k).

        Two rows are at most as far apart along these as they are altogether.
        """
        vectors = self._vectors[rows]
        sample = vectors[:: len(rows) // SAMPLED_ROWS + 1].astype(np.float64)
        centred = sample - sample.mean(0)
        _, directions = np.linalg.eigh(centred.T @ centred)  # the last differ most
        basis: Vectors = np.asarray(directions[:, -DIRECTIONS:], np.float32)
        projected: Vectors = np.matmul(vectors, basis)
        return projected

    def agree(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each pair of rows whether they match."""
        products = (self._vectors[a] * self._vectors[b]).sum(1)
        return self._is_near(a, b, products)

    def _is_near(
        self, a: NDArray[np.int64], b: NDArray[np.int64], products: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Return whether rows match, by their dot products."""
        squared_limit = np.minimum(self._limit[a], self._limit[b]) ** 2
        squared_distance = self._squares[a] + self._squares[b] - 2 * products
        return np.asarray(squared_distance <= squared_limit)


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
