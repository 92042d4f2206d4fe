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
    frames_with_channel = mask[:, None]
    pooled = torch.nn.functional.avg_pool2d(frames_with_channel, rules.spatial_stride)
    cells_per_frame = pooled[:, 0]

    shares = []
    for frames in _pixel_frames(len(mask), rules):
        shares.append(cells_per_frame[frames].mean(0))
    return torch.stack(shares)


def cells_without(mask: Tensor, rules: VideoRules) -> Tensor:
    """Return which latent cells a mask covers no pixel of, (F,H,W) bool.

    Args:
        mask: (T,H,W) float32, 0 where it covers nothing.
        rules: strides of the latent grid.
    """
    frames_with_channel = mask[:, None]
    pooled = torch.nn.functional.max_pool2d(frames_with_channel, rules.spatial_stride)
    cells_per_frame = pooled[:, 0]

    largest_values = []
    for frames in _pixel_frames(len(mask), rules):
        largest_values.append(cells_per_frame[frames].amax(0))
    return torch.stack(largest_values) == 0


def _pixel_frames(count: int, rules: VideoRules) -> Iterator[slice]:
    """Yield the pixel frames of each latent frame."""
    stride = rules.temporal_stride
    further_frames = (count - 1) // stride
    yield slice(0, 1)
    for frame in range(1, further_frames + 1):
        end = frame * stride + 1
        yield slice(end - stride, end)
