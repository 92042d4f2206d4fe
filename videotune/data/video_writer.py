"""Write frames as a video file, with sound, and read them back; put videos side by side,
and frames on a sheet.

The same frames give the same bytes, so files that differ show different videos.
"""

import io
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.sound import resample
from videotune.data.sound_writer import SoundTrack, encodable_rate
from videotune.files import write_bytes, write_whole
from videotune.lazy import av

GAP = 4
"""Black pixels between two videos or frames."""

SAME_BITS = "cpu-independent=1"
"""x264 parameter that makes files reproducible: by default its AVX-512 code gives other
bits from call to call.
"""


def write_video(
    path: Path,
    frames: Sequence[NDArray[Any]] | NDArray[Any],
    fps: float,
    **options: Any,
) -> None:
    """Write uint8 frames (T, H, W, 3) as a video file, completely or not at all.

    Args:
        path: the file; its suffix chooses the container.
        frames: the frames.
        fps: frame rate.
        options: further arguments of ``video_bytes``.
    """
    content = video_bytes(frames, fps, kind=path.suffix[1:], **options)
    write_bytes(path, content, durable=False)


def video_bytes(
    frames: Sequence[NDArray[Any]] | NDArray[Any],
    fps: float | Fraction,
    crf: int = 16,
    kind: str = "mp4",
    codec: str = "libx264",
    options: Mapping[str, str] = MappingProxyType({}),
    sound: NDArray[np.float32] | None = None,
    sound_rate: int = 48000,
) -> bytes:
    """Encode uint8 frames (T, H, W, 3) as the bytes of a video file.

    Odd sides lose a pixel. H.264 plays in every browser. One thread encodes, since the
    bits depend on the number of threads.

    Args:
        frames: the frames.
        fps: frame rate, exact up to a denominator of 1001.
        crf: constant rate factor; higher is smaller and coarser.
        kind: container, such as "mp4" or "webm".
        codec: encoder by FFmpeg's name.
        options: further options of the encoder.
        sound: samples (2, n) in [-1, 1], the first of which is heard with the first
            frame; None writes no sound track.
        sound_rate: samples a second of the sound.
    """
    height = frames[0].shape[0] // 2 * 2
    width = frames[0].shape[1] // 2 * 2

    encoder_options = {"crf": str(crf), **options}
    if codec == "libx264":
        encoder_options["x264-params"] = SAME_BITS
    # No random ids and no dates.
    container_options = {"fflags": "+bitexact"}
    if kind == "mp4":
        # By default the duration is rounded to milliseconds.
        container_options["movie_timescale"] = "48000"

    file = io.BytesIO()
    with av.open(
        file, "w", format=kind, container_options=container_options
    ) as container:
        stream: Any = container.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=encoder_options
        )
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        track = None
        samples = np.zeros((2, 0), np.float32)
        if sound is not None:
            rate = encodable_rate(kind, sound_rate)
            samples = resample(sound, sound_rate, rate) if rate != sound_rate else sound
            track = SoundTrack(container, kind, rate)

        for number, frame in enumerate(frames, start=1):
            even_frame = np.ascontiguousarray(frame[:height, :width])
            picture = av.VideoFrame.from_ndarray(even_frame, format="rgb24")
            container.mux(stream.encode(picture))
            if track is not None:
                end = round(number / float(fps) * rate)
                track.write(samples[:, track.written : end])
        container.mux(stream.encode())
        if track is not None:
            track.write(samples[:, track.written :])
            track.finish()
    return file.getvalue()


def read_video(path: Path, widest: int) -> tuple[list[NDArray[Any]], Fraction]:
    """Read the frames of a video, reduced if they are wider than ``widest`` pixels.

    Returns:
        Frames uint8 (H, W, 3), and the frame rate.

    Raises:
        OSError, ValueError: if the file cannot be read or has no frames (PyAV's errors
            are both).
    """
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream")

        stream = container.streams.video[0]
        scale = min(1.0, widest / max(1, stream.width))
        width = max(2, round(stream.width * scale / 2) * 2)
        height = max(2, round(stream.height * scale / 2) * 2)
        frames = []
        for frame in container.decode(stream):
            resized = frame.reformat(width=width, height=height, format="rgb24")
            frames.append(resized.to_ndarray())
        rate = stream.average_rate

    if not frames or not rate:
        raise ValueError(f"{path} has no frames")
    return frames, Fraction(rate)


