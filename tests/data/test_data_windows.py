"""Frame counts that models take, and windows laid over clips."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from clips import numbered, write_clip
from hypothesis import given
from hypothesis import strategies as st

from videotune.data.probe import Facts, probe
from videotune.data.windows import (
    WindowSettings,
    frames_at,
    planned_frames,
    smallest_window,
    snap_frames,
)
from videotune.errors import VideotuneError
from videotune.types import VideoRules


def rules(step: int = 4, rest: int = 1, fps: float = 16.0) -> VideoRules:
    return VideoRules(step, rest, 16, fps, 8, 4)


def facts(frames: int, fps: float) -> Facts:
    """A constant-rate clip that is not on the disk."""
    rate = Fraction(24000, 1001) if fps == 23.976 else Fraction(fps)
    times = tuple(float(i / rate) for i in range(frames))
    return Facts("a.mp4", "h264", 96, 64, 0, times, float(frames / rate) - times[-1], float(rate), (0,), "mov")


@pytest.mark.parametrize(
    ("asked", "taken"), [(16, 17), (8, 9), (32, 33), (19, 21), (17, 17), (18, 17), (20, 21), (1, 1), (2, 1), (3, 5)]
)
def test_nearest_count_of_4n_plus_1_ties_upward(asked: int, taken: int) -> None:
    assert snap_frames(asked, rules()) == taken


def test_nearest_count_of_other_rules() -> None:
    assert snap_frames(16, rules(8, 1)) == 17
    assert snap_frames(13, rules(8, 1)) == 17
    assert snap_frames(12, rules(8, 1)) == 9
    assert snap_frames(16, rules(0, 49)) == snap_frames(81, rules(0, 49)) == 49
    assert snap_frames(16, rules(0, 1)) == 1
    assert snap_frames(3, rules(4, 0)) == snap_frames(1, rules(4, 0)) == 4
    assert snap_frames(7, rules(1, 0)) == 7


@given(st.integers(1, 300), st.integers(1, 17), st.integers(0, 16))
def test_no_valid_count_is_nearer(asked: int, step: int, rest: int) -> None:
    taken = snap_frames(asked, rules(step, rest))
    valid = [rest + n * step for n in range(400) if rest + n * step >= 1]
    assert taken in valid
    best = min(abs(v - asked) for v in valid)
    assert abs(taken - asked) == best
    assert taken == max(v for v in valid if abs(v - asked) == best)


def test_a_changed_count_is_said_and_strict_forbids_it() -> None:
    assert planned_frames(WindowSettings(max_frames=17), rules()) == (17, None)
    frames, sentence = planned_frames(WindowSettings(max_frames=16), rules())
    assert frames == 17
    assert sentence == "max_frames 16 becomes 17: this model takes 4n+1 frames"
    assert planned_frames(WindowSettings(max_frames=16, frames=9), rules()) == (9, None)
    with pytest.raises(VideotuneError, match="Set it to 17 or 21"):
        planned_frames(WindowSettings(frames=20, strict_frames=True), rules())
    with pytest.raises(VideotuneError, match=r"single frames\. Set it to 1,"):
        planned_frames(WindowSettings(strict_frames=True), rules(0, 1))


@pytest.mark.parametrize(
    "bad",
    [
        {"frames": 0},
        {"max_frames": -1},
        {"min_frames": 0},
        {"target_fps": 0.0},
        {"max_duration": -1.0},
        {"max_duration": float("nan")},
        {"windows": "tail"},
        {"frame_sample_strategy": "best"},
        {"keyframe_source": "film"},
        {"pad_short": "loop"},
        {"window_stride": 0},
    ],
)
def test_settings_outside_their_range_are_errors(bad: Any) -> None:
    with pytest.raises(VideotuneError, match=next(iter(bad))):
        planned_frames(WindowSettings(**bad), rules())


def test_smallest_window() -> None:
    assert smallest_window(WindowSettings(), rules()) == 5
    assert smallest_window(WindowSettings(), rules(8, 1)) == 9
    assert smallest_window(WindowSettings(), rules(0, 49)) == 49
    assert smallest_window(WindowSettings(), rules(0, 1)) == 1
    assert smallest_window(WindowSettings(frames=1), rules()) == 1
    assert smallest_window(WindowSettings(min_frames=7), rules()) == 9
    with pytest.raises(VideotuneError, match="min_frames is 20, above the 17"):
        smallest_window(WindowSettings(min_frames=20), rules())


def test_frames_at_a_rate() -> None:
    assert frames_at(facts(113, 23.976), 16, 10) == 75
    assert frames_at(facts(101, 23.976), 16, 10) == 67
    assert frames_at(facts(60, 24), 16, 10) == 40
    assert frames_at(facts(600, 24), 16, 10) == 160


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm", ".avi"])
def test_frames_at_a_rate_in_real_files(tmp_path: Path, suffix: str) -> None:
    for count, fps, expected in [(113, 23.976, 75), (101, 23.976, 67), (60, 24, 40)]:
        path = write_clip(tmp_path / f"a{suffix}", numbered(count, 32, 48), fps)
        assert frames_at(probe(path), 16, 10) == expected
