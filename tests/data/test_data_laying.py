"""Windows laid over clips: where they begin, what they show, and what is cut."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from clips import numbered, read_numbers, write_clip
from hypothesis import given
from hypothesis import strategies as st

from videotune.data.decode import decode
from videotune.data.laying import LaidClip, lay, plain
from videotune.data.probe import Facts, probe, shown_at
from videotune.data.windows import WindowSettings, snap_frames, take
from videotune.types import PLAIN, ClipShape, VideoRules, Window


def rules(step: int = 4, rest: int = 1, fps: float = 16.0) -> VideoRules:
    return VideoRules(step, rest, 16, fps, 8, 4)


def facts(frames: int, fps: float, keyframes: tuple[int, ...] = (0,)) -> Facts:
    """A constant-rate clip that is not on the disk."""
    rate = Fraction(24000, 1001) if fps == 23.976 else Fraction(fps)
    times = tuple(float(i / rate) for i in range(frames))
    return Facts("a.mp4", "h264", 96, 64, 0, times, float(frames / rate) - times[-1], float(rate), keyframes, "mov")


def windows_of(laid: LaidClip) -> list[Window]:
    return [
        Window("clip", w.start, w.end, ClipShape(w.frames, 32, 32, laid.fps), w.sampling, w.swaps) for w in laid.windows
    ]


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


def test_sliding_windows_begin_every_stride() -> None:
    clip = facts(48, 16)
    assert [w.start * 16 for w in lay(clip, WindowSettings(windows="slide"), rules()).windows] == [0, 8, 16, 24]
    laid = lay(clip, WindowSettings(windows="slide", window_stride=10), rules())
    assert [w.start * 16 for w in laid.windows] == [0, 10, 20, 30]
    assert laid.seconds_cut == pytest.approx(1 / 16)
    assert len(lay(clip, WindowSettings(windows="slide", window_stride=1), rules()).windows) == 32


def test_random_windows_share_the_clip_among_them() -> None:
    """40 frames hold two windows of 17; their starts are drawn from the two halves of the 23 that are possible."""
    laid = lay(facts(40, 16), WindowSettings(frame_sample_strategy="random"), rules())
    first, second = windows_of(laid)
    for variant in range(50):
        a, b = take(first, variant, seed=3), take(second, variant, seed=3)
        assert 0 <= a.times[0] <= 11.5 / 16 <= b.times[0] <= 23 / 16
        assert [y - x for x, y in pairwise(a.times)] == pytest.approx([1 / 16] * 16)
        assert b.times[-1] < 40 / 16
    assert len({take(first, variant, 3).times for variant in range(50)}) == 50
    assert take(first, 1, 3) == take(first, 1, 3) != take(first, 1, 4)
    assert take(first, PLAIN, 3).times[0] == pytest.approx(5.75 / 16)
    assert len(lay(facts(40, 16), WindowSettings(frame_sample_strategy="random", windows="head"), rules()).windows) == 1
    exact = lay(facts(17, 16), WindowSettings(frame_sample_strategy="random"), rules())
    assert not windows_of(exact)[0].varies, "a clip that just fits has one start"
    assert {
        w.sampling for w in lay(facts(40, 16), plain(WindowSettings(frame_sample_strategy="random")), rules()).windows
    } == {"even"}


def test_windows_begin_at_the_containers_keyframes() -> None:
    clip = facts(80, 16, (0, 12, 24, 36, 48, 60, 72))
    settings = WindowSettings(frame_sample_strategy="keyframe")
    assert [w.start * 16 for w in lay(clip, settings, rules()).windows] == [0, 24, 48]
    every = WindowSettings(frame_sample_strategy="keyframe", windows="slide")
    assert [w.start * 16 for w in lay(clip, every, rules()).windows] == [0, 12, 24, 36, 48, 60]
    head = WindowSettings(frame_sample_strategy="keyframe", windows="head")
    assert [w.start for w in lay(clip, head, rules()).windows] == [0.0]
    short = lay(facts(14, 16), settings, rules())
    assert [w.frames for w in short.windows] == [13]


def test_no_window_crosses_a_scene_cut() -> None:
    settings = WindowSettings(frame_sample_strategy="keyframe", keyframe_source="scenes")
    laid = lay(facts(100, 16), settings, rules(), cuts=(20 / 16, 24 / 16, 60 / 16))
    assert [(w.start * 16, w.frames) for w in laid.windows] == [(0, 17), (24, 17), (41, 17), (60, 17), (77, 17)]
    assert laid.seconds_cut == pytest.approx(15 / 16)
    nothing = lay(facts(12, 16), settings, rules(), cuts=(4 / 16, 8 / 16))
    assert nothing.reason == "too_short"
    assert "none of its 3 scenes" in str(nothing.detail)


def test_stretch_squeezes_the_whole_clip_into_one_window() -> None:
    laid = lay(facts(68, 16), WindowSettings(stretch=True), rules())
    (window,) = laid.windows
    assert [time * 16 for time in window.times] == pytest.approx([4 * i for i in range(17)])
    assert (laid.speed, laid.seconds_cut) == (pytest.approx(4), 0)
    assert lay(facts(17, 16), WindowSettings(stretch=True), rules()).speed == 1
    drawn = windows_of(lay(facts(68, 16), WindowSettings(stretch=True, frame_sample_strategy="random"), rules()))[0]
    times = take(drawn, 0, 0).times
    assert list(times) == sorted(times)
    assert len(set(times)) == 17
    assert 0 <= times[0] <= times[-1] < 68 / 16
    assert times != take(drawn, 1, 0).times


def test_a_short_clip_holds_its_last_frame_where_that_is_asked_for() -> None:
    clip = facts(10, 16)
    laid = lay(clip, WindowSettings(pad_short="freeze"), rules())
    (window,) = laid.windows
    assert shown_at(clip, window.times) == [*range(10), *[9] * 7]
    assert laid.repeats_share == pytest.approx(7 / 17)
    assert laid.seconds_cut == pytest.approx(0)
    assert lay(facts(3, 16), WindowSettings(pad_short="freeze"), rules()).reason is None
    assert [w.frames for w in lay(facts(34, 16), WindowSettings(pad_short="freeze"), rules()).windows] == [17, 17]


def test_every_kth_frame_is_kept() -> None:
    laid = lay(facts(34, 16), WindowSettings(max_frames=17, keep_every=2), rules())
    assert laid.fps == 8
    assert [[round(t * 16) for t in w.times] for w in laid.windows] == [list(range(0, 17, 2)), list(range(17, 34, 2))]


def test_temporal_augmentation_moves_windows_and_swaps_neighbours() -> None:
    laid = lay(facts(51, 16), WindowSettings(temporal_augmentation=True), rules())
    windows = windows_of(laid)
    assert len({window.id for window in windows}) == 3
    swapped = 0
    for variant in range(200):
        shown = [round(time * 16 * 1000) / 1000 for time in take(windows[1], variant, 0).times]
        start = min(shown)
        assert 8.5 - 1e-3 <= start <= 25.5 + 1e-3
        order = [round(frame - start) for frame in shown]
        assert sorted(order) == list(range(17))
        assert all(abs(place - frame) <= 1 for place, frame in enumerate(order))
        swapped += sum(place > frame for place, frame in enumerate(order))
    assert 0.08 < swapped / (200 * 16) < 0.11  # each pair with p = 0.1, unless its left one was swapped already
    assert take(windows[1], PLAIN, 0).times == tuple(sorted(take(windows[1], PLAIN, 0).times))


def test_an_image_is_one_window_of_one_frame() -> None:
    still = Facts("a.png", "png", 96, 64, 0, (0.0,), 0.0, 0.0, (0,), "image", still=True)
    (window,) = lay(still, WindowSettings(), rules()).windows
    assert (window.frames, window.times) == (1, (0.0,))
    refused = lay(still, WindowSettings(), rules(0, 49))
    assert (refused.reason, refused.detail) == (
        "too_short",
        "an image is one frame, and this model takes exactly 49 frames",
    )


STRATEGIES = st.sampled_from(["uniform", "random", "keyframe"])
LAYOUTS = st.sampled_from(["chunks", "head", "slide"])


@given(
    st.integers(2, 300),
    st.sampled_from([8, 16, 23.976, 30, 60]),
    st.integers(1, 40),
    STRATEGIES,
    LAYOUTS,
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_every_take_of_every_window_lies_inside_the_clip(
    frames: int, fps: float, wanted: int, strategy: str, layout: str, augment: bool, variant: int, keep: int
) -> None:
    clip = facts(frames, fps, tuple(range(0, frames, 12)))
    settings = WindowSettings(
        max_frames=wanted,
        frame_sample_strategy=strategy,
        windows=layout,
        temporal_augmentation=augment,
        keep_every=keep,
        window_stride=5,
    )
    laid = lay(clip, settings, rules())
    assert (laid.windows == ()) == (laid.reason is not None)
    for window in windows_of(laid):
        for times in (take(window, variant, 1).times, take(window, PLAIN, 1).times):
            assert len(times) == window.shape.frames == snap_frames(window.shape.frames, rules())
            shown_at(clip, times)
    assert len({window.id for window in windows_of(laid)}) == len(laid.windows)
