"""Sizes: about the asked area, multiples of the model's side, the clip's own aspect, no silent upscaling."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videotune.data.buckets import choose_size, padded_box, parse_resolution, upscale_factor
from videotune.errors import VideotuneError
from videotune.types import VideoRules

RULES = VideoRules(4, 1, 16, 16.0, 8, 4)


def size(width: int, height: int, value: Any, multiple: int = 16) -> tuple[int, int]:
    rules = VideoRules(4, 1, multiple, 16.0, 8, 4)
    return choose_size(width, height, parse_resolution(value, rules), rules)


def test_an_integer_is_an_area_at_the_clips_aspect() -> None:
    assert size(1000, 1000, 512) == (512, 512)
    assert size(1920, 1080, 512) == (384, 688)
    assert size(1080, 1920, 512) == (688, 384)
    assert size(720, 480, 512, 32) == (416, 640)
    assert size(1280, 720, "512") == size(1280, 720, 512)


@given(
    st.integers(64, 4000), st.integers(64, 4000), st.sampled_from([256, 384, 512, 768]), st.sampled_from([8, 16, 32])
)
def test_integer_sizes_are_near_in_area_and_aspect(width: int, height: int, side: int, multiple: int) -> None:
    if max(width, height) > 4 * min(width, height):
        return
    high, wide = size(width, height, side, multiple)
    assert high % multiple == wide % multiple == 0
    assert abs(math.log(high * wide / side**2)) < 0.35
    assert abs(math.log(wide / high * height / width)) < math.log((1 + multiple / high) * (1 + multiple / wide))
    assert size(height, width, side, multiple) == (wide, high)
    assert (wide >= high) == (width >= height) or wide == high


def test_an_exact_size() -> None:
    assert size(1920, 1080, "480x832") == (480, 832)
    assert size(100, 100, "480 X 832") == (480, 832)
    with pytest.raises(VideotuneError, match=r'multiples of 32. The nearest is "512x960"'):
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


@pytest.mark.parametrize("bad", ["big", "480x", 0, 8, -1, [], True, "480x832x3", ["512", "huge"], 1.5])
def test_nonsense_is_an_error(bad: Any) -> None:
    with pytest.raises(VideotuneError, match="resolution"):
        parse_resolution(bad, RULES)


@pytest.mark.parametrize("picture", [(1920, 1080), (1080, 1920), (640, 640), (333, 777), (3, 4000)])
@pytest.mark.parametrize("size", [(64, 64), (48, 80), (832, 480)])
def test_a_padded_picture_lies_whole_in_the_middle_of_its_frame(
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
        high, wide = choose_size(1920, 1080, parse_resolution(512, RULES, shrink), RULES, shrink)
        assert high % RULES.side_multiple == wide % RULES.side_multiple == 0
        assert high * wide == pytest.approx((512 / shrink) ** 2, rel=0.12)
    with pytest.raises(VideotuneError, match="multiples of 32"):
        parse_resolution("480x848", RULES, 2)
