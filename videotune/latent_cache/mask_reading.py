"""Masks as numbers: their files decoded, and their share of each latent cell."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from videotune.data.media_info import MediaInfo
from videotune.diffusion.regions import cell_shares
from videotune.latent_cache.conditions import companion_sample
from videotune.latent_cache.decode_ahead import frames_of
from videotune.model_spec import VideoRules
from videotune.types import FrameSample

MASK_TENSOR = "share"
"""Name of the tensor of a mask's entry: the share of each cell that it covers."""

MASK_BLACK = 16
MASK_WHITE = 239
"""Grey values of a mask up to which it is black, and from which on it is white."""


def read_loss_mask(
    sample: FrameSample, rules: VideoRules, media: Mapping[str, MediaInfo]
) -> Tensor:
    """Decode a sample's loss mask now, in this process: (F,H,W), the share of each cell.

    Raises VideotuneError that names the file.
    """
    mask = companion_sample(sample, "loss_mask", media)
    frames = frames_of([mask], media[mask.window.clip_id], None)
    return cell_shares(mask_pixels(frames), rules)


def mask_pixels(frames: np.ndarray) -> Tensor:
    """Convert the uint8 frames (T,H,W,3) of a mask to float32 (T,H,W) in [0, 1].

    Nearly black is 0 and nearly white is 1: compressed masks are never quite either.
    """
    grey = torch.from_numpy(frames).float().mean(-1)
    return ((grey - MASK_BLACK) / (MASK_WHITE - MASK_BLACK)).clamp_(0, 1)
