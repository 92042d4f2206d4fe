"""Says what a clip of the toy world shows: colour, shape and direction of the one thing that moves in it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.shapes import PALETTE, SHAPES, distance, pixel_grid

CANDIDATES = (*SHAPES, "diamond")
CONTRAST = 50
"""Grey levels by which a pixel must stand out from the background to belong to the shape."""
SMALLEST = 40 / 64**2
"""Share of the picture below which nothing counts as visible (the shapes drawn cover 4 % and more)."""


@dataclass(frozen=True)
class Seen:
    """What a clip shows; None where that cannot be said.

    ``visible_frames`` counts the frames in which something stands out; ``iou`` is the mean overlap (intersection over
    union, 0 to 1) of its outline with that of the shape named, 0 where none is.
    """

    colour: str | None
    shape: str | None
    direction: str | None
    visible_frames: int
    iou: float


@dataclass(frozen=True)
class Blob:
    """The thing in one frame: its mask (H, W), centre of mass (column, row) and median colour (3,)."""

    mask: NDArray[np.bool_]
    centre: NDArray[Any]
    colour: NDArray[Any]


def detect(frames: NDArray[np.uint8]) -> Seen:
    """Read frames uint8 (T, H, W, 3): nearest colour of the palette, shape of best overlap, net displacement.

    Something must be visible in more than half of the frames; to be moving, it must end more than an eighth of the
    shorter side from where it began. Raises VideotuneError for another layout.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise VideotuneError(f"detect reads uint8 frames (T, H, W, 3), not {frames.dtype} {frames.shape}")
    blobs = [blob for frame in frames if (blob := find_blob(frame.astype(np.float32))) is not None]
    if len(blobs) <= len(frames) // 2:
        return Seen(None, None, None, len(blobs), 0.0)
    colour = np.median([blob.colour for blob in blobs], axis=0)
    nearest = min(PALETTE, key=lambda name: float(np.linalg.norm(np.array(PALETTE[name]) - colour)))
    overlaps = {shape: float(np.mean([_overlap(blob, shape) for blob in blobs[::3]])) for shape in CANDIDATES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    direction = _direction(blobs[-1].centre - blobs[0].centre, min(frames.shape[1:3]) / 8)
    return Seen(nearest, best, direction, len(blobs), overlaps[best])


def find_blob(frame: NDArray[np.float32]) -> Blob | None:
    """What stands out from the median colour of a frame (H, W, 3), cut where it covers half a pixel."""
    height, width = frame.shape[:2]
    background = np.median(frame.reshape(-1, 3), axis=0)
    off = frame - background
    strong = np.abs(off).max(axis=-1) > CONTRAST
    if strong.sum() < SMALLEST * height * width:
        return None
    towards = np.median(frame[strong], axis=0) - background
    cover = off @ towards / (towards @ towards + 1e-6)
    mask = cover > 0.5
    if mask.sum() < SMALLEST * height * width:  # the strong pixels have no common colour
        mask = strong
    columns, rows = pixel_grid(height, width)
    centre = np.array([columns[mask].mean(), rows[mask].mean()])
    return Blob(mask, centre, np.median(frame[mask], axis=0))


@cache
def _ideal(shape: str) -> tuple[float, float, float]:
    """Area and centre of mass (column, row) of a shape of radius 1 about the origin."""
    columns, rows = (axis / 64 - 2 for axis in pixel_grid(256, 256))
    inside = distance(shape, columns, rows, 1.0) <= 0
    return float(inside.sum()) / 64**2, float(columns[inside].mean()), float(rows[inside].mean())


def _overlap(blob: Blob, shape: str) -> float:
    """Intersection over union of a blob and the ideal shape of the same area and centre of mass."""
    area, off_x, off_y = _ideal(shape)
    radius = float(np.sqrt(blob.mask.sum() / area))
    columns, rows = pixel_grid(*blob.mask.shape)
    x, y = columns - (blob.centre[0] - off_x * radius), rows - (blob.centre[1] - off_y * radius)
    ideal = distance(shape, x, y, radius) <= 0
    return float((ideal & blob.mask).sum() / (ideal | blob.mask).sum())


def _direction(moved: NDArray[Any], threshold: float) -> str | None:
    """The word for a displacement (columns, rows) in pixels, None up to the threshold."""
    x, y = (float(value) for value in moved)
    if max(abs(x), abs(y)) <= threshold:
        return None
    if abs(x) > abs(y):
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up"
