"""Regions of the picture on the latent grid: which cells a mask covers."""

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

    latent_frames = (len(mask) - 1) // rules.temporal_stride + 1
    shares = [cells_per_frame[0]]
    for frame in range(1, latent_frames):
        end = frame * rules.temporal_stride + 1
        begin = end - rules.temporal_stride
        shares.append(cells_per_frame[begin:end].mean(0))
    return torch.stack(shares)
