"""Frame counts that models take, and windows laid over clips."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from clips import numbered, read_numbers, write_clip
from hypothesis import given
from hypothesis import strategies as st

from videotune.data.decode import decode
from videotune.data.probe import Facts, probe, shown_at
from videotune.data.windows import (
    WindowSettings,
    frames_at,
    lay,
    planned_frames,
    smallest_window,
    snap_frames,
    window_times,
)
from videotune.errors import VideotuneError
from videotune.types import ClipShape, VideoRules, Window


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
        {"windows": "slide"},
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


def test_chunks_follow_each_other_and_the_rest_is_cut() -> None:
    laid = lay(facts(113, 23.976), WindowSettings(), rules())
    assert [w.frames for w in laid.windows] == [17] * 4
    assert [w.start for w in laid.windows] == [k * 17 / 16 for k in range(4)]
    assert laid.windows[1].times[3] == pytest.approx(17 / 16 + 3 / 16)
    assert laid.seconds_cut == pytest.approx(113 * 1001 / 24000 - 68 / 16)
    assert laid.repeats_share == 0
    assert laid.reason is None


def test_head_takes_the_first_window_alone() -> None:
    laid = lay(facts(113, 23.976), WindowSettings(windows="head"), rules())
    assert [w.start for w in laid.windows] == [0.0]
    assert laid.seconds_cut == pytest.approx(113 * 1001 / 24000 - 17 / 16)


def test_no_more_than_max_duration_is_used() -> None:
    laid = lay(facts(480, 24), WindowSettings(max_duration=2.5), rules())
    assert len(laid.windows) == 2
    assert laid.windows[-1].times[-1] < 2.5
    assert laid.seconds_cut == pytest.approx(20 - 34 / 16)


def test_a_short_clip_takes_the_largest_window_that_it_fills() -> None:
    laid = lay(facts(20, 24), WindowSettings(max_frames=33), rules())  # 13 frames at 16 fps
    assert [w.frames for w in laid.windows] == [13]
    assert laid.seconds_cut == pytest.approx(20 / 24 - 13 / 16)


def test_too_short() -> None:
    laid = lay(facts(6, 24), WindowSettings(), rules())
    assert (laid.windows, laid.reason) == ((), "too_short")
    assert laid.detail == "has 4 frames at 16 fps; the smallest window is 5"
    assert laid.seconds_cut == pytest.approx(0.25)
    assert lay(facts(6, 24), WindowSettings(min_frames=1), rules()).windows[0].frames == 1
    assert lay(facts(60, 24), WindowSettings(min_frames=17, max_frames=33), rules()).windows[0].frames == 33
    assert lay(facts(20, 24), WindowSettings(min_frames=17, max_frames=33), rules()).reason == "too_short"


def test_a_slower_source_repeats_frames_and_says_how_many() -> None:
    laid = lay(facts(64, 8), WindowSettings(), rules())
    assert laid.repeats_share == pytest.approx(8 / 17, abs=0.02)
    assert lay(facts(64, 8), WindowSettings(target_fps=8), rules()).repeats_share == 0


@given(st.integers(2, 400), st.sampled_from([8, 12, 16, 23.976, 24, 25, 30, 60]), st.integers(1, 40), st.booleans())
def test_every_window_lies_inside_the_clip(frames: int, fps: float, wanted: int, head: bool) -> None:
    clip = facts(frames, fps)
    laid = lay(clip, WindowSettings(max_frames=wanted, windows="head" if head else "chunks"), rules())
    assert (laid.windows == ()) == (laid.reason is not None)
    for window in laid.windows:
        assert len(window.times) == window.frames == snap_frames(window.frames, rules())
        assert shown_at(clip, window.times)[0] >= 0
    used = sum(w.frames for w in laid.windows) / laid.fps
    assert used + laid.seconds_cut == pytest.approx(clip.seconds, abs=1e-5)


def test_planned_frames_are_decoded_frames(tmp_path: Path) -> None:
    clip = probe(write_clip(tmp_path / "a.mp4", numbered(113), 23.976, options={"bf": "3"}))
    laid = lay(clip, WindowSettings(), rules())
    for window in laid.windows:
        frames = decode(clip, window.times, 32, 48)
        assert len(frames) == window.frames
        assert read_numbers(frames) == [int((t + 1e-6) * 24000 / 1001 + 0.1) for t in window.times]


def test_times_of_a_library_window() -> None:
    window = Window("x", 1.0, 2.0, ClipShape(4, 32, 32, 4.0))
    assert window_times(window) == (1.0, 1.25, 1.5, 1.75)
