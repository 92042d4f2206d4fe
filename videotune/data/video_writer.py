"""Frames -> a video file, and back; videos side by side; frames on a sheet.

The same frames give the same bytes, so that two files that differ show two different videos.
"""

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.files import write_bytes, write_whole
from videotune.lazy import av

GAP = 4
"""Black pixels between two videos that stand side by side."""

SAME_BITS = "cpu-independent=1"
"""Of x264's parameters, for the same file each time: as it comes, its AVX-512 code makes other bits from call to call."""


def write_video(
    path: Path, frames: Sequence[NDArray[Any]] | NDArray[Any], fps: float, **how: Any
) -> None:
    """Write uint8 frames (T,H,W,3) in the container that ``path`` names, whole or not at all; ``how``: ``video_bytes``'."""
    write_bytes(path, video_bytes(frames, fps, kind=path.suffix[1:], **how), durable=False)


def video_bytes(
    frames: Sequence[NDArray[Any]] | NDArray[Any],
    fps: float | Fraction,
    crf: int = 16,
    kind: str = "mp4",
    codec: str = "libx264",
    options: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Frames uint8 (T,H,W,3) as a file of this ``kind`` of container; a higher ``crf`` is smaller and coarser.

    Odd sides lose a pixel. H.264 plays in every browser. Frames a second are exact up to a denominator of 1001. One
    thread encodes, for another number of them makes other bits.
    """
    height, width = (side // 2 * 2 for side in frames[0].shape[:2])
    encoder_options = {"crf": str(crf), **options}
    if codec == "libx264":
        encoder_options["x264-params"] = SAME_BITS
    container_options = {"fflags": "+bitexact"}  # no random ids, no dates
    if kind == "mp4":
        container_options["movie_timescale"] = (
            "48000"  # else the length is rounded to milliseconds
        )
    file = io.BytesIO()
    with av.open(file, "w", format=kind, container_options=container_options) as container:
        stream: Any = container.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=encoder_options
        )
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for frame in frames:
            whole = np.ascontiguousarray(frame[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(whole, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def read_video(path: Path, widest: int) -> tuple[list[NDArray[Any]], Fraction]:
    """A video's frames, made smaller where they are wider than ``widest`` pixels, and frames a second.

    Raises OSError or ValueError (PyAV's errors are both) for a file that cannot be read, or holds no picture.
    """
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} holds no video")
        stream = container.streams.video[0]
        shrink = min(1.0, widest / max(1, stream.width))
        width, height = (
            max(2, round(side * shrink / 2) * 2) for side in (stream.width, stream.height)
        )
        small = (
            frame.reformat(width=width, height=height, format="rgb24")
            for frame in container.decode(stream)
        )
        frames = [frame.to_ndarray() for frame in small]
        rate = stream.average_rate
    if not frames or not rate:
        raise ValueError(f"{path} holds no picture")
    return frames, Fraction(rate)


def side_by_side(
    videos: Sequence[Sequence[NDArray[Any]]], columns: int | None = None
) -> list[NDArray[Any]]:
    """Videos of one size in rows of so many (None: all in one row), in step; a shorter one keeps its last frame.

    Raises ValueError for videos of different sizes.
    """
    if len({video[0].shape for video in videos}) != 1:
        raise ValueError("videos of different sizes cannot stand side by side")
    columns = columns or len(videos)
    height, width, _ = videos[0][0].shape
    size = (-(-len(videos) // columns) * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3)
    out = [np.zeros(size, np.uint8) for _ in range(max(len(video) for video in videos))]
    for place, video in enumerate(videos):
        top = place // columns * (height + GAP)
        left = place % columns * (width + GAP)
        for index, picture in enumerate(out):
            picture[top : top + height, left : left + width] = video[min(index, len(video) - 1)]
    return out


def write_sheet(
    path: Path, rows: Sequence[tuple[str, Sequence[NDArray[Any]]]], label: int
) -> None:
    """A picture, PNG or JPEG by its suffix, with a row for each text and its frames uint8 (H, W, 3), all of one height.

    ``label``: the pixels that texts have on the left.
    """
    from PIL import Image, ImageDraw, ImageFont  # light to start

    high = rows[0][1][0].shape[0] + GAP
    wide = label + max(sum(frame.shape[1] + GAP for frame in frames) for _, frames in rows)
    sheet = Image.new("RGB", (wide, len(rows) * high + GAP), "#1c1e21")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for row, (text, frames) in enumerate(rows):
        top = GAP + row * high
        left = label
        pen.multiline_text((GAP, top), text, fill="#e8e8e4", font=font)
        for frame in frames:
            sheet.paste(Image.fromarray(frame), (left, top))
            left += frame.shape[1] + GAP
    form = "PNG" if path.suffix == ".png" else "JPEG"
    write_whole(path, lambda aside: sheet.save(aside, format=form, quality=90), durable=False)
