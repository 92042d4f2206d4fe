"""Videos put side by side into one, so that they play in step wherever they are shown, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Frames = list[np.ndarray]
    """uint8 pictures (H, W, 3)."""

GAP = 4
"""Black pixels between two videos."""


def read_video(path: Path, widest: int) -> tuple[Frames, Fraction]:
    """A video's frames, made smaller where they are wider than ``widest`` pixels, and frames a second.

    Raises OSError or ValueError (PyAV's errors are both) for a file that cannot be read, or holds no picture.
    """
    import av

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} holds no video")
        stream = container.streams.video[0]
        wide, high = stream.width, stream.height
        shrink = min(1.0, widest / max(1, wide))
        width, height = (max(2, round(side * shrink / 2) * 2) for side in (wide, high))
        frames = [
            frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
            for frame in container.decode(stream)
        ]
        rate = stream.average_rate
    if not frames or not rate:
        raise ValueError(f"{path} holds no picture")
    return frames, Fraction(rate)


def side_by_side(videos: Sequence[Sequence[np.ndarray]], columns: int | None = None) -> Frames:
    """Videos of one size in rows of so many (None: all in one row), in step; a shorter one keeps its last frame.

    Raises ValueError for videos of different sizes.
    """
    import numpy as np

    if len({video[0].shape for video in videos}) != 1:
        raise ValueError("videos of different sizes cannot stand side by side")
    columns = columns or len(videos)
    height, width, _ = videos[0][0].shape
    rows = -(-len(videos) // columns)
    size = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3)
    out = [np.zeros(size, np.uint8) for _ in range(max(len(video) for video in videos))]
    for place, video in enumerate(videos):
        top, left = place // columns * (height + GAP), place % columns * (width + GAP)
        for index, picture in enumerate(out):
            picture[top : top + height, left : left + width] = video[min(index, len(video) - 1)]
    return out
