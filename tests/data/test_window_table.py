"""Windows and clips as arrays are what they are as objects: bit for bit, in order."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from videotune.data.buckets import BucketKey, buckets, is_shown
from videotune.data.clip_table import ClipColumns, IdArray
from videotune.data.frame_sampling import draw_frames
from videotune.data.library import Library
from videotune.data.media_info import MediaInfo
from videotune.data.packed_integers import PackedIntegers, pack
from videotune.data.window_placement import _plain_times
from videotune.data.window_table import (
    WindowTable,
    earlier_copies,
    most_expensive_first,
)
from videotune.latent_cache.exposure import exposure, views_of_clips
from videotune.latent_cache.sampler import Schedule, times_seen, views_by_position
from videotune.types import DETERMINISTIC_VARIANT, Clip, ClipShape, Pacing, Window

SHAPES = [
    ClipShape(17, 48, 80, 16.0),
    ClipShape(17, 80, 48, 16.0),
    ClipShape(1, 64, 64, 16.0),
    ClipShape(9, 48, 80, 23.976, sound=True),
]
PACINGS = [Pacing(), Pacing(batch_size=2), Pacing(until_step=40), Pacing(from_step=41)]


def random_library(seed: int, clips: int = 40) -> Library:
    """A library of clips with repeats, pacings and companions, whose windows are objects."""
    rng = random.Random(seed)
    all_clips = []
    windows = []
    for number in range(clips):
        clip_id = f"{rng.getrandbits(128):032x}"
        kind = rng.choice(["train", "train", "regularization"])
        clip = Clip(
            clip_id,
            f"{number}.mp4",
            f"source {number}",
            (f"caption {number}",),
            kind=kind,
            repeats=rng.choice([1, 1, 2, 5]),
            pacing=PACINGS[0] if number == 0 else rng.choice(PACINGS),
            still=rng.random() < 0.3,
        )
        all_clips.append(clip)
        companions = (("loss_mask", f"mask {number}"),) if rng.random() < 0.3 else ()
        for _ in range(rng.randrange(4)):
            start = rng.random() * 5
            window = Window(
                clip_id,
                start,
                start + rng.random() + 0.5,
                rng.choice(SHAPES),
                sampling=rng.choice(["even", "hold", "start", "frames"]),
                swaps=rng.random() < 0.2,
                resize=rng.choice(["center", "random", "pad"]),
                flip=rng.random() < 0.2,
                companions=companions,
            )
            windows.append(window)
    windows.append(Window(all_clips[0].id, 0.0, 1.0, SHAPES[0]))
    return Library(tuple(all_clips), tuple(windows), (), (), (), (), {})


def buckets_of_objects(library: Library) -> dict[BucketKey, list[Window]]:
    """The buckets, made window by window."""
    clips = {clip.id: clip for clip in library.clips}
    groups: dict[BucketKey, list[Window]] = {}
    for first_step in (1, 41):
        for copy in range(max(clip.repeats for clip in library.clips)):
            for window in library.windows:
                clip = clips[window.clip_id]
                if copy < clip.repeats and is_shown(clip.pacing, first_step):
                    minus_pixels, _ = most_expensive_first(window.shape)
                    pacing = clip.pacing
                    key = BucketKey(
                        first_step,
                        minus_pixels,
                        window.shape,
                        pacing.batch_size,
                        pacing.probability,
                    )
                    groups.setdefault(key, []).append(window)
    return dict(sorted(groups.items()))


@pytest.mark.parametrize("seed", range(6))
def test_a_table_is_equal_to_its_windows(seed: int) -> None:
    windows = random_library(seed).windows
    table = WindowTable.of(windows)
    assert table == windows
    assert windows == tuple(table)
    assert table != windows[:-1]
    assert [table[index] for index in range(-3, 3)] == [
        windows[index] for index in range(-3, 3)
    ]
    assert table[2:9:3] == windows[2:9:3]
    with pytest.raises(IndexError):
        table[len(windows)]

    positions = np.array([3, 1, 1, 0])
    part = table.take(positions)
    assert part == [windows[position] for position in positions]
    assert part.take(np.array([2, 0])) == [windows[1], windows[3]]
    assert part.used_clip_ids() == {window.clip_id for window in part}
    assert table.shape_counts() == Counter(window.shape for window in windows)
    assert {kind.varies for kind in part.used_kinds()} == {w.varies for w in part}


@pytest.mark.parametrize("seed", range(12))
def test_buckets_of_arrays_are_those_of_objects(seed: int) -> None:
    library = random_library(seed)
    expected = buckets_of_objects(library)
    made = buckets(library)
    if any(
        clip.pacing.from_step > 1 or clip.pacing.until_step for clip in library.clips
    ):
        assert list(made) == list(expected)
    assert {key: list(windows) for key, windows in made.items()} == expected


@pytest.mark.parametrize("seed", range(4))
def test_views_of_arrays_are_those_of_objects(seed: int) -> None:
    library = random_library(seed)
    made = buckets(library)
    sizes = tuple(len(windows) for windows in made.values())
    schedule = Schedule(seed, sizes, (3,) * len(sizes))
    for steps in (0, 1, 17, 400):
        arrays = views_by_position(schedule, steps)
        assert [views.tolist() for views in arrays] == times_seen(schedule, steps)
        expected = exposure(times_seen(schedule, steps), list(made.values())).clips
        views = views_of_clips(arrays, list(made.values()), library.columns)
        found = {
            clip.id: int(count)
            for clip, count in zip(library.clips, views, strict=True)
            if count >= 0
        }
        assert found == dict(expected)


def test_earlier_copies_of_a_window_are_counted() -> None:
    (bucket, *_) = buckets(random_library(3)).values()
    copies: Counter[Window] = Counter()
    expected = []
    for window in bucket:
        expected.append(copies[window])
        copies[window] += 1
    assert earlier_copies(bucket).tolist() == expected
    assert earlier_copies(tuple(bucket)).tolist() == expected
    assert max(expected) > 0


@pytest.mark.parametrize("seed", range(4))
def test_plain_times_of_arrays_are_those_of_samples(seed: int) -> None:
    for window in random_library(seed, 80).windows:
        times = draw_frames(window, DETERMINISTIC_VARIANT, seed=0).times
        assert _plain_times(window).tolist() == list(times)


@pytest.mark.parametrize("seed", range(4))
def test_frames_of_arrays_are_those_of_times(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ticks = tuple(np.cumsum(rng.integers(1, 90, 300)).tolist())
    info = MediaInfo(
        "", "h264", 8, 8, ticks, 0.05, 24.0, (0,), "mp4", time_base=(1, 1000)
    )
    stamps = np.array(info.timestamps)
    near = stamps[rng.integers(0, 300, 500)] + rng.normal(0, 0.003, 500)
    times = np.clip(np.concatenate([near, stamps]), 0, info.seconds)
    assert info.frame_indices(times).tolist() == info.frames_at(times.tolist())
    assert info.seconds == info.timestamps[-1] + info.frame_seconds

    restored: Any = MediaInfo.from_json(info.to_json())
    assert restored == info
    assert isinstance(restored.ticks, PackedIntegers)
    assert (restored.ticks[0], restored.ticks[-1], restored.ticks[7:9]) == (
        ticks[0],
        ticks[-1],
        ticks[7:9],
    )
    assert hash(restored.ticks) == hash(ticks)
    assert replace(restored, ticks=ticks) == info


def test_no_integers_are_packed_too() -> None:
    empty = PackedIntegers(pack(()), ())
    assert len(empty) == 0
    assert empty == ()
    with pytest.raises(IndexError):
        empty[0]


def test_positions_of_ids() -> None:
    ids = IdArray.of(["b", "a", "ccc", "a"])
    assert ids.positions(["a", "ccc", "x", "b", ""]).tolist() == [3, 2, -1, 0, -1]
    assert list(ids[1:3]) == ["a", "ccc"]
    assert IdArray.of([]).positions(["a"]).tolist() == [-1]
    assert len(ClipColumns.of(()).ids) == 0
