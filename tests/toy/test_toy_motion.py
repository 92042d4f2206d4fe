"""The measures of motion against clips whose motion is known."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.motion import Motion, grown, motion
from videotune.toy.shapes import draw_clip


def drawn(frames: int = 17, fps: float = 16.0) -> NDArray[Any]:
    return draw_clip(np.random.default_rng(4), "red", "square", "left", frames=frames, fps=fps).astype(np.float32)


def measured(clip: NDArray[Any]) -> Motion:
    found = motion(clip)
    assert found is not None
    return found


def test_a_drawn_clip_moves_and_nothing_in_it_flickers() -> None:
    seen = measured(drawn())
    assert seen.energy > 5
    assert (seen.flicker, seen.shimmer) == (0, 0)
    assert seen.jerk < 0.05


def test_a_still_clip_has_no_motion() -> None:
    assert measured(np.repeat(drawn()[8:9], 17, axis=0)) == Motion(0, 0, 0, pytest.approx(0, abs=1e-6))


def test_twice_the_speed_is_about_twice_the_energy() -> None:
    slow, fast = measured(drawn(17, 32.0)), measured(drawn(9, 16.0))
    assert fast.energy / slow.energy == pytest.approx(2, rel=0.15)


def test_each_disturbance_is_seen_by_its_own_measure() -> None:
    clip = drawn()
    calm = measured(clip)
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


def test_a_steady_drift_of_light_is_no_flicker() -> None:
    drift = np.arange(17.0)[:, None, None, None]
    assert measured(drawn() + drift).flicker == pytest.approx(0, abs=1e-4)


def test_a_clip_without_a_subject_is_not_measured() -> None:
    clip = drawn()
    clip[5] = clip[5, 0, 0]
    assert motion(clip) is None


def test_a_mask_grows_by_its_margin_and_not_around_the_edge() -> None:
    mask = np.zeros((9, 9), bool)
    mask[0, 4] = True
    wide = grown(mask, 2)
    assert wide.sum() == 3 * 5
    assert wide[:3, 2:7].all()


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (8, 8, 3), (5, 8, 8, 4)])
def test_other_layouts_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(VideotuneError, match="three frames or more"):
        motion(np.zeros(shape))
