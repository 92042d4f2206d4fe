"""How a clip of any content moves, flickers and how coloured it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

SIDE = 64
"""Rows and columns of the picture that is measured, so that clips of different sizes compare."""

BLOCK = 8
DARK = 8 / 255
"""Blocks darker than this say nothing of a gain."""


@dataclass(frozen=True)
class Measures:
    """``energy``: mean change of a pixel from frame to frame once the frame's gain is taken out, in shares of full light.

    ``flicker``: how much the light of the whole picture goes up and down: ±5 % from frame to frame are 0.05, a steady fade
    is 0. ``saturation``: mean distance of the strongest colour of a pixel from its weakest, 0 (grey) to 1. The first is
    None for fewer than two frames, the second for fewer than three.
    """

    energy: float | None
    flicker: float | None
    saturation: float


def measures(frames: NDArray[Any]) -> Measures:
    """Measure frames uint8 (T, H, W, 3).

    The gain between two frames is the median over blocks of 8 × 8 of the ratio of their light: what moves through the
    picture makes some blocks lighter and others darker, a lamp all of them.
    """
    pictures = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255
    small = functional.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    grey = (small * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    saturation = float((small.amax(1) - small.amin(1)).mean())
    gains = _gains(functional.avg_pool2d(grey[:, None], BLOCK)[:, 0])
    if len(grey) < 2:
        return Measures(None, None, saturation)
    level = grey[1:] * torch.exp(-gains)[:, None, None]
    energy = float((level - grey[:-1]).abs().mean())
    return Measures(energy, float(gains.diff().abs().mean()) / 4 if len(grey) > 2 else None, saturation)


def _gains(blocks: Tensor) -> Tensor:
    """Light of blocks (T, h, w) -> logarithm of the gain from each frame to the next (T - 1,); 0 where all is dark."""
    found = []
    for before, after in pairwise(blocks):
        lit = (before > DARK) & (after > DARK)
        ratios = torch.log(after[lit] / before[lit])
        found.append(torch.quantile(ratios, 0.5) if lit.any() else torch.zeros(()))
    return torch.stack(found) if found else torch.zeros(0)


def mean_measures(several: Sequence[Measures]) -> dict[str, float | None]:
    """Mean energy, flicker and saturation of several clips; None where none of them has it."""
    out: dict[str, float | None] = {}
    for name in ("energy", "flicker", "saturation"):
        values = [value for one in several if (value := getattr(one, name)) is not None]
        out[name] = round(sum(values) / len(values), 6) if values else None
    return out
