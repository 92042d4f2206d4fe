"""Masks as numbers: their files decoded, and their share of each latent cell."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from videotune.data.media_info import MediaInfo
from videotune.diffusion.regions import cell_shares
from videotune.latent_cache.conditions import (
    SeparateCondition,
    companion_sample,
    drawn_box,
)
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


def read_hidden_pixels(
    condition: SeparateCondition,
    sample: FrameSample,
    seed: int,
    media: Mapping[str, MediaInfo],
) -> Tensor:
    """Return what a mask hides of a sample, by a drawn box or the clip's mask file:
    (T or 1,H,W), above 0 where pixels are hidden. Zeros for other conditions.

    Raises VideotuneError that names the file.
    """
    if condition.draws_box:
        box = drawn_box(seed, condition)
        return box.flip(-1) if sample.flipped else box
    if condition.hides:
        mask = companion_sample(sample, "mask", media)
        return mask_pixels(frames_of([mask], media[mask.window.clip_id], None))
    shape = sample.window.shape
    return torch.zeros(1, shape.height, shape.width)


def mask_pixels(frames: np.ndarray) -> Tensor:
    """Convert the uint8 frames (T,H,W,3) of a mask to float32 (T,H,W) in [0, 1].

    Nearly black is 0 and nearly white is 1: compressed masks are never quite either.
    """
    grey = torch.from_numpy(frames).float().mean(-1)
    return ((grey - MASK_BLACK) / (MASK_WHITE - MASK_BLACK)).clamp_(0, 1)
