"""Pictures of clips and the loudness of their sound, made on the first request and kept in the project."""

import json
import os
from collections.abc import Callable
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
from PIL import Image

from videotune.data.file_checks import ClipProblem
from videotune.data.images import IMAGE_SUFFIXES, is_animated, read_image
from videotune.data.probe import OPEN_OPTIONS, limit_pixels, video_stream
from videotune.files import write_bytes
from videotune.lazy import av

WIDTH = 320
BINS = 600
LONGEST = 900.0
"""Pixels of a poster's longer side; values of a waveform at most; seconds of sound that are read at most."""

_decoding = BoundedSemaphore(2)
"""So many files are decoded at once: a page asks for sixty pictures."""


def poster(path: Path, cache: Path) -> Path | None:
    """A JPEG file with a frame of the clip; None where none can be decoded."""
    found = _kept(path, cache / "posters", ".jpg", _jpeg)
    return found if found.stat().st_size else None


def peaks(path: Path, cache: Path) -> list[float]:
    """The loudness of the sound, 0 to 1, at equal distances of time; empty where there is no sound, or very much."""
    return list(
        json.loads(_kept(path, cache / "posters", ".json", _peaks).read_bytes() or b"[]")
    )


def _kept(path: Path, cache: Path, suffix: str, make: Callable[[Path], bytes]) -> Path:
    """What was made of the file as it is now; an empty file where that failed."""
    about = path.stat()
    name = blake2b(
        f"{path}\n{about.st_size}\n{about.st_mtime_ns}".encode(errors="replace"), digest_size=12
    ).hexdigest()
    if not (kept := cache / f"{name}{suffix}").is_file():
        with _decoding:
            try:
                content = make(path)
            except (
                ClipProblem,
                av.FFmpegError,
                OSError,
                ValueError,
                ArithmeticError,
                StopIteration,
            ):
                content = b""
        cache.mkdir(parents=True, exist_ok=True)
        write_bytes(kept, content, durable=False)
    return kept


def _open(path: Path) -> Any:
    return av.open(
        os.path.abspath(path),
        options=OPEN_OPTIONS,
        metadata_errors="replace",
        timeout=(10.0, 10.0),
    )


def _jpeg(path: Path) -> bytes:
    if path.suffix.lower() in IMAGE_SUFFIXES and not (
        path.suffix.lower() == ".gif" and is_animated(path)
    ):
        picture = Image.fromarray(read_image(path)[0])
    else:
        with _open(path) as container:
            stream = video_stream(container)
            limit_pixels(stream.codec_context)
            stream.codec_context.thread_count = 1
            container.seek((container.duration or 0) // 3)  # many clips begin with black
            frame = next(container.decode(stream))
            wide = max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))
            picture = (
                frame.to_image()
                .resize((wide, frame.height))
                .rotate(frame.rotation, expand=True)
            )
    picture.thumbnail((WIDTH, WIDTH))
    picture.save(memory := BytesIO(), "JPEG", quality=82)
    return memory.getvalue()


def _peaks(path: Path) -> bytes:
    with _open(path) as container:
        if not container.streams.audio or (container.duration or 0) > LONGEST * 1e6:
            return b""
        resampler = av.AudioResampler(format="s16", layout="mono", rate=8000)
        parts = [
            part.to_ndarray()[0]
            for frame in container.decode(audio=0)
            for part in resampler.resample(frame)
        ]
    sound = np.abs(np.concatenate(parts).astype(np.float32)) / 32768
    return json.dumps(
        [round(float(part.max()), 3) for part in np.array_split(sound, min(BINS, len(sound)))]
    ).encode()
