"""The frames of a clip that a model is shown."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from videotune.data.frame_sampling import sample_window
from videotune.data.media_info import MediaInfo
from videotune.data.workers import default_workers
from videotune.types import PLAIN, Window

LONGEST_SIDE = 768
"""Pixels of a frame's longer side: models resize to about as much, and requests stay small."""


def frames_of(info: MediaInfo, windows: Sequence[Window], count: int) -> NDArray[np.uint8]:
    """Up to ``count`` frames (T, H, W, 3), spread evenly over those that the clip's windows show in training, uncropped.

    ClipProblem where one cannot be decoded.
    """
    times = sorted({time for window in windows for time in sample_window(window, PLAIN, 0).times})
    chosen = [times[round(i)] for i in np.linspace(0, len(times) - 1, min(count, len(times)))]
    scale = min(1.0, LONGEST_SIDE / max(info.width, info.height))
    size = {"height": max(1, round(info.height * scale)), "width": max(1, round(info.width * scale))}
    frames: NDArray[np.uint8] = (
        default_workers().submit("decode", {"info": info, "times": chosen, "resize": "stretch", **size}).result()
    )
    return frames
