"""Draws one coloured shape that moves across a flat dark background: the world that the toy base model knows.

Sizes, speeds and backgrounds follow the distributions which that model was trained on; other ones are foreign to it. Its
autoencoder was trained on more (``research/toymaking/wide.py``), so that it decodes concepts that the transformer never saw.

And what a clip of that world shows (``detect``): colour, shape and direction of the one thing that moves in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError

FPS = 16.0
"""The rate at which a clip of 17 frames shows one second: the whole travel of its shape."""

Rgb = tuple[float, float, float]
Paint = Callable[[NDArray[Any]], NDArray[Any]]
"""From each pixel's rows below the shape's centre (H, W) to its colour (H, W, 3), 0 to 255."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 235), "yellow": (240, 225, 40),
    "purple": (170, 60, 210), "white": (240, 240, 240),
}  # fmt: skip
PALETTE = COLOURS | {"orange": (245, 140, 30)}
"""Every colour that has a name; the base model was taught ``COLOURS`` alone, another one is for a new concept."""

SHAPES = ("circle", "square", "triangle")
EXTRA_SHAPES = ("diamond", "ring", "cross")

DIRECTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
"""Signs of the motion in columns and rows (rows count downwards)."""

TEMPLATES = (
    "a {thing} moves {way}",
    "a {thing} moving {way}",
    "{thing} going {way}",
    "the {thing} moves {way}",
)

Look = tuple[str, str, str]
"""(colour, shape, direction)."""

COMBINATIONS: tuple[Look, ...] = tuple(
    (c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS
)


def _third(look: Look) -> int:
    """Which of three balanced thirds a combination belongs to: 24 each, every colour 4, shape 8, direction 6 times."""
    colour, shape, direction = look
    return (
        list(COLOURS).index(colour)
        + 2 * SHAPES.index(shape)
        + list(DIRECTIONS).index(direction)
    ) % 3


HELD_OUT: tuple[Look, ...] = tuple(look for look in COMBINATIONS if _third(look) == 0)
"""The combinations that the base model never saw."""

KNOWN: tuple[Look, ...] = tuple(
    sorted((look for look in COMBINATIONS if _third(look)), key=_third)
)
"""The combinations that it was taught; the first 24 are balanced by themselves, and so are the other 24."""


def phrase(thing: str, direction: str, template: int = 0) -> str:
    """The caption of a ``thing`` ("red circle", a trigger word) that moves, in one of the four templates."""
    return TEMPLATES[template].format(thing=thing, way=direction)


def caption(colour: str, shape: str, direction: str, template: int = 0) -> str:
    """'a red circle moves left', as the base model's own captions say it."""
    return phrase(f"{colour} {shape}", direction, template)


def distance(shape: str, x: NDArray[Any], y: NDArray[Any], radius: float) -> NDArray[Any]:
    """How far points lie outside the outline of a shape about the origin (negative: inside), in the unit of ``radius``.

    Raises VideotuneError for a shape that is not known.
    """
    wide = np.abs(x)
    high = np.abs(y)
    match shape:
        case "circle":
            return np.hypot(x, y) - radius
        case "square":
            return np.maximum(wide, high) - 0.88 * radius
        case "triangle":  # the two slanted sides, then the base
            return np.maximum(0.866 * wide - 0.5 * y - 0.6 * radius, y - 0.75 * radius)
        case "diamond":
            return (wide + high) * np.sqrt(0.5) - 0.8 * radius
        case "ring":
            return np.abs(np.hypot(x, y) - 0.75 * radius) - 0.28 * radius
        case "cross":
            upright = np.maximum(wide - 0.35 * radius, high - radius)
            return np.minimum(upright, np.maximum(high - 0.35 * radius, wide - radius))
    raise VideotuneError(
        f"shape {shape!r} is unknown; there are {', '.join(SHAPES + EXTRA_SHAPES)}"
    )


def pixel_grid(height: int, width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Columns and rows (height, width) of the pixels' centres."""
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    return columns, rows


def draw_clip(
    rng: np.random.Generator,
    colour: str | Rgb | Paint,
    shape: str,
    direction: str,
    *,
    frames: int = 17,
    side: int = 64,
    fps: float = FPS,
) -> NDArray[np.uint8]:
    """One clip (T, H, W, 3) of a shape that crosses the picture at a steady speed.

    Radius .17-.22 and travel .36-.46 of the side per second, background grey 28-60, outline soft over 1.5 pixels at
    64 pixels. The draws do not depend on ``frames``, ``side`` or ``fps``: the same generator gives the same scene, seen
    longer, larger or more often a second. Raises VideotuneError for a word that is not known.
    """
    if isinstance(colour, str) and colour not in PALETTE:
        raise VideotuneError(f"colour {colour!r} is not known; there are {', '.join(PALETTE)}")
    if direction not in DIRECTIONS:
        raise VideotuneError(
            f"direction {direction!r} is not known; there are {', '.join(DIRECTIONS)}"
        )
    radius = rng.uniform(0.17, 0.22) * side
    travel = rng.uniform(0.36, 0.46) * side
    across = rng.uniform(-0.2, 0.2) * side
    along = rng.uniform(-0.06, 0.06) * side
    background = rng.uniform(28, 60)

    step_x, step_y = DIRECTIONS[direction]
    seconds = np.arange(frames) / fps - 0.5  # the shape is in mid-travel half a second in
    centre_x = side / 2 + step_x * travel * seconds + (along if step_x else across)
    centre_y = side / 2 + step_y * travel * seconds + (along if step_y else across)

    columns, rows = pixel_grid(side, side)
    soft = 1.5 * side / 64
    paint = PALETTE[colour] if isinstance(colour, str) else colour
    clip = np.empty((frames, side, side, 3), np.uint8)
    for index in range(frames):
        below = rows - centre_y[index]
        outside = distance(shape, columns - centre_x[index], below, radius)
        cover = np.clip(0.5 - outside / soft, 0, 1)[..., None]
        painted = paint(below) if callable(paint) else np.array(paint)
        clip[index] = np.round(background * (1 - cover) + painted * cover)
    return clip


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
        raise VideotuneError(
            f"detect reads uint8 frames (T, H, W, 3), not {frames.dtype} {frames.shape}"
        )
    blobs = [
        blob for frame in frames if (blob := find_blob(frame.astype(np.float32))) is not None
    ]
    if len(blobs) <= len(frames) // 2:
        return Seen(None, None, None, len(blobs), 0.0)
    colour = np.median([blob.colour for blob in blobs], axis=0)
    nearest = min(
        PALETTE, key=lambda name: float(np.linalg.norm(np.array(PALETTE[name]) - colour))
    )
    overlaps = {
        shape: float(np.mean([_overlap(blob, shape) for blob in blobs[::3]]))
        for shape in CANDIDATES
    }
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
    return (
        float(inside.sum()) / 64**2,
        float(columns[inside].mean()),
        float(rows[inside].mean()),
    )


def _overlap(blob: Blob, shape: str) -> float:
    """Intersection over union of a blob and the ideal shape of the same area and centre of mass."""
    area, off_x, off_y = _ideal(shape)
    radius = float(np.sqrt(blob.mask.sum() / area))
    columns, rows = pixel_grid(*blob.mask.shape)
    x = columns - (blob.centre[0] - off_x * radius)
    y = rows - (blob.centre[1] - off_y * radius)
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
