"""Cuts of a clip, by how much its picture changes and whether it returns."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.float32]

CUT_LEVELS = 4.0
"""Mean change (of 255) below which nothing is a cut.

Of 200 cuts between unrelated clips the smallest had 30.
"""


CUT_RATIO = 3.0
"""A cut changes the picture this many times as much as the frames around it do.

A pan begins with 2.0; cuts have 4.6 and more.
"""


CUT_LIKENESS = 0.3
"""Largest ``likeness`` across a cut.

It is at most 0.07; with the same bars and logo over both shots 0.27; within a shot 0.56
to 0.94 at 8 fps, 0.31 on a galloping horse.
"""


KNOWN_SHARE = 0.6
"""How much of a missing neighbour is left out of the usual change, at a clip's ends.

Counted as a neighbour at rest (0), a fast movement in the first frames is a cut: in 51 of
774 windows of 2 s from 18 clips, crops of them and every third frame of both. Left out (1),
1 of them has one, and a planted shot of a single frame is missed in 11 % of 344. At 0.6, 15
have one and 2 % are missed.
"""

BLOCKS = 5
"""Rows and columns of blocks in which details are compared."""


FLAT_DETAILS = 6.0
"""Length of a block's details (36 cells) below which it is flat: one level per cell."""


def fine_details(picture: Picture) -> Picture:
    """Return the details of a picture that are finer than five cells.

    They do not depend on the light: a lamp that goes out changes nothing.

    Args:
        picture: (30, 30).

    Returns:
        25 blocks (25, 36), each of unit length, or zero if it is flat.
    """
    # Subtract the mean over 5 × 5 cells, computed by a summed-area table.
    padded = np.pad(picture, 2, mode="edge")
    sums_down = padded.cumsum(0)
    sums = np.pad(sums_down.cumsum(1), ((1, 0), (1, 0)))
    lower = sums[5:]
    upper = sums[:-5]
    box_sums = lower[:, 5:] - upper[:, 5:] - lower[:, :-5] + upper[:, :-5]
    box_means = box_sums / 25
    fine = picture - box_means

    rows_of_blocks = fine.reshape(BLOCKS, 6, BLOCKS, 6)
    blocks = rows_of_blocks.transpose(0, 2, 1, 3)
    blocks = blocks.reshape(BLOCKS * BLOCKS, 36)
    blocks -= blocks.mean(1, keepdims=True)

    length = np.linalg.norm(blocks, axis=1, keepdims=True)
    unit_blocks = blocks / np.maximum(length, 1e-6)
    is_flat = length <= FLAT_DETAILS
    unit_blocks = np.where(is_flat, 0, unit_blocks)
    return np.asarray(unit_blocks, np.float32)


def likeness(details_a: Picture, details_b: Picture) -> float:
    """Return how much of their details two pictures share, -1 to 1.

    This is the correlation that two thirds of their blocks exceed. A third may agree
    because of an overlay: bars, a logo, subtitles. Blocks that are flat in both do not
    count; 1 if all are.
    """
    has_details = details_a.any(1) | details_b.any(1)
    products = details_a * details_b
    correlations = products.sum(1)[has_details]
    if len(correlations) < 3:
        return 1.0

    ascending = np.sort(correlations)
    third = len(ascending) // 3
    return float(ascending[third])


def find_cuts(
    changes: Sequence[float],
    likenesses: dict[int, float],
    gaps: Sequence[float],
    ratio: float,
) -> list[int]:
    """Return the indices of frames that begin a new shot.

    Args:
        changes: mean change from frame i to i + 1.
        likenesses: by frame i, the largest likeness of details between a frame shortly
            before it and one from it on.
        gaps: seconds from frame i to i + 1.
        ratio: how many times as much as the frames around it a cut changes the picture.
    """
    cuts = []
    for index, change in enumerate(changes):
        # The two changes before and the two after, as far as the clip has them: what lies
        # before its first frame may move as fast as what follows.
        neighbours = [
            neighbour
            for neighbour in (index - 2, index - 1, index + 1, index + 2)
            if 0 <= neighbour < len(changes)
        ]
        neighbour_changes = [changes[neighbour] for neighbour in neighbours]
        num_missing = 4 - len(neighbours)
        usual_change = sum(neighbour_changes) / (4 - KNOWN_SHARE * num_missing)

        # Over a longer gap in time than its neighbours have, a picture changes more without
        # a cut.
        neighbour_gaps = [
            gaps[neighbour] for neighbour in neighbours if gaps[neighbour] > 0
        ]
        if neighbour_gaps:
            mean_gap = sum(neighbour_gaps) / len(neighbour_gaps)
            relative_gap = gaps[index] / mean_gap
            usual_change *= max(1.0, relative_gap)

        smallest_change = max(CUT_LEVELS, ratio * usual_change)
        if change < smallest_change:
            continue
        if likenesses[index + 1] <= CUT_LIKENESS:
            cuts.append(index + 1)
    return cuts
