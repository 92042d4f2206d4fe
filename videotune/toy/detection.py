"""Detect what a toy clip shows: colour, shape and direction of the one thing that
moves.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.shapes import PALETTE, SHAPES, distance, pixel_grid

CANDIDATES = (*SHAPES, "diamond")
"""Shapes that a detection can name."""

CONTRAST = 50
"""Grey levels by which a pixel of the shape differs from the background."""

SMALLEST = 40 / 64**2
"""Smallest visible share of the picture.

The shapes that are drawn cover 4 % and more.
"""


@dataclass(frozen=True)
class Detection:
    """What a clip shows."""

    colour: str | None
    """Nearest colour of the palette; None if nothing is visible."""

    shape: str | None
    """Shape of best overlap; None if nothing is visible."""

    direction: str | None
    """Direction of the motion; None if nothing is visible or moves."""

    visible_frames: int
    """Frames in which something differs from the background."""

    iou: float
    """Mean intersection over union, 0 to 1, of the thing with the shape; 0 if there is
    none.
    """


@dataclass(frozen=True)
class Blob:
    """The visible thing in one frame."""

    mask: NDArray[np.bool_]
    """(H, W)."""

    centre: NDArray[Any]
    """Centre of mass: column and row."""

    colour: NDArray[Any]
    """Median colour (3,)."""


def detect(frames: NDArray[np.uint8]) -> Detection:
    """Detect what a clip shows.

    Something must be visible in more than half of the frames. To be moving, it must end
    more than an eighth of the shorter side from where it began.

    Args:
        frames: uint8 (T, H, W, 3).

    Raises:
        VideotuneError: if the array has another layout.
    """
    has_rgb_frames = frames.ndim == 4 and frames.shape[-1] == 3
    if not has_rgb_frames or frames.dtype != np.uint8:
        raise VideotuneError(
            f"detect reads uint8 frames (T, H, W, 3), not {frames.dtype} {frames.shape}"
        )

    blobs: list[Blob] = []
    for frame in frames:
        blob = find_blob(frame.astype(np.float32))
        if blob is not None:
            blobs.append(blob)
    if len(blobs) <= len(frames) // 2:
        return Detection(
            colour=None,
            shape=None,
            direction=None,
            visible_frames=len(blobs),
            iou=0.0,
        )

    overlap_by_shape: dict[str, float] = {}
    for shape in CANDIDATES:
        overlaps = [_overlap(blob, shape) for blob in blobs[::3]]
        overlap_by_shape[shape] = float(np.mean(overlaps))
    best_shape = max(overlap_by_shape, key=lambda shape: overlap_by_shape[shape])

    colours = [blob.colour for blob in blobs]
    median_colour = np.median(colours, axis=0)
    shorter_side = min(frames.shape[1:3])
    displacement = blobs[-1].centre - blobs[0].centre
    return Detection(
        colour=_nearest_colour(median_colour),
        shape=best_shape,
        direction=_direction(displacement, threshold=shorter_side / 8),
        visible_frames=len(blobs),
        iou=overlap_by_shape[best_shape],
    )


def _nearest_colour(colour: NDArray[Any]) -> str:
    def error(name: str) -> float:
        difference = np.array(PALETTE[name]) - colour
        return float(np.linalg.norm(difference))

    return min(PALETTE, key=error)


def find_blob(frame: NDArray[np.float32]) -> Blob | None:
    """Find what differs from the median colour of a frame, cut where it covers half a
    pixel.

    Args:
        frame: (H, W, 3), 0 to 255.
    """
    height, width = frame.shape[:2]
    background = np.median(frame.reshape(-1, 3), axis=0)
    difference = frame - background
    is_strong = np.abs(difference).max(axis=-1) > CONTRAST
    smallest_area = SMALLEST * height * width
    if is_strong.sum() < smallest_area:
        return None

    # Coverage of each pixel: its difference along that of the shape's colour.
    colour_difference = np.median(frame[is_strong], axis=0) - background
    squared_length = colour_difference @ colour_difference
    coverage = difference @ colour_difference / (squared_length + 1e-6)
    mask = coverage > 0.5
    # Without a common colour of the strong pixels the coverage means nothing.
    if mask.sum() < smallest_area:
        mask = is_strong

    columns, rows = pixel_grid(height, width)
    centre = np.array([columns[mask].mean(), rows[mask].mean()])
    colour = np.median(frame[mask], axis=0)
    return Blob(mask, centre, colour)


@cache
def _area_and_centre(shape: str) -> tuple[float, float, float]:
    """Return area and centre of mass (column, row) of a shape of radius 1 about the
    origin.
    """
    columns, rows = pixel_grid(256, 256)
    columns = columns / 64 - 2
    rows = rows / 64 - 2
    is_inside = distance(shape, columns, rows, 1.0) <= 0
    area = float(is_inside.sum()) / 64**2
    centre_x = float(columns[is_inside].mean())
    centre_y = float(rows[is_inside].mean())
    return area, centre_x, centre_y


def _overlap(blob: Blob, shape: str) -> float:
    """Return the IoU of a blob and the ideal shape of the same area and centre of mass."""
    area, centre_x, centre_y = _area_and_centre(shape)
    radius = float(np.sqrt(blob.mask.sum() / area))
    columns, rows = pixel_grid(*blob.mask.shape)
    x = columns - (blob.centre[0] - centre_x * radius)
    y = rows - (blob.centre[1] - centre_y * radius)
    ideal_mask = distance(shape, x, y, radius) <= 0
    intersection = (ideal_mask & blob.mask).sum()
    union = (ideal_mask | blob.mask).sum()
    return float(intersection / union)


def _direction(displacement: NDArray[Any], threshold: float) -> str | None:
    """Name the direction of a displacement (columns, rows); None up to the threshold."""
    x = float(displacement[0])
    y = float(displacement[1])
    if max(abs(x), abs(y)) <= threshold:
        return None
    if abs(x) > abs(y):
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up"
