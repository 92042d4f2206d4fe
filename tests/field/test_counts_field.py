"""Clips that other trainers called too short: what becomes of them here, planned and decoded."""

from pathlib import Path

import pytest

from tests import data_kit
from tests.clips import numbered, read_numbers, write_clip
from videotune.data.dataset import Library
from videotune.data.decode import decode
from videotune.data.frame_sampling import sample_window
from videotune.types import PLAIN


def scanned(folder: Path, count: int, fps: float, frames: int) -> Library:
    path = write_clip(folder / "a.mp4", numbered(count, 48, 48), fps)
    path.with_suffix(".txt").write_text("a clip")
    return data_kit.scanned(folder, video={"frames": frames}, resolution="48x48")


def shown(library: Library) -> list[list[int]]:
    """The numbers painted into the frames of each window."""
    clip = library.media[library.windows[0].clip_id]
    return [read_numbers(decode(clip, sample_window(window, PLAIN, 0).times, 48, 48)) for window in library.windows]


@pytest.mark.parametrize("frames", [45, 61, 65])
def test_diffusion_pipe_207_65_frames_at_16_fps_are_65(tmp_path: Path, frames: int) -> None:
    """There they were counted as 64 by their duration, and skipped."""
    library = scanned(tmp_path, 65, 16, frames)
    assert library.skipped == ()
    assert library.accounts[0]["model_frames"] == 65
    assert shown(library) == [list(range(frames))]


def test_diffusion_pipe_113_60_frames_at_24_fps_are_40_and_make_a_shorter_window(tmp_path: Path) -> None:
    """There a bucket of 57 frames dropped every clip; here each has a window of 37, and it is said that none has 57."""
    library = scanned(tmp_path, 60, 24, 57)
    assert library.skipped == ()
    assert library.accounts[0]["model_frames"] == 40
    assert shown(library) == [[int(i * 1.5 + 0.1) for i in range(37)]]
    assert any("no clip is long enough for 57 frames: the longest window has 37" in note for note in library.notes)
