"""Draw one coloured shape that moves across a flat dark background: the toy base
model's world.

Sizes, speeds and backgrounds follow the distributions on which that model was trained;
others are unknown to it. Its autoencoder was trained on more
(``research/toymaking/wide.py``), so that it can decode concepts that the transformer
has never seen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError

FPS = 16.0
"""Frame rate at which a clip of 17 frames shows one second: the whole travel of its
shape.
"""

Rgb = tuple[float, float, float]

Paint = Callable[[NDArray[Any]], NDArray[Any]]
"""Colours a shape: each pixel's rows below the centre (H, W) -> colours (H, W, 3), 0 to
255.
"""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 235),
    "yellow": (240, 225, 40),
    "purple": (170, 60, 210),
    "white": (240, 240, 240),
}
"""Colours that the base model was taught."""

PALETTE = COLOURS | {"orange": (245, 140, 30)}
"""All colours that have a name; those beyond ``COLOURS`` are for new concepts."""

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


def _combinations() -> tuple[Look, ...]:
    looks: list[Look] = []
    for colour in COLOURS:
        for shape in SHAPES:
            looks += [(colour, shape, direction) for direction in DIRECTIONS]
    return tuple(looks)


def _third(look: Look) -> int:
    """Return to which of three balanced thirds a combination belongs.

    Each third has 24 combinations: every colour 4, shape 8 and direction 6 times.
    """
    colour, shape, direction = look
    colour_index = list(COLOURS).index(colour)
    direction_index = list(DIRECTIONS).index(direction)
    return (colour_index + 2 * SHAPES.index(shape) + direction_index) % 3


COMBINATIONS = _combinations()

HELD_OUT: tuple[Look, ...] = tuple(look for look in COMBINATIONS if _third(look) == 0)
"""Combinations that the base model has never seen."""

KNOWN: tuple[Look, ...] = tuple(
    sorted((look for look in COMBINATIONS if _third(look)), key=_third)
)
"""Combinations that the base model was taught: two balanced halves of 24."""


def phrase(thing: str, direction: str, template: int = 0) -> str:
    """Return the caption of a moving ``thing`` ("red circle", a trigger word)."""
    return TEMPLATES[template].format(thing=thing, way=direction)


def caption(colour: str, shape: str, direction: str, template: int = 0) -> str:
    """Return a caption as the base model knows it: "a red circle moves left"."""
    return phrase(f"{colour} {shape}", direction, template)


def distance(
    shape: str, x: NDArray[Any], y: NDArray[Any], radius: float
) -> NDArray[Any]:
    """Return the distance of points from the outline of a shape; negative inside.

    Args:
        shape: name of the shape, which is centred on the origin.
        x: columns of the points.
        y: rows of the points (downwards).
        radius: size of the shape, in the unit of the points.

    Raises:
        VideotuneError: if the shape is unknown.
    """
    abs_x = np.abs(x)
    abs_y = np.abs(y)
    match shape:
        case "circle":
            return np.hypot(x, y) - radius
        case "square":
            return np.maximum(abs_x, abs_y) - 0.88 * radius
        case "triangle":
            slanted_sides = 0.866 * abs_x - 0.5 * y - 0.6 * radius
            base = y - 0.75 * radius
            return np.maximum(slanted_sides, base)
        case "diamond":
            return (abs_x + abs_y) * np.sqrt(0.5) - 0.8 * radius
        case "ring":
            return np.abs(np.hypot(x, y) - 0.75 * radius) - 0.28 * radius
        case "cross":
            upright_bar = np.maximum(abs_x - 0.35 * radius, abs_y - radius)
            flat_bar = np.maximum(abs_y - 0.35 * radius, abs_x - radius)
            return np.minimum(upright_bar, flat_bar)

    shapes = ", ".join(SHAPES + EXTRA_SHAPES)
    raise VideotuneError(f"shape {shape!r} is unknown; choose one of {shapes}")


def pixel_grid(height: int, width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return columns and rows of the pixels' centres, (height, width) each."""
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
    """Draw a clip of a shape that crosses the picture at a steady speed.

    The radius is 0.17 to 0.22 of the side, the travel 0.36 to 0.46 of it per second,
    the background grey 28 to 60; at a side of 64 the outline is soft over 1.5 pixels.
    The draws do not depend on ``frames``, ``side`` or ``fps``: the same generator gives
    the same scene, longer, larger or at another rate.

    Args:
        rng: source of the draws.
        colour: a name, RGB values, or a function of the rows below the centre.
        shape: name of the shape.
        direction: name of the direction.
        frames: number of frames.
        side: height and width in pixels.
        fps: frame rate.

    Returns:
        uint8 (T, H, W, 3).

    Raises:
        VideotuneError: if a name is unknown.
    """
    if isinstance(colour, str) and colour not in PALETTE:
        raise VideotuneError(
            f"colour {colour!r} is not known; choose one of {', '.join(PALETTE)}"
        )
    if direction not in DIRECTIONS:
        raise VideotuneError(
            f"direction {direction!r} is not known; choose one of {', '.join(DIRECTIONS)}"
        )

    radius = rng.uniform(0.17, 0.22) * side
    travel = rng.uniform(0.36, 0.46) * side
    offset_across = rng.uniform(-0.2, 0.2) * side
    offset_along = rng.uniform(-0.06, 0.06) * side
    background = rng.uniform(28, 60)

    # The shape has travelled half its way after half a second.
    step_x, step_y = DIRECTIONS[direction]
    seconds = np.arange(frames) / fps - 0.5
    offset_x = offset_along if step_x else offset_across
    offset_y = offset_along if step_y else offset_across
    centre_x = side / 2 + step_x * travel * seconds + offset_x
    centre_y = side / 2 + step_y * travel * seconds + offset_y

    columns, rows = pixel_grid(side, side)
    soft_edge = 1.5 * side / 64
    paint = PALETTE[colour] if isinstance(colour, str) else colour
    clip = np.empty((frames, side, side, 3), np.uint8)
    for index in range(frames):
        rows_below = rows - centre_y[index]
        outline_distance = distance(
            shape, columns - centre_x[index], rows_below, radius
        )
        coverage = np.clip(0.5 - outline_distance / soft_edge, 0, 1)[..., None]
        colours = paint(rows_below) if callable(paint) else np.array(paint)
        clip[index] = np.round(background * (1 - coverage) + colours * coverage)
    return clip
