"""Says how a clip of the toy world moves: how much, and what changes in it that should
stay as it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.detection import Blob, find_blob
from videotune.toy.shapes import pixel_grid

MARGIN = 3
"""Pixels on either side of an outline that belong neither to the subject nor to the
background: outlines are soft.
"""


@dataclass(frozen=True)
class Motion:
    """How a clip moves; the first three are means over pixels and channels, in grey
    levels of 255.

    ``energy`` is |x_f - x_(f-1)| where the subject is in either of the two frames: 0
    for a still clip, and the more the faster it moves. The rest would be 0 if nothing
    but a steady motion were to be seen: ``flicker`` is the second difference in time
    |x_(f-1) - 2x_f + x_(f+1)| over the background that the subject never comes near,
    ``shimmer`` the same over what is within the subject in all three frames, ``jerk``
    the length of the second difference of the subject's centre, in pixels.
    """

    energy: float
    flicker: float
    shimmer: float
    jerk: float


def motion(frames: NDArray[Any]) -> Motion | None:
    """Measure frames (T, H, W, 3) in 0 to 255, integers or not; None where no subject
    can be followed through all of them.

    Raises VideotuneError for another layout, and for fewer than three frames.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) < 3:
        raise VideotuneError(
            f"motion reads three frames or more (T, H, W, 3), not {frames.shape}"
        )
    clip = frames.astype(np.float32)
    blobs = [found for frame in clip if (found := find_blob(frame)) is not None]
    if len(blobs) < len(clip):
        return None
    masks = np.stack([blob.mask for blob in blobs])
    either = masks[1:] | masks[:-1]
    background = ~grown(np.logical_or.reduce(masks))
    core = np.stack([~grown(~mask) for mask in masks])
    within = core[2:] & core[1:-1] & core[:-2]
    if not background.any() or not within.any():
        return None
    step = np.abs(np.diff(clip, axis=0)).mean(axis=-1)
    bend = np.abs(np.diff(clip, n=2, axis=0)).mean(axis=-1)
    centres = np.stack(
        [centre(frame, blob) for frame, blob in zip(clip, blobs, strict=True)]
    )
    return Motion(
        energy=float(step[either].mean()),
        flicker=float(bend[:, background].mean()),
        shimmer=float(bend[within].mean()),
        jerk=float(np.linalg.norm(np.diff(centres, n=2, axis=0), axis=-1).mean()),
    )


def centre(frame: NDArray[np.float32], blob: Blob) -> NDArray[Any]:
    """The subject's centre of mass (column, row) in a frame, half-covered pixels by
    their share, so finer than a pixel.
    """
    background = np.median(frame.reshape(-1, 3), axis=0)
    towards = blob.colour - background
    share = np.clip(
        (frame - background) @ towards / (towards @ towards + 1e-6), 0, 1
    ) * grown(blob.mask)
    columns, rows = pixel_grid(*share.shape)
    return np.array([(share * columns).sum(), (share * rows).sum()]) / share.sum()


def grown(mask: NDArray[np.bool_], by: int = MARGIN) -> NDArray[np.bool_]:
    """A mask (H, W) with every pixel that lies at most ``by`` rows and columns from it."""
    padded = np.pad(mask, by)
    size = 2 * by + 1
    out: NDArray[np.bool_] = np.lib.stride_tricks.sliding_window_view(
        padded, (size, size)
    ).max(axis=(-2, -1))
    return out