def side_by_side(
    videos: Sequence[Sequence[NDArray[Any]]], columns: int | None = None
) -> list[NDArray[Any]]:
    """Put videos of one size side by side, in step; a shorter one keeps its last frame.

    Args:
        videos: frames uint8 (H, W, 3) of each video.
        columns: videos per row; default is all in one row.

    Raises:
        ValueError: if the videos differ in size.
    """
    if len({video[0].shape for video in videos}) != 1:
        raise ValueError("videos of different sizes cannot be put side by side")

    columns = columns or len(videos)
    rows = -(-len(videos) // columns)
    height, width, _ = videos[0][0].shape
    sheet_shape = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3)
    length = max(len(video) for video in videos)
    sheets = [np.zeros(sheet_shape, np.uint8) for _ in range(length)]

    for position, video in enumerate(videos):
        top = position // columns * (height + GAP)
        left = position % columns * (width + GAP)
        for index, sheet in enumerate(sheets):
            frame = video[min(index, len(video) - 1)]
            sheet[top : top + height, left : left + width] = frame
    return sheets


FONT_SIZE = 13
"""Size of the letters of a sheet's texts, in pixels."""

LINE_HEIGHT = 17
"""Height of a line of such a text."""

CUT_MARK = "…"
"""The end of a text that is longer than there is room."""


def fitting_lines(text: str, width: int, most_lines: int) -> list[str]:
    """Return a text in lines that are no wider than some pixels.

    Args:
        text: the text; a line break in it stays one.
        width: in pixels, of a line.
        most_lines: lines, at most; the last one is a mark if there are more.
    """
    from PIL import ImageFont

    font = ImageFont.load_default(FONT_SIZE)
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for chunk in re.findall(r"\S+|\s+", paragraph):
            if font.getlength(line + chunk) <= width:
                line += chunk
                continue
            if line.strip():
                lines.append(line.rstrip())
            line = ""
            for letter in chunk.lstrip():  # a word may be wider than a line
                if font.getlength(line + letter) > width:
                    lines.append(line)
                    line = ""
                line += letter
        lines.append(line.rstrip())

    if len(lines) > most_lines:
        return [*lines[: most_lines - 1], CUT_MARK]
    return lines


def write_sheet(
    path: Path, rows: Sequence[tuple[str, Sequence[NDArray[Any]]]], label: int
) -> None:
    """Write a picture with a row of frames for each text.

    Args:
        path: the file, PNG or JPEG by its suffix.
        rows: text and frames uint8 (H, W, 3) of each row, all of one height.
        label: width in pixels of the texts on the left.
    """
    # Imported here, since commands that write no sheet should start fast.
    from PIL import Image, ImageDraw, ImageFont

    row_height = rows[0][1][0].shape[0] + GAP
    widest_row = 0
    for _, frames in rows:
        widest_row = max(widest_row, sum(frame.shape[1] + GAP for frame in frames))
    size = (label + widest_row, len(rows) * row_height + GAP)
    sheet = Image.new("RGB", size, "#1c1e21")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    most_lines = max(1, row_height // LINE_HEIGHT)

    for row, (text, frames) in enumerate(rows):
        top = GAP + row * row_height
        left = label
        lines = fitting_lines(text, label - 2 * GAP, most_lines)
        draw.multiline_text((GAP, top), "\n".join(lines), fill="#e8e8e4", font=font)
        for frame in frames:
            sheet.paste(Image.fromarray(frame), (left, top))
            left += frame.shape[1] + GAP

    image_format = "PNG" if path.suffix == ".png" else "JPEG"

    def save(temporary_path: Path) -> None:
        sheet.save(temporary_path, format=image_format, quality=90)

    write_whole(path, save, durable=False)
