"""Measure whether a sample shows anything: black, flat, frozen or noisy pictures."""

import numpy as np
from numpy.typing import NDArray

from videotune.model_spec import VideoRules

BLACK_LEVEL = 24.0
"""Brightness (of 255) that no cell of a black picture exceeds."""

FLAT_LEVELS = 8.0
"""Largest range of the cells of a flat picture, as in the scan of clips."""

FROZEN_LEVELS = 3.0
"""Largest change of a cell in a frozen clip, as in the scan of clips."""

NOISE_NEIGHBOURS = 0.3
"""Correlation of adjacent cells below which a picture is noise.

Decoded noise of the toy model has 0.13 to 0.38, its samples 0.45 to 0.7, five filmed
clips 0.77 to 0.96.
"""

NOISE_NEIGHBOURS_CHANGING = 0.5
"""The same for a clip whose frames have less than NOISE_MOMENTS in common."""

NOISE_MOMENTS = 0.3
"""Correlation of frames that share no latent frame.

Decoded noise has at most 0.22, samples of the toy model 0.57 to 0.8, a galloping horse
0.67.
"""

FEWEST_CELLS = 6
"""Cells of a side, at least: with fewer, a correlation says little."""


def measure_picture(
    frames: NDArray[np.uint8], rules: VideoRules
) -> dict[str, str | float | None]:
    """Measure a sample's frames.

    Args:
        frames: uint8 (T, H, W, 3).
        rules: the model's; its strides are the size of noise in pixels and frames.

    Returns:
        The journal's ``picture``: the fault or None; the brightest cell; the largest
        range of a frame's cells; the largest change of a cell from the first frame;
        the correlation of adjacent cells and of frames that share no latent frame (None
        where there is none).
    """
    cells = _brightness(frames, rules.spatial_stride)
    ranges = np.ptp(cells, axis=(1, 2))
    changes = np.abs(cells[1:] - cells[:1])
    largest_change = float(changes.max()) if len(changes) else None

    of_columns = _correlation(cells[:, :, 1:], cells[:, :, :-1])
    of_rows = _correlation(cells[:, 1:], cells[:, :-1])
    neighbours = (of_columns + of_rows) / 2
    lag = rules.temporal_stride
    moments = None
    if len(cells) > lag:
        moments = _correlation(cells[lag:], cells[:-lag])

    brightest = float(cells.max())
    # One flash in a black sample does not make it a good one.
    typical_range = float(np.median(ranges))
    brightest_of_frames = cells.max(axis=(1, 2))
    typical_brightness = float(np.median(brightest_of_frames))
    fault = None
    if typical_brightness < BLACK_LEVEL:
        fault = "black"
    elif typical_range < FLAT_LEVELS:
        fault = "flat"
    elif _is_noise(neighbours, moments):
        fault = "noise"
    elif largest_change is not None and largest_change <= FROZEN_LEVELS:
        fault = "frozen"
    return {
        "fault": fault,
        "brightest": round(brightest, 1),
        "range": round(float(ranges.max()), 1),
        "change": None if largest_change is None else round(largest_change, 1),
        "neighbours": round(neighbours, 3),
        "moments": None if moments is None else round(moments, 3),
    }


def _brightness(frames: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Return the mean brightness of square cells, (T, rows, columns)."""
    count, height, width, _ = frames.shape
    side = max(1, min(side, height // FEWEST_CELLS, width // FEWEST_CELLS))
    rows = height // side
    columns = width // side
    cropped = frames[:, : rows * side, : columns * side]

    # Frame by frame: a sample of a large model has a gigabyte as float32.
    cells = np.empty((count, rows, columns), np.float32)
    for index, frame in enumerate(cropped):
        blocks = frame.reshape(rows, side, columns, side, 3)
        cells[index] = blocks.mean(axis=(1, 3, 4), dtype=np.float32)
    return cells


def _correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the correlation of two arrays; 1 if one of them is constant."""
    a = a - a.mean()
    b = b - b.mean()
    squares_of_a = (a * a).sum()
    squares_of_b = (b * b).sum()
    norm = float(np.sqrt(squares_of_a * squares_of_b))
    if not norm:
        return 1.0
    product = float((a * b).sum())
    return product / norm


def _is_noise(neighbours: float, moments: float | None) -> bool:
    if neighbours < NOISE_NEIGHBOURS:
        return True
    is_changing = moments is not None and moments < NOISE_MOMENTS
    return is_changing and neighbours < NOISE_NEIGHBOURS_CHANGING
