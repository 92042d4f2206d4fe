"""Frame counts that models take, windows laid over clips, and the frames that samples
of them show.

And sizes: about the asked area, multiples of the model's side, the clip's own aspect,
no silent upscaling.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clips import RATES as RATE_OF
from tests.support.datasets import RULES, info_of
from videotune.config.data_schema import VideoConfig
from videotune.data.clip_sizes import (
    choose_size,
    padded_box,
    parse_resolution,
    upscale_factor,
)
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_counts import (
    frames_in,
    planned_frames,
    smallest_window,
    snap_frames,
)
from videotune.data.frame_sampling import draw_frames
from videotune.data.media_info import MediaInfo
from videotune.data.window_placement import (
    WindowPlacement,
    place_windows,
    without_randomness,
)
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules
from videotune.types import DETERMINISTIC_VARIANT, Window


def rules(step: int, rest: int) -> VideoRules:
    return replace(RULES, frame_step=step, frame_rest=rest)


def sampled(
    info: MediaInfo, of: VideoRules = RULES, cuts: tuple[float, ...] = (), **video: Any
) -> WindowPlacement:
    return place_windows(info, VideoConfig(**video), of, cuts)


def times(window: Window) -> tuple[float, ...]:
    return draw_frames(window, DETERMINISTIC_VARIANT, 0).times


def too_short(info: MediaInfo, *of: Any, **how: Any) -> str:
    with pytest.raises(ClipProblem) as caught:
        sampled(info, *of, **how)
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
    assert planned_frames(VideoConfig(max_frames=17), RULES) == (17, None)
    assert planned_frames(VideoConfig(), RULES) == (
        17,
        "max_frames 16 becomes 17: this model takes 4n+1 frames",
    )
    assert planned_frames(VideoConfig(max_frames=16, frames=9), RULES) == (9, None)
    with pytest.raises(VideotuneError, match="Set it to 21"):
        planned_frames(VideoConfig(frames=20, strict_frames=True), RULES)
    with pytest.raises(VideotuneError, match=r"single frames\. Set it to 1"):
        planned_frames(VideoConfig(strict_frames=True), rules(0, 1))
    with pytest.raises(VideotuneError, match="temporal_compression_ratio"):
        sampled(info_of(34, 16), temporal_compression_ratio=6)
    with pytest.raises(VideotuneError, match="stretch"):
        planned_frames(
            VideoConfig(stretch=True, frame_sample_strategy="keyframe"), RULES
        )


def test_a_short_clip_takes_the_largest_window_that_it_fills_or_none() -> None:
    laid = sampled(info_of(20, 24), max_frames=33)  # 13 frames at 16 fps
    assert [w.shape.frames for w in laid.windows] == [13]
    assert laid.seconds_cut == pytest.approx(20 / 24 - 13 / 16)
    assert (
        too_short(info_of(6, 24)) == "has 4 frames at 16 fps; the smallest window is 5"
    )
    assert too_short(info_of(20, 24), min_frames=17, max_frames=33)
    assert sampled(info_of(6, 24), min_frames=1).windows[0].shape.frames == 1
    assert (
        sampled(info_of(60, 24), min_frames=17, max_frames=33).windows[0].shape.frames
        == 33
    )


RATES = st.sampled_from([8, 12, 16, 23.976, 24, 25, 30, 60])


@given(st.integers(2, 400), RATES, st.integers(1, 40), st.booleans())
def test_used_and_cut_seconds_are_the_clip(
    frames: int, fps: float, wanted: int, head: bool
) -> None:
    clip = info_of(frames, fps)
    how = {"max_frames": wanted, "windows": "head" if head else "chunks"}
    if frames_in(clip.seconds, 16) < smallest_window(VideoConfig(**how), RULES):
        assert too_short(clip, **how)
        return
    laid = sampled(clip, **how)
    used = sum(w.shape.frames for w in laid.windows) / 16
    assert used + laid.seconds_cut == pytest.approx(clip.seconds, abs=1e-5)


@pytest.mark.parametrize("count", [5, 17])
@pytest.mark.parametrize("fps", [8, 15, 23.976, 24, 25, 29.97, 30, 50, 60])
def test_a_clip_of_whole_windows_gives_all_of_them(fps: float, count: int) -> None:
    """At rates whose quotients are not exact in binary too, nothing is lost to
    rounding.
    """
    rate = float(RATE_OF.get(fps, fps))
    how: dict[str, Any] = {"frames": count, "target_fps": rate, "max_duration": 1e6}
    for windows in range(1, 24):
        keyframes = tuple(range(0, windows * count, count))
        clip = info_of(windows * count, fps, keyframes)
        assert len(sampled(clip, **how).windows) == windows
        random = sampled(clip, **how, frame_sample_strategy="random").windows
        assert [window.shape.frames for window in random] == [count] * windows
        at_keys = sampled(clip, **how, frame_sample_strategy="keyframe").windows
        assert len(at_keys) == windows
        assert [w.start for w in at_keys] == pytest.approx(
            [index * count / rate for index in range(windows)]
        )
        slides = sampled(clip, **how, windows="slide", window_stride=count).windows
        assert len(slides) == windows
        # A list of counts gives the windows of each.
        both = sampled(clip, **(how | {"frames": [1, count]})).windows
        assert sum(window.shape.frames == count for window in both) == windows


@pytest.mark.parametrize("stride", [None, 4, 17, 30])
def test_sliding_windows_begin_a_stride_apart(stride: int | None) -> None:
    """Half a window apart, unless a stride is set: as many as end within the clip."""
    clip = info_of(5 * 17, 16)
    how = {"frames": 17, "target_fps": 16, "windows": "slide", "window_stride": stride}
    windows = sampled(clip, **how).windows
    step = stride or 17 // 2
    expected = [index * step / 16 for index in range((5 * 17 - 17) // step + 1)]
    assert [window.start for window in windows] == pytest.approx(expected)


def test_random_windows_share_the_clip_among_them() -> None:
    """40 frames hold two windows of 17; their starts are random in the two halves of
    the 23 that are possible.
    """
    first, second = sampled(info_of(40, 16), frame_sample_strategy="random").windows
    for variant in range(50):
        a, b = (
            draw_frames(first, variant, seed=3),
            draw_frames(second, variant, seed=3),
        )
        assert 0 <= a.times[0] <= 11.5 / 16 <= b.times[0] <= 23 / 16
        assert [y - x for x, y in pairwise(a.times)] == pytest.approx([1 / 16] * 16)
        assert b.times[-1] < 40 / 16
    assert len({draw_frames(first, variant, 3).times for variant in range(50)}) == 50
    assert (
        draw_frames(first, 1, 3) == draw_frames(first, 1, 3) != draw_frames(first, 1, 4)
    )
    assert times(first)[0] == pytest.approx(5.75 / 16)
    assert (
        len(
            sampled(
                info_of(40, 16), frame_sample_strategy="random", windows="head"
            ).windows
        )
        == 1
    )
    (exact,) = sampled(info_of(17, 16), frame_sample_strategy="random").windows
    assert not exact.varies, "a clip that just fits has one start"
    plain = without_randomness(
        VideoConfig(frame_sample_strategy="random", temporal_augmentation=True)
    )
    assert {
        w.sampling for w in place_windows(info_of(40, 16), plain, RULES).windows
    } == {"even"}


def test_no_window_crosses_a_scene_cut() -> None:
    how = {"frame_sample_strategy": "keyframe", "keyframe_source": "scenes"}
    laid = sampled(info_of(100, 16), cuts=(20 / 16, 24 / 16, 60 / 16), **how)
    assert [w.start * 16 for w in laid.windows] == [0, 24, 41, 60, 77]
    assert laid.seconds_cut == pytest.approx(15 / 16)
    assert "none of its 3 scenes" in too_short(
        info_of(12, 16), cuts=(4 / 16, 8 / 16), **how
    )


def test_stretch_squeezes_the_whole_clip_into_one_window() -> None:
    laid = sampled(info_of(68, 16), stretch=True)
    (window,) = laid.windows
    assert [time * 16 for time in times(window)] == pytest.approx(
        [4 * i for i in range(17)]
    )
    assert (laid.speed, laid.seconds_cut) == (pytest.approx(4), 0)
    assert sampled(info_of(17, 16), stretch=True).speed == 1
    (random,) = sampled(
        info_of(68, 16), stretch=True, frame_sample_strategy="random"
    ).windows
    some, other = (draw_frames(random, variant, 0).times for variant in (0, 1))
    assert 0 <= some[0] <= some[-1] < 68 / 16
    assert (list(some), some == other) == (sorted(set(some)), False)


def test_temporal_augmentation_moves_windows_and_swaps_neighbours() -> None:
    windows = sampled(info_of(51, 16), temporal_augmentation=True).windows
    assert len({window.id for window in windows}) == 3
    swapped = 0
    for variant in range(200):
        frames = [
            round(time * 16 * 1000) / 1000
            for time in draw_frames(windows[1], variant, 0).times
        ]
        start = min(frames)
        assert 8.5 - 1e-3 <= start <= 25.5 + 1e-3
        order = [round(frame - start) for frame in frames]
        assert sorted(order) == list(range(17))
        assert all(abs(place - frame) <= 1 for place, frame in enumerate(order))
        swapped += sum(place > frame for place, frame in enumerate(order))
    assert (
        0.08 < swapped / (200 * 16) < 0.11
    )  # each pair with p = 0.1, unless its left one was swapped already
    assert times(windows[1]) == tuple(sorted(times(windows[1])))


def test_an_image_is_one_window_of_one_frame() -> None:
    still = MediaInfo("a.png", "png", 96, 64, (0,), 0.0, 0.0, (0,), "image", still=True)
    (window,) = sampled(still).windows
    assert (window.shape.frames, times(window)) == (1, (0.0,))
    assert (
        too_short(still, rules(0, 49))
        == "an image is one frame, and this model takes exactly 49 frames"
    )


SETTINGS = {
    "max_frames": st.integers(1, 40),
    "frame_sample_strategy": st.sampled_from(["uniform", "random", "keyframe"]),
    "windows": st.sampled_from(["chunks", "head", "slide"]),
    "temporal_augmentation": st.booleans(),
    "temporal_compression_ratio": st.sampled_from([4, 8, 12]),
    "pad_short": st.sampled_from([None, "freeze"]),
    "min_frames": st.sampled_from([None, 1]),
    "keyframe_source": st.sampled_from(["container", "scenes"]),
}


def has_room(clip: MediaInfo, video: VideoConfig, cuts: list[float]) -> bool:
    """Whether the smallest window fits in the clip, or in one of its scenes."""
    seconds = min(clip.seconds, video.max_duration)
    interval = video.temporal_compression_ratio // RULES.temporal_stride
    planned, _ = planned_frames(video, RULES)
    if video.pad_short and frames_in(seconds, 16, interval) < planned:
        return True

    bounds = [0.0, seconds]
    by_scenes = video.keyframe_source == "scenes"
    if by_scenes and video.frame_sample_strategy == "keyframe":
        bounds = [0.0, *(cut for cut in cuts if cut < seconds - 1e-6), seconds]
    longest = max(end - begin for begin, end in pairwise(bounds))
    return frames_in(longest, 16, interval) >= smallest_window(video, RULES)


@given(st.integers(2, 300), RATES, st.integers(0, 3), st.fixed_dictionaries(SETTINGS))
def test_every_sample_of_every_window_lies_inside_the_clip(
    frames: int, fps: float, variant: int, video: Any
) -> None:
    clip = info_of(frames, fps, tuple(range(0, frames, 12)))
    cuts = (2.5, 1.0)
    if not has_room(clip, VideoConfig(**video), sorted(cuts)):
        assert too_short(clip, cuts=cuts, window_stride=5, **video)
        return
    windows = sampled(clip, cuts=cuts, window_stride=5, **video).windows
    for window in windows:
        for some in (draw_frames(window, variant, 1).times, times(window)):
            assert (
                len(some)
                == window.shape.frames
                == snap_frames(window.shape.frames, RULES)
            )
            clip.frames_at(some)
    assert len({window.id for window in windows}) == len(windows)


def size(width: int, height: int, value: Any, multiple: int = 16) -> tuple[int, int]:
    rules = replace(RULES, side_multiple=multiple)
    return choose_size(width, height, parse_resolution(value, rules), rules)


def test_an_integer_is_an_area_at_the_clips_aspect() -> None:
    assert size(1000, 1000, 512) == (512, 512)
    assert size(1920, 1080, 512) == (384, 688)
    assert size(1080, 1920, 512) == (688, 384)
    assert size(720, 480, 512, 32) == (416, 640)
    assert size(1280, 720, "512") == size(1280, 720, 512)


SIDES, MULTIPLES = st.sampled_from([256, 384, 512, 768]), st.sampled_from([8, 16, 32])


@given(st.integers(64, 4000), st.integers(64, 4000), SIDES, MULTIPLES)
def test_integer_sizes_are_near_in_area_and_aspect(
    width: int, height: int, side: int, multiple: int
) -> None:
    if max(width, height) > 4 * min(width, height):
        return
    high, wide = size(width, height, side, multiple)
    assert high % multiple == wide % multiple == 0
    assert abs(math.log(high * wide / side**2)) < 0.35
    assert abs(math.log(wide / high * height / width)) < math.log(
        (1 + multiple / high) * (1 + multiple / wide)
    )
    assert size(height, width, side, multiple) == (wide, high)
    assert (wide >= high) == (width >= height) or wide == high


def test_aspect_counts_twice_as_much_as_area() -> None:
    """Its error is cropped away: 400 × 592 is nearer in area."""
    assert size(720, 480, 480) == (384, 576)
    assert size(480, 720, 480) == (576, 384)


def test_of_equal_sizes_the_one_that_crops_least_is_taken() -> None:
    for sizes in (["480x832", "832x480"], ["832x480", "480x832"]):
        assert size(1920, 1080, sizes) == (480, 832)
        assert size(1080, 1920, sizes) == (832, 480)


def test_an_exact_size() -> None:
    assert size(1920, 1080, "480x832") == (480, 832)
    assert size(100, 100, "480 X 832") == (480, 832)
    with pytest.raises(
        VideotuneError, match=r'multiples of 32. The nearest is "512x960"'
    ):
        size(1920, 1080, "500x950", 32)


def test_a_list_takes_the_largest_that_needs_no_upscaling() -> None:
    sizes = ["256x256", "480x832", "832x480", "720x1280"]
    assert size(1920, 1080, sizes) == (720, 1280)
    assert size(1270, 720, sizes) == (480, 832)
    assert size(720, 1270, sizes) == (832, 480)
    assert size(400, 400, sizes) == (256, 256)
    assert size(100, 100, sizes) == (256, 256)
    assert upscale_factor(100, 100, size(100, 100, sizes)) == pytest.approx(2.56)
    assert size(1920, 1080, [256, 512]) == (384, 688)
    assert size(300, 300, [256, 512]) == (256, 256)


@pytest.mark.parametrize(
    "bad", ["big", "480x", 0, 8, -1, [], True, "480x832x3", ["512", "huge"], 1.5]
)
def test_nonsense_is_an_error(bad: Any) -> None:
    with pytest.raises(VideotuneError, match="resolution"):
        parse_resolution(bad, RULES)


@pytest.mark.parametrize(
    "picture", [(1920, 1080), (1080, 1920), (640, 640), (333, 777), (3, 4000)]
)
@pytest.mark.parametrize("size", [(64, 64), (48, 80), (832, 480)])
def test_a_padded_picture_lies_in_the_middle_of_its_frame(
    picture: tuple[int, int], size: tuple[int, int]
) -> None:
    top, left, high, wide = padded_box(*picture, size)
    assert 0 <= top <= size[0] - high - top <= top + 1
    assert 0 <= left <= size[1] - wide - left <= left + 1
    assert high == size[0] or wide == size[1]
    if min(picture) > 100:
        assert wide / high == pytest.approx(picture[0] / picture[1], rel=0.04)


def test_shrinking_gives_the_size_a_factor_smaller() -> None:
    for shrink in (1, 2, 4):
        high, wide = choose_size(
            1920, 1080, parse_resolution(512, RULES, shrink), RULES, shrink
        )
        assert high % RULES.side_multiple == wide % RULES.side_multiple == 0
        assert high * wide == pytest.approx((512 / shrink) ** 2, rel=0.12)
    with pytest.raises(VideotuneError, match="multiples of 32"):
        parse_resolution("480x848", RULES, 2)
