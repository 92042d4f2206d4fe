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
