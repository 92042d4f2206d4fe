"""Frame counts that models take, windows laid over clips, and the frames that samples of them show."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_kit import info_of
from videotune.config.data_schema import VideoConfig
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import (
    FrameSampling,
    planned_frames,
    sample_frames,
    sample_window,
    snap_frames,
    without_randomness,
)
from videotune.data.media_info import MediaInfo
from videotune.errors import VideotuneError
from videotune.types import PLAIN, VideoRules, Window


def rules(step: int = 4, rest: int = 1, fps: float = 16.0) -> VideoRules:
    return VideoRules(step, rest, 16, fps, 8, 4)


def sampled(info: MediaInfo, of: VideoRules | None = None, cuts: tuple[float, ...] = (), **video: Any) -> FrameSampling:
    return sample_frames(info, VideoConfig(**video), of or rules(), cuts)


def starts(info: MediaInfo, **video: Any) -> list[float]:
    """Where the windows begin, in frames at 16 fps."""
    return [window.start * 16 for window in sampled(info, **video).windows]


def times(window: Window) -> tuple[float, ...]:
    return sample_window(window, PLAIN, 0).times


def too_short(info: MediaInfo, of: VideoRules | None = None, cuts: tuple[float, ...] = (), **video: Any) -> str:
    with pytest.raises(ClipProblem) as caught:
        sampled(info, of, cuts, **video)
    assert caught.value.reason == "too_short"
    return caught.value.detail


@given(st.integers(1, 300), st.integers(0, 17), st.integers(0, 16))
def test_no_valid_count_is_nearer(asked: int, step: int, rest: int) -> None:
    valid = [rest + n * step for n in range(400) if rest + n * step >= 1]
    if not valid:
        return
    taken = snap_frames(asked, rules(step, rest))
    best = min(abs(v - asked) for v in valid)
    assert taken == max(v for v in valid if abs(v - asked) == best), "ties go upward"


def test_a_changed_count_is_reported_and_strict_forbids_it() -> None:
    assert planned_frames(VideoConfig(max_frames=17), rules()) == (17, None)
    assert planned_frames(VideoConfig(), rules()) == (17, "max_frames 16 becomes 17: this model takes 4n+1 frames")
    assert planned_frames(VideoConfig(max_frames=16, frames=9), rules()) == (9, None)
    with pytest.raises(VideotuneError, match="Set it to 21"):
        planned_frames(VideoConfig(frames=20, strict_frames=True), rules())
    with pytest.raises(VideotuneError, match=r"single frames\. Set it to 1"):
        planned_frames(VideoConfig(strict_frames=True), rules(0, 1))
    with pytest.raises(VideotuneError, match="temporal_compression_ratio"):
        sampled(info_of(34, 16), temporal_compression_ratio=6)
    with pytest.raises(VideotuneError, match="stretch"):
        planned_frames(VideoConfig(stretch=True, frame_sample_strategy="keyframe"), rules())


def test_a_short_clip_takes_the_largest_window_that_it_fills_or_none() -> None:
    laid = sampled(info_of(20, 24), max_frames=33)  # 13 frames at 16 fps
    assert [w.shape.frames for w in laid.windows] == [13]
    assert laid.seconds_cut == pytest.approx(20 / 24 - 13 / 16)
    assert too_short(info_of(6, 24)) == "has 4 frames at 16 fps; the smallest window is 5"
    assert too_short(info_of(20, 24), min_frames=17, max_frames=33)
    assert sampled(info_of(6, 24), min_frames=1).windows[0].shape.frames == 1
    assert sampled(info_of(60, 24), min_frames=17, max_frames=33).windows[0].shape.frames == 33


@given(st.integers(2, 400), st.sampled_from([8, 12, 16, 23.976, 24, 25, 30, 60]), st.integers(1, 40), st.booleans())
def test_used_and_cut_seconds_are_the_clip(frames: int, fps: float, wanted: int, head: bool) -> None:
    clip = info_of(frames, fps)
    try:
        laid = sampled(clip, max_frames=wanted, windows="head" if head else "chunks")
    except ClipProblem:
        return
    used = sum(w.shape.frames for w in laid.windows) / 16
    assert used + laid.seconds_cut == pytest.approx(clip.seconds, abs=1e-5)


def test_random_windows_share_the_clip_among_them() -> None:
    """40 frames hold two windows of 17; their starts are random in the two halves of the 23 that are possible."""
    first, second = sampled(info_of(40, 16), frame_sample_strategy="random").windows
    for variant in range(50):
        a, b = sample_window(first, variant, seed=3), sample_window(second, variant, seed=3)
        assert 0 <= a.times[0] <= 11.5 / 16 <= b.times[0] <= 23 / 16
        assert [y - x for x, y in pairwise(a.times)] == pytest.approx([1 / 16] * 16)
        assert b.times[-1] < 40 / 16
    assert len({sample_window(first, variant, 3).times for variant in range(50)}) == 50
    assert sample_window(first, 1, 3) == sample_window(first, 1, 3) != sample_window(first, 1, 4)
    assert times(first)[0] == pytest.approx(5.75 / 16)
    assert len(starts(info_of(40, 16), frame_sample_strategy="random", windows="head")) == 1
    (exact,) = sampled(info_of(17, 16), frame_sample_strategy="random").windows
    assert not exact.varies, "a clip that just fits has one start"
    plain = without_randomness(VideoConfig(frame_sample_strategy="random", temporal_augmentation=True))
    assert {w.sampling for w in sample_frames(info_of(40, 16), plain, rules()).windows} == {"even"}


def test_no_window_crosses_a_scene_cut() -> None:
    how = {"frame_sample_strategy": "keyframe", "keyframe_source": "scenes"}
    laid = sampled(info_of(100, 16), cuts=(20 / 16, 24 / 16, 60 / 16), **how)
    assert [w.start * 16 for w in laid.windows] == [0, 24, 41, 60, 77]
    assert laid.seconds_cut == pytest.approx(15 / 16)
    assert "none of its 3 scenes" in too_short(info_of(12, 16), cuts=(4 / 16, 8 / 16), **how)


def test_stretch_squeezes_the_whole_clip_into_one_window() -> None:
    laid = sampled(info_of(68, 16), stretch=True)
    (window,) = laid.windows
    assert [time * 16 for time in times(window)] == pytest.approx([4 * i for i in range(17)])
    assert (laid.speed, laid.seconds_cut) == (pytest.approx(4), 0)
    assert sampled(info_of(17, 16), stretch=True).speed == 1
    (random,) = sampled(info_of(68, 16), stretch=True, frame_sample_strategy="random").windows
    some, other = (sample_window(random, variant, 0).times for variant in (0, 1))
    assert 0 <= some[0] <= some[-1] < 68 / 16
    assert (list(some), some == other) == (sorted(set(some)), False)


def test_temporal_augmentation_moves_windows_and_swaps_neighbours() -> None:
    windows = sampled(info_of(51, 16), temporal_augmentation=True).windows
    assert len({window.id for window in windows}) == 3
    swapped = 0
    for variant in range(200):
        frames = [round(time * 16 * 1000) / 1000 for time in sample_window(windows[1], variant, 0).times]
        start = min(frames)
        assert 8.5 - 1e-3 <= start <= 25.5 + 1e-3
        order = [round(frame - start) for frame in frames]
        assert sorted(order) == list(range(17))
        assert all(abs(place - frame) <= 1 for place, frame in enumerate(order))
        swapped += sum(place > frame for place, frame in enumerate(order))
    assert 0.08 < swapped / (200 * 16) < 0.11  # each pair with p = 0.1, unless its left one was swapped already
    assert times(windows[1]) == tuple(sorted(times(windows[1])))


def test_an_image_is_one_window_of_one_frame() -> None:
    still = MediaInfo("a.png", "png", 96, 64, (0,), 0.0, 0.0, (0,), "image", still=True)
    (window,) = sampled(still).windows
    assert (window.shape.frames, times(window)) == (1, (0.0,))
    assert too_short(still, rules(0, 49)) == "an image is one frame, and this model takes exactly 49 frames"


@given(
    st.integers(2, 300),
    st.sampled_from([8, 16, 23.976, 30, 60]),
    st.integers(1, 40),
    st.sampled_from(["uniform", "random", "keyframe"]),
    st.sampled_from(["chunks", "head", "slide"]),
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([{}, {"pad_short": "freeze"}, {"min_frames": 1}, {"keyframe_source": "scenes"}]),
)
def test_every_sample_of_every_window_lies_inside_the_clip(
    frames: int, fps: float, wanted: int, strategy: Any, layout: Any, augment: bool, variant: int, keep: int, more: Any
) -> None:
    clip = info_of(frames, fps, tuple(range(0, frames, 12)))
    video = VideoConfig(
        max_frames=wanted,
        frame_sample_strategy=strategy,
        windows=layout,
        temporal_augmentation=augment,
        temporal_compression_ratio=4 * keep,
        window_stride=5,
        **more,
    )
    try:
        windows = sample_frames(clip, video, rules(), (2.5, 1.0)).windows
    except ClipProblem:
        return
    for window in windows:
        for some in (sample_window(window, variant, 1).times, times(window)):
            assert len(some) == window.shape.frames == snap_frames(window.shape.frames, rules())
            clip.frames_at(some)
    assert len({window.id for window in windows}) == len(windows)
