"""Decoded frames as models read them."""

import numpy as np
import torch
from torch import Tensor

from videotune.memory.accelerator import has_streams


def to_model(frames: np.ndarray) -> Tensor:
    """Convert uint8 (T,H,W,3) to float32 (3,T,H,W) in [-1, 1]."""
    return pixels_to_model(torch.from_numpy(frames), torch.device("cpu"))


def pixels_to_model(frames: Tensor, device: torch.device) -> Tensor:
    """Convert uint8 (T,H,W,3) on the host to float32 (3,T,H,W) in [-1, 1].

    They are copied as bytes and converted on the device, if it has memory of its own.
    """
    if has_streams(device):
        frames = frames.to(device, non_blocking=True)
    # A card multiplies by a number's reciprocal, but divides by a tensor, as the CPU does.
    half_range = torch.full((), 127.5, device=frames.device)
    return frames.permute(3, 0, 1, 2).float().div_(half_range).sub_(1.0)
