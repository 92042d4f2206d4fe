"""Small clips of which some have sound."""

from pathlib import Path

import numpy as np

from tests.support.sounds import tone, write_sounding
from videotune.data.video_writer import write_video

FRAMES = 17
RATE = 16000


def write_sounding_clips(folder: Path, sounding: int = 4, silent: int = 2) -> Path:
    """Write clips of 17 frames at 24 fps with captions; the last ones have no track."""
    for name in ("videos", "captions"):
        (folder / name).mkdir(parents=True)
    for index in range(sounding + silent):
        pictures = np.random.default_rng(index).integers(
            0, 255, (FRAMES, 32, 32, 3), "uint8"
        )
        path = folder / "videos" / f"clip-{index}.mov"
        if index < sounding:
            sine = tone(RATE, FRAMES / 24, 300 + 200 * index)
            write_sounding(
                path, sine, RATE, codec="pcm_s16le", frames=FRAMES, pictures=pictures
            )
        else:
            write_video(path, pictures, 24.0)
        (folder / "captions" / f"clip-{index}.txt").write_text(f"clip number {index}")
    return folder
