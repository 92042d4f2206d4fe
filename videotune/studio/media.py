"""Posters and waveforms of clips, computed on the first request and cached in the
project.
"""

import json
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from io import BytesIO
from itertools import islice
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
from PIL import Image

from videotune.data.file_checks import ClipProblem
from videotune.data.images import IMAGE_SUFFIXES, is_animated, read_image
from videotune.data.probe import OPEN_OPTIONS, limit_pixels, video_stream
from videotune.files import Number, write_bytes
from videotune.lazy import av
from videotune.studio.records import read_record

POSTER_SIZE = 320
"""Pixels of a poster's longer side."""

MOST_FRAMES_DECODED = 120
"""Frames that are decoded for a poster, at most."""

MAX_PEAKS = 600
"""Largest number of values in a waveform."""

MAX_SOUND_SECONDS = 900.0
"""Longer sound has no waveform."""

SAMPLE_RATE = 8000
INT16_SCALE = 32768

_decoders = BoundedSemaphore(2)
"""Limits the files that are decoded at once, since a page requests sixty posters."""


def poster(path: Path, cache: Path) -> Path | None:
    """Return a JPEG file with a frame of the clip's middle; None if no frame can be
    decoded.
    """
    jpeg_path = _cached_file(path, cache / "posters", "-middle.jpg", _poster_jpeg)
    return jpeg_path if jpeg_path.stat().st_size else None


def peaks(path: Path, cache: Path) -> list[float]:
    """Return the loudness of the sound, 0 to 1, at equal time steps.

    Empty if there is no sound or it is too long.
    """
    json_path = _cached_file(path, cache / "posters", ".json", _peaks_json)
    if not json_path.stat().st_size:
        return []
    loudness: list[float] = read_record(json_path, list[Number], "remove it")
    return loudness


def _cached_file(
    path: Path, cache: Path, suffix: str, compute: Callable[[Path], bytes]
) -> Path:
    """Return the cached result for a file as it is now; an empty file if computing
    failed.
    """
    file_stat = path.stat()
    identity = f"{path}\n{file_stat.st_size}\n{file_stat.st_mtime_ns}"
    name = blake2b(identity.encode(errors="replace"), digest_size=12).hexdigest()

    cached_path = cache / f"{name}{suffix}"
    if cached_path.is_file():
        return cached_path

    with _decoders:
        try:
            content = compute(path)
        except (
            ClipProblem,
            av.FFmpegError,
            OSError,
            ValueError,
            ArithmeticError,
            StopIteration,
            MemoryError,
        ):
            content = b""

    cache.mkdir(parents=True, exist_ok=True)
    write_bytes(cached_path, content, durable=False)
    return cached_path


def _open(path: Path) -> Any:
    return av.open(
        os.path.abspath(path),
        options=OPEN_OPTIONS,
        metadata_errors="replace",
        timeout=(10.0, 10.0),
    )


def _poster_jpeg(path: Path) -> bytes:
    picture = (
        Image.fromarray(read_image(path)[0]) if _is_still(path) else _video_frame(path)
    )
    picture.thumbnail((POSTER_SIZE, POSTER_SIZE))

    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()


def _is_still(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        return False
    return suffix != ".gif" or not is_animated(path)


def _video_frame(path: Path) -> Image.Image:
    """Return a frame of the video's middle, upright and with square pixels."""
    with _open(path) as container:
        stream = video_stream(container)
        limit_pixels(stream.codec_context)
        stream.codec_context.thread_count = 1

        # Many clips begin with black, and so do previews.
        middle_us = (container.duration or 0) // 2
        container.seek(middle_us)
        frame = _frame_at(container.decode(stream), middle_us / 1e6)
        # The file may claim any pixel aspect: only its poster's size is ever made.
        width = float(frame.width * (stream.sample_aspect_ratio or 1))
        scale = min(1.0, POSTER_SIZE / max(width, frame.height))
        size = (max(1, round(width * scale)), max(1, round(frame.height * scale)))
        picture: Image.Image = frame.to_image().resize(size)
        return picture.rotate(frame.rotation, expand=True)


def _frame_at(frames: Iterator[Any], seconds: float) -> Any:
    """Return the first frame from a time on, or the last one if decoding would take too
    long.

    A seek ends at the keyframe before, which may be the video's first frame.
    """
    frame = next(frames)
    for later_frame in islice(frames, MOST_FRAMES_DECODED):
        if frame.time is None or frame.time >= seconds:
            break
        frame = later_frame
    return frame


def _peaks_json(path: Path) -> bytes:
    chunks = []
    num_samples = 0
    with _open(path) as container:
        duration_us = container.duration or 0
        if not container.streams.audio or duration_us > MAX_SOUND_SECONDS * 1e6:
            return b""

        resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        for frame in container.decode(audio=0):
            for resampled in resampler.resample(frame):
                chunks.append(resampled.to_ndarray()[0])
                num_samples += len(chunks[-1])
            # The container may claim to be shorter than it is.
            if num_samples > MAX_SOUND_SECONDS * SAMPLE_RATE:
                return b""

    amplitude = np.abs(np.concatenate(chunks).astype(np.float32)) / INT16_SCALE
    sections = np.array_split(amplitude, min(MAX_PEAKS, len(amplitude)))
    return json.dumps([round(float(section.max()), 3) for section in sections]).encode()
