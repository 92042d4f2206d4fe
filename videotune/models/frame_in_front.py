"""Noise of a frame that stands before a clip, where a network also denoises that frame."""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def scattered(noise: Tensor) -> Tensor:
    """Permute the noise (B,C,1,H,W) of a frame so that no value stays where it was.

    The pipeline begins with separate noise in the frame before a clip. Here it is the
    first frame's noise, permuted: practically independent, and without a draw, which
    only the host could do.
    """
    flat = noise.flatten(1)
    size = flat.shape[1]
    step = next(
        step for step in count(int(size / 1.618) | 1, 2) if math.gcd(step, size) == 1
    )
    # step is odd and size is even, so i·step + 1 = i has no solution.
    positions = (torch.arange(size, device=noise.device) * step + 1) % size
    return flat[:, positions].view_as(noise)
