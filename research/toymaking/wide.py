"""Clips that the toy's autoencoder should carry: any strong colour, six shapes, in 2 of
5 clips stripes.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.toy.shapes import DIRECTIONS, EXTRA_SHAPES, SHAPES, draw_clip


def striped(
    below: NDArray[Any], colours: tuple[Any, Any], period: float, side: int = 64
) -> NDArray[Any]:
    """A colour for each pixel (H, W, 3): the first, and every other half period (in
    pixels at 64) the second.
    """
    period = period * side / 64
    edge = (
        np.sin(2 * np.pi * below / period) * period / (2 * np.pi)
    )  # nearly the distance to the next edge
    share = np.clip(0.5 + edge / (1.5 * side / 64), 0, 1)[..., None]
    return np.array(colours[0]) * share + np.array(colours[1]) * (1 - share)


def draw_wide(
    rng: np.random.Generator, *, frames: int = 17, side: int = 64
) -> NDArray[np.uint8]:
    """One such clip (T, H, W, 3)."""
    shape = str(rng.choice(SHAPES + EXTRA_SHAPES))
    direction = str(rng.choice(list(DIRECTIONS)))
    colour = any_colour(rng)
    other = any_colour(rng)
    period = float(rng.uniform(8, 16))
    stripes = partial(striped, colours=(colour, other), period=period, side=side)
    return draw_clip(
        rng,
        stripes if rng.random() < 0.4 else colour,
        shape,
        direction,
        frames=frames,
        side=side,
    )


def any_colour(rng: np.random.Generator) -> tuple[float, float, float]:
    """A colour of 10 to 250 a channel, away from grey."""
    values = rng.uniform(20, 245, 3)
    red, green, blue = np.clip(values.mean() + 1.6 * (values - values.mean()), 10, 250)
    return float(red), float(green), float(blue)
