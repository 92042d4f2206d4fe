"""Which clips come from one video (by names with evidence, by frames that nearly agree), and which are held out."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clips import write_clip
from tests.scenery import pan, shots
from videotune.data.content_scan import scan_content
from videotune.data.media_info import probe
from videotune.data.source_videos import SourceClip, group_by_source, hold_out, near_duplicates
from videotune.toy.dataset import write_dataset

CAMERAS = [
    "IMG_0001", "DSC_0001", "DSCN-0001", "MVI_1001", "GOPR_0001", "GX_0001", "GH010023_01", "VID_20240101_120001",
    "PXL_20240101_1200", "DJI_0001", "MOV_001", "CLIP_001", "video_001", "video_clip_001", "2024-01-01_001",
    "20240101_001", "scene001", "clip_001",
]  # fmt: skip
MARKS = ("_scene003", "-Scene-001", "-part2", ".cut_07", " shot 4", "_seg12", "-SEGMENT-3", "_chunk_0005", " clip 9")


def names(*files: str) -> list[str]:
    """The sources of files by name alone, without the dataset's folder."""
    found, _ = group_by_source(clips_of(*files))
    return [name.removeprefix("set/") for name in found]


def clips_of(*files: str) -> list[SourceClip]:
    return [SourceClip(PurePosixPath("set", file), 5.0) for file in files]


def scanned(path: Path) -> SourceClip:
    info = probe(path)
    return SourceClip(PurePosixPath("set", path.name), info.seconds, scan_content(info, 10.0).signatures)


def filmed(path: Path, frames: np.ndarray, fps: float = 24, **how: object) -> SourceClip:
    return scanned(write_clip(path, frames, fps, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "sources"),
    [
        *(([f"film{mark}", "film", "other"], ["film", "film", "other"]) for mark in MARKS),
        (["film-part2_scene003", "film-part1_scene001"], ["film", "film"]),
        (["IMG_0001-scene-001", "IMG_0001-scene-002", "IMG_0002-scene-001"], ["IMG_0001", "IMG_0001", "IMG_0002"]),
        (["a_1", "a_2", "b_1", "b_2", "c_7"], ["a", "a", "b", "b", "c_7"]),
        (["film_1_01", "film_1_02", "film_2_01", "film_2_02"], ["film_1", "film_1", "film_2", "film_2"]),
        (["a/film_scene1", "b/film_scene2", "a/film"], ["a/film", "b/film", "a/film"]),
    ],
)
def test_names_join_cuts_of_one_video(files: list[str], sources: list[str]) -> None:
    assert names(*(f"{file}.mp4" for file in files)) == sources


@pytest.mark.parametrize("first", CAMERAS)
def test_numbers_of_cameras_and_dates_are_no_cuts(first: str) -> None:
    second = first[:-1] + "7"
    assert (
        len(set(names(f"{first}.mp4", f"{second}.mp4", "film_01.mp4", "film_02.mp4", "play_01.mp4", "play_02.mp4")))
        == 4
    )


def test_one_numbered_set_in_a_folder_is_not_one_video() -> None:
    files = [f"dance_{i:04d}.mp4" for i in range(30)]
    assert len(set(names(*files, "other.mp4"))) == 31
    _, notes = group_by_source(clips_of(*files))
    assert len(notes) == 1
    assert "dance_0000 to dance_0029" in notes[0]
    assert "dance-scene-001" in notes[0]


def test_the_same_shot_exported_again_is_one_source_and_a_near_duplicate(tmp_path: Path) -> None:
    frames = shots([1], 48)
    small = frames.reshape(48, 60, 2, 80, 2, 3).mean((2, 4)).astype(np.uint8)
    clips = [
        filmed(tmp_path / "b.mp4", frames, options={"crf": "18"}),
        filmed(tmp_path / "a.mp4", frames, options={"crf": "35"}),
        filmed(tmp_path / "c.webm", small),
        filmed(tmp_path / "d.mkv", frames[::2], 12),
        filmed(tmp_path / "z.mp4", shots([2], 48)),
    ]
    sources, notes = group_by_source(clips)
    assert sources == ["set/a"] * 4 + ["set/z"]
    assert "4 file names come from 1 source" in notes[0]
    assert near_duplicates(clips) == [(1, 0), (1, 2), (1, 3)]


def test_back_to_back_chunks_are_one_source_and_no_duplicates(tmp_path: Path) -> None:
    whole = pan(5, [i * 2.0 for i in range(96)])
    clips = [
        filmed(tmp_path / f"{name}.mp4", whole[i * 24 : i * 24 + 24])
        for i, name in enumerate(["hund", "katze", "maus", "tier"])
    ]
    assert len(set(group_by_source(clips)[0])) == 1
    assert near_duplicates(clips) == []


def blank_ends(i: int) -> np.ndarray:
    frames = shots([i], 24)
    frames[:8], frames[-8:] = (tone := (0, 0, 255, 255, 128, 128)[i]), tone
    frames[:, 50:60, 70:80] = 200  # a logo on the plain ground
    return frames


def titled(i: int) -> np.ndarray:
    return np.concatenate([np.repeat(shots([99], 1), 6, 0), shots([i], 18)])


@pytest.mark.parametrize("frames_of", [blank_ends, titled])
def test_what_many_videos_have_in_common_does_not_join_them(
    tmp_path: Path, frames_of: Callable[[int], np.ndarray]
) -> None:
    """Black, white and plain frames; a title."""
    clips = [filmed(tmp_path / f"{'abcdef'[i]}.mp4", frames_of(i)) for i in range(6)]
    assert len(set(group_by_source(clips)[0])) == 6


