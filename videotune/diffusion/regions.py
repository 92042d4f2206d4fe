"""Regions of the picture on the latent grid: which cells a mask covers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from videotune.model_spec import VideoRules


def cell_shares(mask: Tensor, rules: VideoRules) -> Tensor:
    """Return the share of each latent cell that a mask covers, (F,H,W) float32.

    The first latent frame holds the first pixel frame, each further one holds
    ``rules.temporal_stride`` pixel frames.

    Args:
        mask: (T,H,W) float32 in [0, 1] in pixels.
        rules: strides of the latent grid.
    """
    stride = rules.spatial_stride
    cells_per_frame = torch.nn.functional.avg_pool2d(mask[:, None], stride)[:, 0]
    shares = [
        cells_per_frame[frames].mean(0) for frames in _pixel_frames(len(mask), rules)
    ]
    return torch.stack(shares)


def cells_without(mask: Tensor, rules: VideoRules) -> Tensor:
    """Return which latent cells a mask covers no pixel of, (F,H,W) bool.

    Args:
        mask: (T,H,W) float32, 0 where it covers nothing.
        rules: strides of the latent grid.
    """
    stride = rules.spatial_stride
    cells_per_frame = torch.nn.functional.max_pool2d(mask[:, None], stride)[:, 0]
    most = [
        cells_per_frame[frames].amax(0) for frames in _pixel_frames(len(mask), rules)
    ]
    return torch.stack(most) == 0


def _pixel_frames(count: int, rules: VideoRules) -> Iterator[slice]:
    """Yield the pixel frames of each latent frame."""
    latent_frames = (count - 1) // rules.temporal_stride + 1
    yield slice(0, 1)
    for frame in range(1, latent_frames):
        end = frame * rules.temporal_stride + 1
        yield slice(end - rules.temporal_stride, end)
