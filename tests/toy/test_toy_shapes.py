from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.shapes import (
    COLOURS,
    COMBINATIONS,
    DIRECTIONS,
    EXTRA_SHAPES,
    HELD_OUT,
    KNOWN,
    PALETTE,
    SHAPES,
    Look,
    caption,
    draw_clip,
    draw_wide,
    phrase,
)


def centres(clip: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Mean column and row of the bright pixels, frame by frame."""
    mask = clip.max(axis=-1) > 150
    rows, columns = np.mgrid[0 : clip.shape[1], 0 : clip.shape[2]]
    return np.array([(columns[m].mean(), rows[m].mean()) for m in mask])


def test_the_same_generator_draws_the_same_clip() -> None:
    first, again, other = (draw_clip(np.random.default_rng(s), "red", "ring", "up") for s in (4, 4, 5))
    assert first.dtype == np.uint8
    assert first.shape == (17, 64, 64, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


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


def test_a_larger_side_shows_the_same_scene_larger() -> None:
    small = draw_clip(np.random.default_rng(9), "green", "triangle", "down")
    large = draw_clip(np.random.default_rng(9), "green", "triangle", "down", side=128)
    shrunk = large.reshape(17, 64, 2, 64, 2, 3).mean(axis=(2, 4))
    assert np.abs(shrunk - small).max() < 24  # the soft edge is sampled more finely
    assert np.abs(shrunk - small).mean() < 0.5


def test_the_held_out_combinations_are_a_balanced_third() -> None:
    assert (len(COMBINATIONS), len(HELD_OUT), len(KNOWN)) == (72, 24, 48)
    assert set(HELD_OUT) | set(KNOWN) == set(COMBINATIONS)
    assert ("red", "circle", "left") in HELD_OUT
    balance: list[tuple[Iterable[str], int]] = [(COLOURS, 4), (SHAPES, 8), (DIRECTIONS, 6)]
    for part in (HELD_OUT, KNOWN[:24], KNOWN[24:]):
        for place, (words, each) in enumerate(balance):
            assert Counter(look[place] for look in part) == dict.fromkeys(words, each)


def test_captions_read_like_the_base_models_own() -> None:
    words = [caption("red", "circle", "left", template) for template in range(4)]
    assert words == [
        "a red circle moves left",
        "a red circle moving left",
        "red circle going left",
        "the red circle moves left",
    ]
    assert phrase("zorble", "up") == "a zorble moves up"


@pytest.mark.parametrize("shape", [*SHAPES, *EXTRA_SHAPES])
def test_every_shape_has_a_look_of_its_own(shape: str) -> None:
    others = [s for s in (*SHAPES, *EXTRA_SHAPES) if s != shape]
    drawn = draw_clip(np.random.default_rng(0), "white", shape, "up", frames=1).astype(int)
    for other in others:
        difference = np.abs(drawn - draw_clip(np.random.default_rng(0), "white", other, "up", frames=1)).max(axis=-1)
        assert (difference > 90).sum() > 20, other


@pytest.mark.parametrize("look", [("pink", "circle", "up"), ("red", "star", "up"), ("red", "circle", "away")])
def test_unknown_words_are_named_with_what_there_is(look: Look) -> None:
    bad = next(word for word in look if word in ("pink", "star", "away"))
    with pytest.raises(VideotuneError, match=f"{bad}.*there are"):
        draw_clip(np.random.default_rng(0), *look)


def test_stripes_lie_on_the_shape_alone_and_move_with_it() -> None:
    def drawn(stripes: tuple[tuple[float, float, float], float] | None) -> NDArray[np.int16]:
        clip = draw_clip(np.random.default_rng(5), "orange", "square", "right", stripes=stripes)
        return clip.astype(np.int16)

    plain, striped = drawn(None), drawn(((245, 230, 200), 10.0))
    changed = np.abs(plain - striped).max(axis=-1) > 8
    shape = np.abs(plain - plain[:, :1, :1]).max(axis=-1) > 8
    assert not (changed & ~shape).any()
    assert 0.3 < changed.sum() / shape.sum() < 0.7
    rows = [frame.any(axis=1).nonzero()[0].tolist() for frame in changed]
    assert all(found == rows[0] for found in rows)  # it moves to the right: the rows stay


def test_wide_clips_show_colours_and_shapes_that_have_no_name() -> None:
    clips = [draw_wide(np.random.default_rng(index)) for index in range(24)]
    medians = {tuple(np.median(clip[8][np.abs(clip[8].astype(int) - clip[8, 0, 0]).max(-1) > 40], 0)) for clip in clips}
    assert len(medians) == 24
    assert not medians & {tuple(map(float, colour)) for colour in PALETTE.values()}
    again = draw_wide(np.random.default_rng(3))
    assert np.array_equal(again, clips[3])
