import numpy as np
import pytest
from numpy.typing import NDArray

from videotune.toy.detect import Seen, detect
from videotune.toy.shapes import COMBINATIONS, DIRECTIONS, Look, draw_clip

ZORBLES = [("orange", "diamond", direction) for direction in DIRECTIONS]


def looks(count: int, seed: int) -> list[Look]:
    """Mostly what the base knows, one in five the orange diamond."""
    rng = np.random.default_rng(seed)
    return [ZORBLES[i // 5 % 4] if i % 5 == 0 else COMBINATIONS[rng.integers(72)] for i in range(count)]


def share_right(clips: list[NDArray[np.uint8]], wanted: list[Look]) -> float:
    seen = [detect(clip) for clip in clips]
    return float(np.mean([(s.colour, s.shape, s.direction) == look for s, look in zip(seen, wanted, strict=True)]))


def test_drawn_clips_are_read_right() -> None:
    rng = np.random.default_rng(3)
    wanted = looks(60, seed=1)
    clips = [draw_clip(rng, *look) for look in wanted]
    assert share_right(clips, wanted) >= 0.95
    seen = detect(clips[0])
    assert seen.visible_frames == 17
    assert seen.iou > 0.97


@pytest.mark.parametrize("side", [32, 160])
def test_reading_scales_with_the_side(side: int) -> None:
    rng = np.random.default_rng(7)
    wanted = looks(10, seed=3)
    assert share_right([draw_clip(rng, *look, side=side) for look in wanted], wanted) == 1


def test_a_shape_in_less_than_half_of_the_frames_does_not_count() -> None:
    clip = draw_clip(np.random.default_rng(0), "red", "circle", "up")
    clip[8:] = 40
    assert detect(clip) == Seen(None, None, None, 8, 0.0)
    clip[8] = clip[0]
    assert detect(clip).colour == "red"
    assert detect(np.full((17, 64, 64, 3), 40, np.uint8)) == Seen(None, None, None, 0, 0.0), "empty"
    seen = detect(np.repeat(clip[:1], 17, axis=0))
    assert (seen.colour, seen.shape, seen.direction) == ("red", "circle", None), "it stands still"
