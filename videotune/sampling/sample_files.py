"""Write samples as files, and measure their sound."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from videotune.data.sound_scan import CLIPPED_LEVEL, LOWEST_DECIBELS
from videotune.data.video_writer import write_video
from videotune.sampling.pipeline import RenderedSample


def write_sample(path: Path, sample: RenderedSample, fps: float) -> None:
    """Write a sample as a video file, with its sound if it has any."""
    options: dict[str, Any] = {}
    if sample.sound is not None:
        options = {"sound": sample.sound, "sound_rate": sample.sound_rate}
    write_video(path, sample.frames, fps, **options)


def measure_sound(sound: np.ndarray) -> dict[str, float]:
    """Return the loudness of a sound (2,n) in decibels of full scale, and the share of its
    numbers that are clipped.
    """
    power = float(np.mean(np.square(sound, dtype=np.float64))) if sound.size else 0.0
    loudness = 10 * math.log10(power) if power > 0 else LOWEST_DECIBELS
    clipped = float(np.mean(np.abs(sound) >= CLIPPED_LEVEL)) if sound.size else 0.0
    return {
        "loudness": round(max(LOWEST_DECIBELS, loudness), 1),
        "clipped": round(clipped, 5),
    }
