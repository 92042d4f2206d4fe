"""Frames written as a video: at the rate that was asked for, and the same bytes for the same frames."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.data.video_writer import video_bytes, write_video


@pytest.mark.parametrize("fps", [8.0, 16.0, 24.0, 24000 / 1001])
def test_a_sample_is_saved_at_the_familys_rate(fps: float, tmp_path: Path) -> None:
    rows = np.linspace(0, 255, 9).astype("uint8")
    frames = np.broadcast_to(rows[:, None, None, None], (9, 32, 48, 3)).copy()
    write_video(tmp_path / "x.mp4", frames, fps)
    info = probe(tmp_path / "x.mp4")
    assert (len(info.timestamps), info.width, info.height) == (9, 48, 32)
    assert info.fps == pytest.approx(fps, rel=1e-3)
    read = decode(info, info.timestamps, 32, 48)
    assert np.abs(read.astype(int) - frames.astype(int)).max() <= 4
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (192, 192), (240, 416)])
def test_the_same_frames_give_the_same_bytes(size: tuple[int, int]) -> None:
    """Also while the machine is busy. As it comes, x264 makes several files of these on a processor with AVX-512."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, size[0] // 8, size[1] // 8, 3), dtype=np.uint8)
    frames = coarse.repeat(8, 1).repeat(8, 2)
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: video_bytes(frames, 16, crf=16), range(12)))
    assert len(files) == 1


def test_an_odd_side_loses_a_pixel(tmp_path: Path) -> None:
    write_video(tmp_path / "x.mp4", np.zeros((2, 33, 49, 3), np.uint8), 16)
    info = probe(tmp_path / "x.mp4")
    assert (info.height, info.width) == (32, 48)
