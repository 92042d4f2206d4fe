"""Clips that other trainers dropped, turned or called too short: what becomes of them
here, planned and decoded.

Each test is named after the public thread that it would have prevented.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import noise, numbered, read_numbers, write_clip
from tests.support.datasets import scanned
from videotune.data.dataset import totals
from videotune.data.decode import decode
from videotune.data.frame_sampling import draw_frames
from videotune.data.library import Library
from videotune.types import DETERMINISTIC_VARIANT


def test_diffusion_pipe_113_no_clip_vanishes(tmp_path: Path) -> None:
    """Clips of one frame count, of an odd size, too short, broken: each is used or has
    its reason, and planned = decoded.
    """
    for i, count in enumerate([5, 8, 17, 33, 80]):
        write_clip(tmp_path / f"n{i}.mp4", noise(count, 64 + 2 * i, 96, seed=i), 16)
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "n4.mp4").read_bytes()[:200])
    library = scanned(tmp_path)
    assert totals(library) == {"found": 6, "used": 5, "held_out": 0, "skipped": 1}
    planned = sum(account["frames"] for account in library.accounts)
    decoded = 0
    for window in library.windows:
        times, size = (
            draw_frames(window, DETERMINISTIC_VARIANT, 0).times,
            (window.shape.height, window.shape.width),
        )
        decoded += len(decode(library.media[window.clip_id], times, *size))
    assert decoded == planned == 5 + 5 + 17 + 17 + 68


def test_decord_99_rotation_metadata(tmp_path: Path) -> None:
    """A phone's portrait clip, stored lying, goes into a portrait bucket and is decoded
    upright.
    """
    upright = numbered(20, 96, 64)
    lying = np.rot90(upright, -1, axes=(1, 2))
    write_clip(tmp_path / "a.mp4", lying, 16, rotation=90)
    library = scanned(tmp_path, resolution="96x64")
    window = library.windows[0]
    assert (window.shape.height, window.shape.width) == (96, 64)
    frames = decode(
        library.media[window.clip_id],
        draw_frames(window, DETERMINISTIC_VARIANT, 0).times,
        96,
        64,
    )
    assert read_numbers(frames) == list(range(17))


def test_simpletuner_2537_broken_files_have_reasons(tmp_path: Path) -> None:
    """Whatever bytes a file has, the scan ends with a reason for it and the others are
    used.
    """
    good = write_clip(tmp_path / "good.mp4", noise(20), 16).read_bytes()
    rng = np.random.default_rng(1)
    for i in range(12):
        data = bytearray(good)
        for place in rng.integers(0, len(data), 40):
            data[place] = rng.integers(256)
        (tmp_path / f"bad{i}.mp4").write_bytes(
            bytes(data[: rng.integers(1, len(data))])
        )
    (tmp_path / "random.mp4").write_bytes(rng.bytes(5000))
    library = scanned(tmp_path)
    assert totals(library)["found"] == 14
    assert [clip.path for clip in library.clips][-1].endswith("good.mp4")


def one_clip(folder: Path, count: int, fps: float, frames: int) -> Library:
    path = write_clip(folder / "a.mp4", numbered(count, 48, 48), fps)
    path.with_suffix(".txt").write_text("a clip")
    return scanned(folder, video={"frames": frames}, resolution="48x48")


def shown(library: Library) -> list[list[int]]:
    """The numbers painted into the frames of each window."""
    clip = library.media[library.windows[0].clip_id]
    return [
        read_numbers(
            decode(clip, draw_frames(window, DETERMINISTIC_VARIANT, 0).times, 48, 48)
        )
        for window in library.windows
    ]


@pytest.mark.parametrize("frames", [45, 61, 65])
def test_diffusion_pipe_207_65_frames_at_16_fps_are_65(
    tmp_path: Path, frames: int
) -> None:
    """There they were counted as 64 by their duration, and skipped."""
    library = one_clip(tmp_path, 65, 16, frames)
    assert library.skipped == ()
    assert library.accounts[0]["model_frames"] == 65
    assert shown(library) == [list(range(frames))]


def test_diffusion_pipe_113_60_frames_at_24_fps_are_40_and_make_a_shorter_window(
    tmp_path: Path,
) -> None:
    """There a bucket of 57 frames dropped every clip; here each has a window of 37, and
    it is said that none has 57.
    """
    library = one_clip(tmp_path, 60, 24, 57)
    assert library.skipped == ()
    assert library.accounts[0]["model_frames"] == 40
    assert shown(library) == [[int(i * 1.5 + 0.1) for i in range(37)]]
    assert any(
        "no clip is long enough for 57 frames: the longest window has 37" in note
        for note in library.notes
    )
