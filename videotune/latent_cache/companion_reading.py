"""Decode the files that stand beside a clip: a start image, a control video, a reference."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from videotune.data.decode import whole_picture
from videotune.data.media_info import MediaInfo
from videotune.latent_cache.clip_ends import REFERENCE
from videotune.latent_cache.conditions import companion_sample
from videotune.latent_cache.decode_ahead import frames_of
from videotune.latent_cache.pixels import to_model
from videotune.types import FrameSample


def read_companion(
    role: str, sample: FrameSample, count: int, media: Mapping[str, MediaInfo]
) -> Tensor:
    """Decode the first frames of a file beside a sample: (3,count,H,W) in [-1, 1]. Of an
    image all frames are the same.
    """
    companion = companion_sample(sample, role, media)
    part = replace(companion, times=companion.times[:count])
    info = media[part.window.clip_id]
    frames = to_model(frames_of([part], info, None))
    return frames.contiguous()


def read_reference_picture(
    sample: FrameSample, media: Mapping[str, MediaInfo]
) -> np.ndarray:
    """Decode a sample's reference in its own size, uint8 (H,W,3). If it is a video, decode
    the frame at which the sample begins.
    """
    companion = companion_sample(sample, REFERENCE, media)
    info = media[companion.window.clip_id]
    picture = whole_picture(info, companion.times[0])
    if not sample.flipped:
        return picture
    mirrored = picture[:, ::-1]
    return mirrored.copy()


def read_start_image(
    sample: FrameSample, media: Mapping[str, MediaInfo]
) -> Tensor | None:
    """Return the start image of a sample, cropped as its clip: (3,1,H,W) in [-1, 1]."""
    image_id = sample.window.companion("start_image")
    if image_id is None:
        return None
    window = replace(sample.window, clip_id=image_id)
    still = replace(sample, window=window, times=(0.0,))
    frames = frames_of([still], media[image_id], None)
    return to_model(frames)
