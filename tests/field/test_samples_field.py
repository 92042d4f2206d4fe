"""Motion that dies, flicker, saturation: measured on clips of which is known what they
do.
"""

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest

from tests.support.landscapes import landscape, pan
from videotune.validation.metrics import MotionStats, mean_motion, motion_stats

FRAMES = 9
GAIN = np.where(np.arange(FRAMES) % 2, 1.05, 0.95)[:, None, None, None]


def panned(speed: float, seed: int = 0) -> np.ndarray:
    return pan(seed, [i * speed for i in range(FRAMES)])


def lit(frames: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return (frames * gain).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_finetrainers_353_static_is_less_than_slow_is_less_than_fast(seed: int) -> None:
    found = [
        motion_stats(panned(speed, seed)).energy or 0.0 for speed in (0, 0.5, 1, 2, 4)
    ]
    assert found[0] == 0
    assert all(1.2 * slower < faster for slower, faster in pairwise(found))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speed", [0.0, 1.0, 3.0])
def test_diffsynth_1064_an_alternating_gain_is_flicker_and_a_smooth_pan_is_not(
    seed: int, speed: float
) -> None:
    frames = panned(speed, seed)
    smooth, flickering = motion_stats(frames), motion_stats(lit(frames, GAIN))
    assert smooth.flicker is not None
    assert smooth.flicker < 0.005
    assert flickering.flicker == pytest.approx(0.05, abs=0.01)


def test_a_gain_is_no_motion_and_a_fade_is_no_flicker() -> None:
    still = np.repeat(landscape(1)[None], FRAMES, 0)
    slow = motion_stats(panned(0.5, 1)).energy
    flickering = motion_stats(lit(still, GAIN)).energy
    assert slow is not None
    assert flickering is not None
    assert flickering < slow / 5
    faded = motion_stats(
        lit(still, np.linspace(1, 0.6, FRAMES)[:, None, None, None])
    ).flicker
    assert faded is not None
    assert faded < 0.003


def test_musubi_52_saturation_grows_with_colour_alone() -> None:
    frames = panned(1).astype(np.float32)
    grey = frames.mean(-1, keepdims=True)
    found = [
        motion_stats(
            (grey + (frames - grey) * k).clip(0, 255).astype(np.uint8)
        ).saturation
        for k in (0, 0.5, 1, 2)
    ]
    assert found[0] == pytest.approx(0, abs=1e-3)
    assert found == sorted(found)
    assert found[3] == pytest.approx(2 * found[2], rel=0.15)


def test_clips_of_other_sizes_compare() -> None:
    frames = panned(1)
    small = frames.reshape(FRAMES, 60, 2, 80, 2, 3).mean((2, 4)).astype(np.uint8)
    one, other = asdict(motion_stats(frames)), asdict(motion_stats(small))
    assert other["energy"] == pytest.approx(one["energy"], rel=0.1)
    assert other["saturation"] == pytest.approx(one["saturation"], rel=0.1)


def test_few_frames_and_dark_ones_say_what_they_can() -> None:
    assert motion_stats(panned(1)[:1]).energy is None
    assert motion_stats(panned(1)[:2]).flicker is None
    dark = motion_stats(np.zeros((4, 32, 32, 3), np.uint8))
    assert dark == MotionStats(0.0, 0.0, 0.0)
    means = mean_motion([MotionStats(None, None, 0.2), MotionStats(0.1, None, 0.4)])
    assert means == {"energy": 0.1, "flicker": None, "saturation": pytest.approx(0.3)}