def test_unrelated_clips_are_never_joined(tmp_path: Path) -> None:
    """66 pairs of landscapes and 630 of toy clips: a lone shape on a flat ground says nothing of its source."""
    clips = [filmed(tmp_path / f"{'abcdefghijkl'[i]}.mp4", shots([i], 12)) for i in range(12)]
    for path in write_dataset(tmp_path / "toy", concept_clips=18, reminder_clips=18):
        clips.append(scanned(path))
    by_name, _ = group_by_source([replace(clip, signatures=()) for clip in clips])
    assert group_by_source(clips)[0] == by_name
    assert near_duplicates(clips) == []


def signatures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Made-up signatures of unrelated pictures: smooth noise. uint8 (count, 150)."""
    rows, columns = np.fft.fftfreq(10)[:, None], np.fft.rfftfreq(10)[None]
    light = np.fft.irfft2(
        np.fft.rfft2(rng.normal(size=(count, 10, 10))) / np.maximum(np.hypot(rows, columns), 0.1) ** 1.2, (10, 10)
    )
    light *= rng.uniform(15, 50, (count, 1, 1)) / light.std((1, 2), keepdims=True)
    light += rng.uniform(80, 170, (count, 1, 1)) - light.mean((1, 2), keepdims=True)
    colour = np.repeat(128 + rng.normal(0, 8, (count, 2)), 25, axis=1)
    return np.concatenate([light.reshape(count, 100), colour], 1).clip(0, 255).astype(np.uint8)


def named(rows: np.ndarray) -> list[SourceClip]:
    texts = [base64.b64encode(row.tobytes()).decode() for row in rows]
    stems = ["".join(chr(97 + i // 26**k % 26) for k in (3, 2, 1, 0)) for i in range(len(rows) // 3)]
    return [
        SourceClip(PurePosixPath(f"set/{stem}.mp4"), 5.0, tuple(texts[3 * i : 3 * i + 3]))
        for i, stem in enumerate(stems)
    ]


def test_a_thousand_unrelated_clips_stay_apart() -> None:
    """Half a million pairs."""
    clips = named(signatures(np.random.default_rng(0), 3000))
    assert len(set(group_by_source(clips)[0])) == 1000
    assert near_duplicates(clips) == []


def test_a_thousand_copies_are_one_source_with_one_pair_each() -> None:
    rows = signatures(np.random.default_rng(0), 3)
    clips = named(np.tile(rows, (300, 1)))
    assert set(group_by_source(clips)[0]) == {"set/aaaa"}
    assert near_duplicates(clips) == [(0, i) for i in range(1, 300)]


STEMS = st.text("ab_-0129 ", min_size=1, max_size=8) | st.sampled_from(
    [
        "film_scene001",
        "film-part2",
        "film_1",
        "film_2",
        "play_1",
        "play_2",
        "IMG_0001",
        "scene001",
        "clip_2",
        "_1",
        "a-b_3_4",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEMS, min_size=1, max_size=12, unique=True), st.randoms(), st.integers(0, 2**32 - 1))
def test_sources_do_not_depend_on_the_order_of_clips(stems: list[str], random: Random, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = signatures(rng, 6)[rng.integers(0, 6, 3 * len(stems))]
    plain = named(rows)
    clips = [replace(clip, path=PurePosixPath(f"set/{stem}.mp4")) for stem, clip in zip(stems, plain, strict=True)]
    order = list(range(len(clips)))
    random.shuffle(order)
    shuffled = [clips[i] for i in order]
    sources, notes = group_by_source(clips)
    again, notes_again = group_by_source(shuffled)
    assert [sources[i] for i in order] == again
    assert notes == notes_again
    assert {(clips[i].path, clips[j].path) for i, j in near_duplicates(clips)} == {
        (shuffled[i].path, shuffled[j].path) for i, j in near_duplicates(shuffled)
    }


def videos(count: int) -> list[str]:
    return [f"set/video{i}" for i in range(count)]


def test_whole_videos_are_held_out_from_twenty_on() -> None:
    sources = [name for name in videos(20) for _ in range(3)]
    held, notes = hold_out(sources, ["train"] * 60, 0.1, seed=0)
    chosen = {source for source, out in zip(sources, held, strict=True) if out}
    assert (len(chosen), sum(held), notes) == (2, 6, [])
    few, notes = hold_out(sources[:57], ["train"] * 57, 0.1, seed=0)
    assert not any(few)
    assert [note.startswith("no validation: 19 source videos, 20 are needed (57 clips") for note in notes] == [True]


def test_datasets_of_other_kinds_and_the_split() -> None:
    """A validation dataset takes its place; regularization clips are never held out."""
    kinds = ["train"] * 30 + ["validation"] * 2
    assert hold_out(videos(32), kinds, 0.1, seed=0) == ([False] * 30 + [True] * 2, [])
    _, notes = hold_out([*videos(30), "set/video3", "set/video40"], kinds, 0.1, seed=0)
    assert [note.startswith("validation and training share 1 source video (set/video3)") for note in notes] == [True]
    held, notes = hold_out(videos(20) * 2, ["train"] * 20 + ["regularization"] * 20, 0.5, seed=0)
    assert (sum(held), any(held[20:]), len(notes)) == (10, False, 10)
    assert hold_out(videos(20), ["regularization"] * 20, 0.5, seed=0) == ([False] * 20, [])
