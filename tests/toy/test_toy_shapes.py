from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toymaking.motion import Motion, motion

from videotune.toy.shapes import (
    COLOURS,
    COMBINATIONS,
    DIRECTIONS,
    HELD_OUT,
    KNOWN,
    SHAPES,
    draw_clip,
)


def centres(clip: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Mean column and row of the bright pixels, frame by frame."""
    mask = clip.max(axis=-1) > 150
    rows, columns = np.mgrid[0 : clip.shape[1], 0 : clip.shape[2]]
    return np.array([(columns[m].mean(), rows[m].mean()) for m in mask])


def test_sizes_speeds_and_backgrounds_stay_in_the_trained_ranges() -> None:
    areas, travels, backgrounds = [], [], []
    for seed in range(80):
        clip = draw_clip(np.random.default_rng(seed), "white", "circle", "right").astype(float)
        background = np.median(clip[0])
        backgrounds.append(background)
        areas.append(((clip[8] - background).clip(0) / (240 - background)).mean(axis=-1).sum())
        travels.append(np.diff(centres(clip)[[0, -1], 0])[0] / 64)
    radii = np.sqrt(np.array(areas) / np.pi) / 64
    assert 0.165 < radii.min() < 0.18
    assert 0.21 < radii.max() < 0.225
    assert 0.355 < min(travels) < 0.38
    assert 0.44 < max(travels) < 0.465
    assert 28 <= min(backgrounds) < 33
    assert 55 < max(backgrounds) <= 60


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_shape_moves_the_named_way_and_no_other(direction: str) -> None:
    moved = np.diff(centres(draw_clip(np.random.default_rng(1), "yellow", "square", direction))[[0, -1]], axis=0)[0]
    way = np.array(DIRECTIONS[direction])
    assert moved @ way > 20
    assert abs(moved @ way[::-1]) < 0.5


def test_more_frames_a_second_show_the_same_scene_at_the_same_speed() -> None:
    slow = draw_clip(np.random.default_rng(3), "blue", "circle", "left")
    fast = draw_clip(np.random.default_rng(3), "blue", "circle", "left", frames=34, fps=32)
    longer = draw_clip(np.random.default_rng(3), "blue", "circle", "left", frames=20)
    assert np.array_equal(fast[::2], slow)
    assert np.array_equal(longer[:17], slow)


def test_the_held_out_combinations_are_a_balanced_third() -> None:
    assert (len(COMBINATIONS), len(HELD_OUT), len(KNOWN)) == (72, 24, 48)
    assert set(HELD_OUT) | set(KNOWN) == set(COMBINATIONS)
    assert ("red", "circle", "left") in HELD_OUT
    balance: list[tuple[Iterable[str], int]] = [(COLOURS, 4), (SHAPES, 8), (DIRECTIONS, 6)]
    for part in (HELD_OUT, KNOWN[:24], KNOWN[24:]):
        for place, (words, each) in enumerate(balance):
            assert Counter(look[place] for look in part) == dict.fromkeys(words, each)


def drawn(frames: int = 17, fps: float = 16.0) -> NDArray[Any]:
    return draw_clip(np.random.default_rng(4), "red", "square", "left", frames=frames, fps=fps).astype(np.float32)


def measured(clip: NDArray[Any]) -> Motion:
    found = motion(clip)
    assert found is not None
    return found


def test_each_disturbance_is_seen_by_its_own_measure() -> None:
    clip = drawn()
    calm = measured(clip)
    assert calm.energy > 5
    assert (calm.flicker, calm.shimmer) == (0, 0)
    assert calm.jerk < 0.05
    assert measured(np.repeat(clip[8:9], 17, axis=0)) == Motion(0, 0, 0, pytest.approx(0, abs=1e-6))
    blinking = np.where(np.arange(len(clip)) % 2, 4.0, 0.0)[:, None, None, None]
    subject = np.abs(clip - clip[0, 0, 0]).max(axis=-1, keepdims=True) > 50
    dark = measured(clip + blinking * ~subject)
    assert dark.flicker == pytest.approx(8)
    assert (dark.shimmer, dark.jerk) == (calm.shimmer, pytest.approx(calm.jerk, abs=0.02))
    lit = measured(clip - blinking * subject)
    assert lit.shimmer == pytest.approx(8)
    assert (lit.flicker, lit.jerk) == (calm.flicker, pytest.approx(calm.jerk, abs=0.02))
    shaken = measured(np.stack([np.roll(frame, 2 * (i % 2), axis=0) for i, frame in enumerate(clip)]))
    assert shaken.jerk == pytest.approx(4, abs=0.2)
    assert (shaken.flicker, shaken.shimmer) == (0, 0)
    clip[5] = clip[5, 0, 0]
    assert motion(clip) is None, "without a subject"
