"""Draws one coloured shape that moves across a flat dark background: the world that the toy base model knows.

Sizes, speeds and backgrounds follow the distributions which that model was trained on; other ones are foreign to it. Its
autoencoder was trained on more (``scripts/toymaking/wide.py``), so that it decodes concepts which the transformer never saw.
"""

from collections.abc import Callable
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
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 235),
    "yellow": (240, 225, 40),
    "purple": (170, 60, 210),
    "white": (240, 240, 240),
}
EXTRA_COLOURS: dict[str, tuple[int, int, int]] = {"orange": (245, 140, 30)}
PALETTE = COLOURS | EXTRA_COLOURS
"""Every colour that has a name; the base model was taught ``COLOURS`` alone, an extra one is for a new concept."""

SHAPES = ("circle", "square", "triangle")
EXTRA_SHAPES = ("diamond", "ring", "cross")

DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Signs of the motion in columns and rows (rows count downwards)."""

TEMPLATES = ("a {thing} moves {way}", "a {thing} moving {way}", "{thing} going {way}", "the {thing} moves {way}")

Look = tuple[str, str, str]
"""(colour, shape, direction)."""

COMBINATIONS: tuple[Look, ...] = tuple((c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS)


def _third(look: Look) -> int:
    """Which of three balanced thirds a combination belongs to: 24 each, every colour 4, shape 8, direction 6 times."""
    colour, shape, direction = look
    return (list(COLOURS).index(colour) + 2 * SHAPES.index(shape) + list(DIRECTIONS).index(direction)) % 3


HELD_OUT: tuple[Look, ...] = tuple(look for look in COMBINATIONS if _third(look) == 0)
"""The combinations that the base model never saw."""

KNOWN: tuple[Look, ...] = tuple(sorted((look for look in COMBINATIONS if _third(look)), key=_third))
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
    wide, high = np.abs(x), np.abs(y)
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
    raise VideotuneError(f"shape {shape!r} is unknown; there are {', '.join(SHAPES + EXTRA_SHAPES)}")


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
        raise VideotuneError(f"direction {direction!r} is not known; there are {', '.join(DIRECTIONS)}")
    radius, travel = rng.uniform(0.17, 0.22) * side, rng.uniform(0.36, 0.46) * side
    across, along = rng.uniform(-0.2, 0.2) * side, rng.uniform(-0.06, 0.06) * side
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
