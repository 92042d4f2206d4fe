"""Real video files for tests: frames drawn with numpy, written with PyAV."""

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from videotune.data.video_writer import SAME_BITS

CODECS = {
    ".mp4": "libx264",
    ".mov": "libx264",
    ".mkv": "libx264",
    ".webm": "libvpx-vp9",
    ".avi": "mpeg4",
}
RATES = {
    23.976: Fraction(24000, 1001),
    29.97: Fraction(30000, 1001),
    59.94: Fraction(60000, 1001),
}


def write_clip(
    path: Path,
    frames: np.ndarray,
    fps: float | Fraction = 24,
    *,
    codec: str | None = None,
    pix_fmt: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    rotation: int | None = None,
    hflip: bool = False,
    aspect: Fraction | None = None,
    times: Sequence[float] | None = None,
    colorspace: int | None = None,
    container_options: Mapping[str, str] | None = None,
    field_order: int | None = None,
) -> Path:
    """Write uint8 frames (T, H, W, 3) at ``fps``, or at the given ``times`` in seconds
    (to 1/24000 s); returns ``path``.

    ``rotation`` is the container's counter-clockwise turn in degrees, ``aspect`` that
    of a pixel, ``colorspace`` swscale's number of the matrix (1 is BT.709) that is used
    and declared; ``field_order`` FFmpeg's number (2: the upper field first) of frames
    that are two fields.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = RATES[fps] if fps in RATES else Fraction(fps).limit_denominator(1001)
    _, height, width, _ = frames.shape
    with av.open(str(path), "w", options=dict(container_options or {})) as container:
        codec, how = codec or CODECS[path.suffix.lower()], dict(options or {})
        if codec.startswith("libx264"):
            how["x264-params"] = ":".join(
                filter(None, (SAME_BITS, how.get("x264-params")))
            )
        stream = container.add_stream(codec, rate=rate, options=how)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.thread_count = 1
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if colorspace is not None:
            stream.codec_context.colorspace = colorspace
        if field_order is not None:
            stream.codec_context.field_order = field_order
        if rotation is not None or hflip:
            stream.set_display_rotation(rotation or 0, hflip=hflip)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 24000)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(pixels), format="rgb24"
            )
            if "rgb" not in pix_fmt and colorspace is not None:
                frame = frame.reformat(format=pix_fmt, dst_colorspace=colorspace)
            if times is None:
                frame.pts, frame.time_base = i, 1 / rate
            else:
                frame.pts, frame.time_base = round(times[i] * 24000), Fraction(1, 24000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if codec == "libsvtav1" and hasattr(os, "sched_setscheduler"):
        # Of root it makes the thread that calls it real-time of the highest priority,
        # and all that is begun there later: one that is busy then keeps everybody else
        # from the core.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return path


def numbered(count: int, height: int = 64, width: int = 96) -> np.ndarray:
    """Frames that carry their index: nine bits as black and white cells of a 3 × 3
    grid. uint8 (count, H, W, 3).
    """
    bits = (np.arange(count)[:, None] >> np.arange(9)) & 1
    rows = np.arange(height) * 3 // height
    columns = np.arange(width) * 3 // width
    grid = bits.reshape(count, 3, 3)[:, rows][:, :, columns] * 255
    return np.repeat(grid[..., None], 3, axis=3).astype(np.uint8)


def read_numbers(frames: np.ndarray) -> list[int]:
    """The indices that ``numbered`` painted, read from frames of any size with the same
    aspect ratio.
    """
    height, width = frames.shape[1:3]
    rows = (np.arange(3) * 2 + 1) * height // 6
    columns = (np.arange(3) * 2 + 1) * width // 6
    bits = frames.mean(3)[:, rows][:, :, columns].reshape(len(frames), 9) > 127
    return [int(row @ (1 << np.arange(9))) for row in bits]


def moving_dot(
    times: Sequence[float],
    speed: float,
    height: int = 48,
    width: int = 256,
    begin: float = 12,
) -> np.ndarray:
    """A soft bright dot at x = begin + speed · time pixels, on black. uint8 (T, H, W,
    3).
    """
    x = begin + speed * np.asarray(times)[:, None, None]
    rows, columns = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
    light = 255 * np.exp(
        -((columns - x) ** 2 + (rows - height / 2) ** 2) / (2 * 3.0**2)
    )
    return np.repeat(light[..., None], 3, axis=3).astype(np.uint8)


def dot_places(frames: np.ndarray) -> np.ndarray:
    """The x of the dot in each frame, in pixels: the centroid of what is bright. float
    (T,).
    """
    light = np.clip(frames.mean(3) - 48, 0, None).sum(1)
    return (light * np.arange(light.shape[1])).sum(1) / light.sum(1)


def noise(count: int, height: int = 64, width: int = 96, seed: int = 0) -> np.ndarray:
    """Smooth noise, so that files with different seeds have different bytes. uint8
    (count, H, W, 3).
    """
    rng = np.random.default_rng(seed)
    small = rng.integers(
        0, 255, (count, 1 + height // 8, 1 + width // 8, 3), dtype=np.uint8
    )
    return small.repeat(8, 1).repeat(8, 2)[:, :height, :width]


def write_dataset(
    folder: Path,
    clips: Mapping[str, np.ndarray],
    captions: Mapping[str, str | None],
    fps: float = 24,
) -> Path:
    """The guide's layout: videos/NAME for each clip (NAME with its suffix),
    captions/STEM.txt where there is a caption.
    """
    for name, frames in clips.items():
        path = write_clip(folder / "videos" / name, frames, fps)
        caption = captions.get(name, f"a clip called {path.stem}")
        if caption is not None:
            (folder / "captions").mkdir(exist_ok=True)
            (folder / "captions" / f"{path.stem}.txt").write_text(
                caption, encoding="utf-8"
            )
    return folder


def write_image(path: Path, pixels: np.ndarray, **how: object) -> Path:
    """Write uint8 (H, W, 3) as an image of the suffix's format by Pillow, whose
    ``save`` takes ``how``.
    """
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)
    return path
