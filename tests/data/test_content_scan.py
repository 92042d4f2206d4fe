"""A content scan: frozen, black, cuts, jitter, damage; what is none of these; and that
it is small and repeatable.

And which clips come from one video (by names with evidence, by frames that nearly
agree), and which are held out.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clips import noise, write_clip, write_image
from tests.support.landscapes import landscape, pan, shots
from videotune.data.content_scan import ContentScan, scan_content
from videotune.data.cuts import CUT_RATIO, find_cuts
from videotune.data.picture_matching import near_duplicates
from videotune.data.probe import probe
from videotune.data.remarks import Remark
from videotune.data.source_clips import SourceClip
from videotune.data.source_videos import group_by_source, hold_out
from videotune.toy.dataset import write_dataset


def seen(path: Path, frames: np.ndarray, **how: Any) -> ContentScan:
    return scan_content(probe(write_clip(path, frames, **how)), 10.0)


def breathing(count: int, fps: float = 24) -> np.ndarray:
    """A picture of which a part rises and falls by 1.5 pixels in 3.5 s, as a chest does
    before a tripod.
    """
    still = landscape(3, 240, 320).astype(np.float32)
    rows, columns = np.mgrid[:240, :320]
    bump = np.exp(-(((columns - 160) / 60) ** 2 + ((rows - 120) / 60) ** 2))
    frames = []
    for i in range(count):
        at = (rows + 1.5 * np.sin(2 * np.pi * i / fps / 3.5) * bump).clip(0, 238)
        low, part = at.astype(int), (at - at.astype(int))[..., None]
        frames.append((1 - part) * still[low, columns] + part * still[low + 1, columns])
    return np.stack(frames).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x264.mp4", {"crf": "23"}),
        ("x264-poor.mp4", {"crf": "38", "preset": "veryfast"}),
        ("vp9.webm", {"deadline": "realtime", "cpu-used": "8"}),
        ("mpeg4.avi", {"b": "2000000"}),
    ],
)
def test_a_still_with_codec_noise_is_frozen(
    tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    frames = np.repeat(landscape(1, 240, 320)[None], 60, 0)
    assert seen(tmp_path / name, frames, options=options).frozen > 0.9


@pytest.mark.parametrize("crf", ["18", "35"])
def test_a_breathing_person_before_a_tripod_is_not_frozen(
    tmp_path: Path, crf: str
) -> None:
    assert seen(tmp_path / "a.mp4", breathing(96), options={"crf": crf}).frozen < 0.6


def test_a_frame_held_for_long_is_a_rest_at_a_variable_rate_too(tmp_path: Path) -> None:
    times = [i / 24 for i in range(24)] + [3 + i / 24 for i in range(24)]
    found = seen(tmp_path / "a.mp4", pan(1, [i * 3.0 for i in range(48)]), times=times)
    assert found.frozen == pytest.approx(2 / 4, abs=0.06)
    assert found.jitter == pytest.approx(1 / 47, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "fps", "crf"),
    [
        ("a.mp4", 24, "20"),
        ("a.mp4", 59.94, "20"),
        ("a.mp4", 8, "35"),
        ("a.mkv", 23.976, "20"),
        ("a.avi", 25, "20"),
    ],
)
def test_a_cut_is_the_timestamp_of_the_first_frame_after_it(
    tmp_path: Path, name: str, fps: float, crf: str
) -> None:
    options = {} if name.endswith(".avi") else {"crf": crf}
    info = probe(
        write_clip(tmp_path / name, shots([1, 2, 3, 4], 20), fps, options=options)
    )
    assert scan_content(info, 99).cuts == tuple(
        info.timestamps[i] for i in (20, 40, 60)
    )


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_fast_movement_at_the_end_of_a_clip_is_no_cut(is_reversed: bool) -> None:
    """The changes and likenesses of an arm that moves fast in a portrait at 8 fps."""
    changes = [31.6, 20.2, 17.2, 15.2, 10.4, 6.8, 6.4, 7.7]
    likenesses = {1: 0.03, 2: 0.5, 3: 0.75, 4: 0.84, 5: 0.86, 6: 0.96, 7: 0.9, 8: 0.9}
    one_shot = [40.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    cut_at = 1
    if is_reversed:
        changes.reverse()
        one_shot.reverse()
        likenesses = {9 - index: value for index, value in likenesses.items()}
        cut_at = 8
    gaps = [0.125] * 9
    assert find_cuts(changes, likenesses, gaps, CUT_RATIO) == []
    assert find_cuts(one_shot, likenesses, gaps, CUT_RATIO) == [cut_at]


def test_a_higher_ratio_finds_fewer_cuts(tmp_path: Path) -> None:
    info = probe(write_clip(tmp_path / "a.mp4", shots([1, 2], 24, 4)))
    assert len(scan_content(info, 99, 3.0).cuts) == 1
    assert scan_content(info, 99, 300.0).cuts == ()


def changed(
    where: Any, change: Callable[[np.ndarray], Any], of: np.ndarray
) -> np.ndarray:
    of[where] = change(of[where])
    return of


def crossed(frames: np.ndarray) -> np.ndarray:
    for i in range(10, 40):  # an object crosses the picture within a second
        left = (i - 10) * 8 - 60
        frames[i, 30:90, max(0, left) : max(0, left + 60)] = (230, 40, 40)
    return frames


def covered(frames: np.ndarray) -> np.ndarray:
    frames[:, :14], frames[:, -14:] = 0, 0
    frames[:, 20:30, 120:150:2] = 255
    return frames


def panned(speed: float) -> np.ndarray:
    return pan(1, [max(0, min(i - 12, 24)) * speed for i in range(48)])


FOUND: dict[str, tuple[Callable[[], np.ndarray], dict[str, Any]]] = {
    "a slow pan": (lambda: pan(1, [i * 0.3 for i in range(60)]), {"frozen": 0, "cuts": ()}),
    "stops halfway": (lambda: pan(1, [min(i, 48) * 2 for i in range(96)]), {"frozen": 0.5}),
    "a slideshow": (lambda: np.repeat(np.stack([landscape(i) for i in range(3)]), 36, 0), {"cuts": (1.5, 3.0), "frozen": 1}),
    **{
        f"one tone, {tone}": (lambda tone=tone: changed(slice(24), lambda _: tone, shots([1], 48)), {"blank": 0.5})
        for tone in (0, 255, 90)
    },
    "a dark room": (lambda: (shots([1], 24) * 0.2).astype(np.uint8), {"blank": 0}),
    "dark shots": (lambda: (shots([1, 2], 24) * 0.25).astype(np.uint8), {"cuts": (1.0,)}),
    "bars and a logo": (lambda: covered(shots([1, 2, 3], 24)), {"cuts": (1.0, 2.0)}),
    "a flash": (lambda: changed(slice(20, 23), lambda _: 255, shots([1], 48)), {"cuts": ()}),
    "a flicker": (lambda: changed(slice(10, 40, 3), lambda x: x // 3, shots([1], 48)), {"cuts": ()}),
    "the light goes out": (lambda: changed(slice(24, 48), lambda x: x // 3, shots([1], 48)), {"cuts": ()}),
    "an object": (lambda: crossed(shots([1], 48)), {"cuts": ()}),
    **{f"a pan of {speed}": (lambda speed=speed: panned(speed), {"cuts": ()}) for speed in (3, 12, 40)},
    "noise that never repeats": (lambda: noise(48), {"cuts": ()}),
    "two frames": (lambda: shots([1], 2), {"cuts": ()}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_a_scan_finds(tmp_path: Path, name: str) -> None:
    frames, wanted = FOUND[name]
    found = seen(tmp_path / "a.mp4", frames())
    assert len(found.signatures) == 3
    for field, value in wanted.items():
        assert getattr(found, field) == (
            value if field == "cuts" else pytest.approx(value, abs=0.05)
        ), field


def test_only_the_first_seconds_are_scanned_and_the_very_last_frame(
    tmp_path: Path,
) -> None:
    info = probe(
        write_clip(tmp_path / "a.mp4", shots([1, 2, 3], 24), options={"g": "24"})
    )
    first, whole = scan_content(info, 0.5), scan_content(info, 10.0)
    assert first.cuts == ()
    assert whole.cuts == (1.0, 2.0)
    assert [
        a == b for a, b in zip(first.signatures, whole.signatures, strict=True)
    ] == [
        True,
        False,
        True,
    ]


def test_damage_late_in_a_file_is_told_and_condemns_nothing(tmp_path: Path) -> None:
    path = write_clip(
        tmp_path / "a.mp4", shots([1, 2], 48), options={"g": "12", "bf": "0"}
    )
    content = bytearray(path.read_bytes())
    at = content.index(b"mdat")
    size = int.from_bytes(content[at - 4 : at], "big")
    begin = at + size * 3 // 4
    content[begin : begin + 3000] = np.random.default_rng(0).bytes(3000)
    path.write_bytes(content)
    found = scan_content(probe(path), 10.0)
    assert 2 < found.damaged_at < 4
    assert scan_content(probe(path), 1.0).damaged_at is None


def test_a_rotated_file_has_the_signatures_of_an_upright_one(tmp_path: Path) -> None:
    frames = shots([1], 12)
    upright = seen(tmp_path / "a.mp4", frames)
    turned = seen(tmp_path / "b.mp4", np.rot90(frames, -1, (1, 2)), rotation=90)
    cells = [
        np.frombuffer(base64.b64decode(x.signatures[0]), np.uint8)
        for x in (upright, turned)
    ]
    assert np.abs(cells[0].astype(int) - cells[1]).max() <= 3


def test_an_image_has_a_signature_alone(tmp_path: Path) -> None:
    found = scan_content(probe(write_image(tmp_path / "a.png", landscape(1))), 10.0)
    assert len(found.signatures) == 1
    assert (found.frozen, found.blank, found.cuts, found.jitter) == (0.0, 0.0, (), 0.0)


CAMERAS = [
    "IMG_0001", "DSC_0001", "DSCN-0001", "MVI_1001", "GOPR_0001", "GX_0001", "GH010023_01", "VID_20240101_120001",
    "PXL_20240101_1200", "DJI_0001", "MOV_001", "CLIP_001", "video_001", "video_clip_001", "2024-01-01_001",
    "20240101_001", "scene001", "clip_001",
]  # fmt: skip
MARKS = (
    "_scene003",
    "-Scene-001",
    "-part2",
    ".cut_07",
    " shot 4",
    "_seg12",
    "-SEGMENT-3",
    "_chunk_0005",
    " clip 9",
)


def names(*files: str) -> list[str]:
    """The sources of files by name alone, without the dataset's folder."""
    found, _, _ = group_by_source(clips_of(*files))
    return [name.removeprefix("set/") for name in found]


def clips_of(*files: str) -> list[SourceClip]:
    return [SourceClip(PurePosixPath("set", f"{file}.mp4"), 5.0) for file in files]


def scanned(path: Path) -> SourceClip:
    info = probe(path)
    return SourceClip(
        PurePosixPath("set", path.name),
        info.seconds,
        scan_content(info, 10.0).signatures,
    )


def filmed(path: Path, frames: np.ndarray, fps: float = 24, **how: Any) -> SourceClip:
    return scanned(write_clip(path, frames, fps, **how))


@pytest.mark.parametrize(
    ("files", "sources"),
    [
        *(
            ([f"film{mark}", "film", "other"], ["film", "film", "other"])
            for mark in MARKS
        ),
        (["film-part2_scene003", "film-part1_scene001"], ["film", "film"]),
        (
            ["IMG_0001-scene-001", "IMG_0001-scene-002", "IMG_0002-scene-001"],
            ["IMG_0001", "IMG_0001", "IMG_0002"],
        ),
        (["a_1", "a_2", "b_1", "b_2", "c_7"], ["a", "a", "b", "b", "c_7"]),
        (
            ["film_1_01", "film_1_02", "film_2_01", "film_2_02"],
            ["film_1", "film_1", "film_2", "film_2"],
        ),
        (["a/film_scene1", "b/film_scene2", "a/film"], ["a/film", "b/film", "a/film"]),
        # Cuts of one video may differ in case.
        (["Sea_1", "sea_2", "b_1", "b_2"], ["Sea", "Sea", "b", "b"]),
        (["Sea-scene-1", "sea-Scene-2", "sea"], ["Sea", "Sea", "Sea"]),
        # Names without a mark of a cut may be ids.
        (["aB", "Ab", "film_scene1"], ["aB", "Ab", "film"]),
        (["A/film_scene1", "a/Film_scene1"], ["A/film", "a/Film"]),
    ],
)
def test_names_join_cuts_of_one_video(files: list[str], sources: list[str]) -> None:
    assert names(*files) == sources


@pytest.mark.parametrize("first", CAMERAS)
def test_numbers_of_cameras_and_dates_are_no_cuts(first: str) -> None:
    assert (
        len(
            set(
                names(
                    first, first[:-1] + "7", "film_01", "film_02", "play_01", "play_02"
                )
            )
        )
        == 4
    )


def test_one_numbered_set_in_a_folder_is_not_one_video() -> None:
    files = [f"dance_{i:04d}" for i in range(30)]
    assert len(set(names(*files, "other"))) == 31
    _, notes, _ = group_by_source(clips_of(*files))
    assert len(notes) == 1
    assert "dance_0000 to dance_0029" in notes[0]
    assert "dance-scene-001" in notes[0]


@pytest.mark.parametrize(
    ("files", "sources"),
    [
        (
            ["horse_a", "Horse_B", "ship-a", "ship-b"],
            ["Horse", "Horse", "ship", "ship"],
        ),
        (["sea_a", "sea_b", "sea_c", "b a", "b b"], ["sea"] * 3 + ["b"] * 2),
        # One series, a gap, a first letter that is missing, a camera's word: no evidence.
        (["horse_a", "horse_b", "ship"], ["horse_a", "horse_b", "ship"]),
        (["horse_a", "horse_c", "ship_a", "ship_b"], None),
        (["horse_b", "horse_c", "ship_a", "ship_b"], None),
        (["clip_a", "clip_b", "video_a", "video_b"], None),
        (["x/horse_a", "y/horse_b", "x/ship_a", "y/ship_b"], None),
        (["horsea", "horseb", "shipa", "shipb"], None),
    ],
)
def test_letters_join_cuts_if_a_folder_has_several_such_names(
    files: list[str], sources: list[str] | None
) -> None:
    assert names(*files) == (sources or files)


@pytest.mark.parametrize(
    ("aside", "is_shared"),
    [(["film_a", "film_b", "sea_a", "sea_b"], True), (["film_a", "sea_a"], False)],
)
def test_cuts_aside_of_a_film_that_is_trained_whole_are_reported(
    aside: list[str], is_shared: bool
) -> None:
    paths = ["train/film.mp4", "train/hill.mp4", *(f"aside/{one}.mp4" for one in aside)]
    clips = [SourceClip(PurePosixPath(path), 5.0) for path in paths]
    sources, _, _ = group_by_source(clips)
    kinds = ["train", "train", *["validation"] * len(aside)]
    _, notes = hold_out(list(sources), kinds, 0.1, 42)
    assert any("cuts of film" in note for note in notes) == is_shared
    assert not any("aside/sea" in note for note in notes)


@pytest.mark.parametrize(
    ("training", "count"),
    [
        (["sea_1", "sea_2", "hill_1", "hill_2"], 1),
        (["sea_1", "sea_2"], 2),
        (["sea_1", "hill_1"], 2),
    ],
)
def test_numbers_are_cuts_where_they_are_in_the_same_place_of_another_dataset(
    training: list[str], count: int
) -> None:
    paths = [f"train/videos/{name}.mp4" for name in training]
    paths += ["aside/town_0.mp4", "aside/town_3.mp4"]
    clips = [SourceClip(PurePosixPath(path), 5.0) for path in paths]
    sources, notes, _ = group_by_source(clips)
    assert len({source for source in sources if "town" in source}) == count
    about_aside = [note for note in notes if "in aside" in note]
    assert ["not treated" in note for note in about_aside] == [count == 2]


@pytest.mark.parametrize(
    ("training", "aside"),
    [
        ("train/film", "aside/film"),
        ("train/videos", "aside"),
        ("train", "aside/videos"),
    ],
)
def test_halves_of_a_film_on_both_sides_are_reported(training: str, aside: str) -> None:
    """A clip that is kept aside is in another dataset, and its half is not."""
    halves = [f"{training}/horse_a", f"{aside}/horse_b"]
    others = [f"{training}/ship_a", f"{training}/ship_b", f"{aside}/tree"]
    clips = [SourceClip(PurePosixPath(f"{name}.mp4"), 5.0) for name in halves + others]
    sources, notes, _ = group_by_source(clips)
    assert len(set(sources)) == 3
    assert "4 clips whose names end in letters" in notes[0]

    kinds = []
    for clip in clips:
        kinds.append("validation" if clip.path.parts[0] == "aside" else "train")
    _, notes = hold_out(list(sources), kinds, 0.1, 42)
    assert "share 1 source video (cuts of horse)" in notes[0]


def test_shared_footage_names_the_clips_that_match(tmp_path: Path) -> None:
    """A film of several subjects joins the clips of each; only one is kept aside."""
    subjects = [shots([number], 48) for number in (1, 2, 3)]
    clips = []
    for number, frames in enumerate(subjects):
        signatures = seen(tmp_path / f"{number}.mp4", frames).signatures
        for path in (f"clips/film-scene-00{number}.mp4", f"clips/{'abc'[number]}.mp4"):
            place = path.replace("clips/c", "held-out/c")
            clips.append(SourceClip(PurePosixPath(place), 2.0, signatures))

    sources, notes, look_alikes = group_by_source(clips)
    assert len(set(sources)) == 1
    assert "a.mp4 and film-scene-000.mp4, which look alike" in notes[-1]

    kinds = []
    for clip in clips:
        kinds.append("validation" if clip.path.parts[0] == "held-out" else "train")
    _, (note, _) = hold_out(list(sources), kinds, 0.1, 42, look_alikes=look_alikes)
    assert "(c.mp4, kept aside, looks like film-scene-002.mp4)" in note
    assert "cuts" not in note

    # The scene is kept aside, too.
    assert clips[4].path.stem == "film-scene-002"
    moved_path = PurePosixPath("held-out/film-scene-002.mp4")
    clips[4] = replace(clips[4], path=moved_path)
    kinds[4] = "validation"
    sources, _, look_alikes = group_by_source(clips)
    _, notes = hold_out(list(sources), kinds, 0.1, 42, look_alikes=look_alikes)
    assert [getattr(note, "code", "") for note in notes] == ["few_dependable"]


def test_the_same_shot_exported_again_is_one_source_and_a_near_duplicate(
    tmp_path: Path,
) -> None:
    frames = shots([1], 48)
    small = frames.reshape(48, 60, 2, 80, 2, 3).mean((2, 4)).astype(np.uint8)
    clips = [
        filmed(tmp_path / "b.mp4", frames, options={"crf": "18"}),
        filmed(tmp_path / "a.mp4", frames, options={"crf": "35"}),
        filmed(tmp_path / "c.webm", small),
        filmed(tmp_path / "d.mkv", frames[::2], 12),
        filmed(tmp_path / "z.mp4", shots([2], 48)),
    ]
    sources, notes, _ = group_by_source(clips)
    assert sources == ["set/a"] * 4 + ["set/z"]
    assert "4 clips show 1 source video" in notes[0]
    assert near_duplicates(clips) == [(1, 0), (1, 2), (1, 3)]


def test_back_to_back_chunks_are_one_source_and_no_duplicates(tmp_path: Path) -> None:
    whole = pan(5, [i * 2.0 for i in range(96)])
    parts = zip(("hund", "katze", "maus", "tier"), np.split(whole, 4), strict=True)
    clips = [filmed(tmp_path / f"{name}.mp4", part) for name, part in parts]
    assert len(set(group_by_source(clips)[0])) == 1
    assert near_duplicates(clips) == []


def test_a_note_on_joined_names_counts_clips(tmp_path: Path) -> None:
    """Not the names, each of which may have several clips."""
    frames = shots([1], 48)
    clips = []
    for name in ("sea-scene-1", "sea-scene-2", "beach-scene-1"):
        clips.append(filmed(tmp_path / f"{name}.mp4", frames))
    sources, notes, _ = group_by_source(clips)
    assert sources == ["set/beach"] * 3
    assert "3 clips show 1 source video" in notes[0]


def test_numbered_names_that_pictures_join_have_one_note(tmp_path: Path) -> None:
    """Not also that they are no cuts of one video."""
    whole = pan(5, [i * 2.0 for i in range(96)])
    parts = zip(("cat_1", "cat_2", "cat_3", "dog"), np.split(whole, 4), strict=True)
    clips = [filmed(tmp_path / f"{name}.mp4", part) for name, part in parts]
    _, notes, _ = group_by_source(clips)
    assert len(notes) == 1
    assert "by their pictures" in notes[0]


def blank_ends(i: int) -> np.ndarray:
    frames = shots([i], 24)
    frames[:8], frames[-8:] = (tone := (0, 0, 255, 255, 128, 128)[i]), tone
    frames[:, 50:60, 70:80] = 200  # a logo on the plain ground
    return frames


def titled(i: int) -> np.ndarray:
    return np.concatenate([np.repeat(shots([99], 1), 6, 0), shots([i], 18)])


@pytest.mark.parametrize("frames_of", [blank_ends, titled])
def test_what_many_videos_have_in_common_does_not_join_them(
    tmp_path: Path, frames_of: Any
) -> None:
    """Black, white and plain frames; a title."""
    clips = [filmed(tmp_path / f"{'abcdef'[i]}.mp4", frames_of(i)) for i in range(6)]
    assert len(set(group_by_source(clips)[0])) == 6


def test_unrelated_clips_are_never_joined(tmp_path: Path) -> None:
    """66 pairs of landscapes and 630 of toy clips: a lone shape on a flat ground says
    nothing of its source.
    """
    clips = [
        filmed(tmp_path / f"{'abcdefghijkl'[i]}.mp4", shots([i], 12)) for i in range(12)
    ]
    for path in write_dataset(tmp_path / "toy", concept_clips=18, reminder_clips=18):
        clips.append(scanned(path))
    by_name, _, _ = group_by_source([replace(clip, signatures=()) for clip in clips])
    assert group_by_source(clips)[0] == by_name
    assert near_duplicates(clips) == []


def signatures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Made-up signatures of unrelated pictures: smooth noise. uint8 (count, 150)."""
    rows, columns = np.fft.fftfreq(10)[:, None], np.fft.rfftfreq(10)[None]
    scale = np.maximum(np.hypot(rows, columns), 0.1) ** 1.2
    light = np.fft.irfft2(
        np.fft.rfft2(rng.normal(size=(count, 10, 10))) / scale, (10, 10)
    )
    light *= rng.uniform(15, 50, (count, 1, 1)) / light.std((1, 2), keepdims=True)
    light += rng.uniform(80, 170, (count, 1, 1)) - light.mean((1, 2), keepdims=True)
    colour = np.repeat(128 + rng.normal(0, 8, (count, 2)), 25, axis=1)
    return (
        np.concatenate([light.reshape(count, 100), colour], 1)
        .clip(0, 255)
        .astype(np.uint8)
    )


def named(rows: np.ndarray) -> list[SourceClip]:
    texts = [base64.b64encode(row.tobytes()).decode() for row in rows]
    stems = [
        "".join(chr(97 + i // 26**k % 26) for k in (3, 2, 1, 0))
        for i in range(len(rows) // 3)
    ]
    threes = zip(stems, zip(*[iter(texts)] * 3, strict=True), strict=True)
    return [
        SourceClip(PurePosixPath(f"set/{stem}.mp4"), 5.0, three)
        for stem, three in threes
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


CUTS = ["film_scene001", "film-part2", "film_1", "film_2", "play_1", "play_2", "IMG_0001", "scene001", "clip_2", "_1",
        "a-b_3_4"]  # fmt: skip
STEMS = st.text("ab_-0129 ", min_size=1, max_size=8) | st.sampled_from(CUTS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(STEMS, min_size=1, max_size=12, unique=True),
    st.randoms(),
    st.integers(0, 2**32 - 1),
)
def test_sources_do_not_depend_on_the_order_of_clips(
    stems: list[str], random: Random, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = signatures(rng, 6)[rng.integers(0, 6, 3 * len(stems))]
    plain = named(rows)
    clips = [
        replace(clip, path=PurePosixPath(f"set/{stem}.mp4"))
        for stem, clip in zip(stems, plain, strict=True)
    ]
    order = list(range(len(clips)))
    random.shuffle(order)
    shuffled = [clips[i] for i in order]
    sources, notes, _ = group_by_source(clips)
    again, notes_again, _ = group_by_source(shuffled)
    assert [sources[i] for i in order] == again
    assert notes == notes_again
    pairs, pairs_again = (
        {(own[i].path, own[j].path) for i, j in near_duplicates(own)}
        for own in (clips, shuffled)
    )
    assert pairs == pairs_again


def videos(count: int) -> list[str]:
    return [f"set/video{i}" for i in range(count)]


def test_whole_videos_are_held_out_from_twenty_on() -> None:
    sources = [name for name in videos(20) for _ in range(3)]
    held, notes = hold_out(sources, ["train"] * 60, 0.1, seed=0)
    chosen = {source for source, out in zip(sources, held, strict=True) if out}
    assert (len(chosen), sum(held), notes) == (2, 6, [])
    few, notes = hold_out(sources[:57], ["train"] * 57, 0.1, seed=0)
    assert not any(few)
    assert [
        note.startswith(
            "no clip is kept aside for checking, so it cannot be told whether the model copies your clips: "
            "19 source videos, 20 are needed (57 clips"
        )
        for note in notes
    ] == [True]


def test_datasets_of_other_kinds_and_the_split() -> None:
    """A validation dataset takes its place; regularization clips are never held out."""
    kinds = ["train"] * 30 + ["validation"] * 2
    held, (note,) = hold_out(videos(32), kinds, 0.1, seed=0)
    assert held == [False] * 30 + [True] * 2
    assert isinstance(note, Remark)
    assert note.code == "few_dependable", "two show only large changes"
    enough = ["train"] * 30 + ["validation"] * 6
    assert hold_out(videos(36), enough, 0.1, seed=0)[1] == []
    kinds_of_one = ["train"] * 30 + ["validation"]
    held, (note,) = hold_out(videos(31), kinds_of_one, 0.1, seed=0)
    assert held == [False] * 30 + [True]
    assert isinstance(note, Remark)
    assert note.code == "few_held_out", "a verdict compares two"
    _, notes = hold_out([*videos(30), "set/video3", "set/video40"], kinds, 0.1, seed=0)
    assert [
        note.startswith("validation and training share 1 source video (cuts of video3)")
        for note in notes
    ] == [True, False]
    held, notes = hold_out(
        videos(20) * 2, ["train"] * 20 + ["regularization"] * 20, 0.5, seed=0
    )
    assert (sum(held), any(held[20:]), len(notes)) == (10, False, 10)
    assert hold_out(videos(20), ["regularization"] * 20, 0.5, seed=0) == (
        [False] * 20,
        [],
    )


def test_a_cut_that_was_moved_to_validation_is_known_by_its_name() -> None:
    """Alone in its folder its number says nothing, beside other cuts of the video it
    does; numbers of cameras and mere numbers never do.
    """
    cuts = ["clips/horse", "clips/horse", "clips/kitten", "clips/kitten"]

    def codes(*validation: str, training: Sequence[str] = cuts) -> list[str]:
        sources = [*training, *validation]
        kinds = ["train"] * len(training) + ["validation"] * len(validation)
        _, notes = hold_out(sources, kinds, 0.1, seed=0)
        of_all = [str(getattr(note, "code", "")) for note in notes]
        return [code for code in of_all if code != "few_dependable"]

    assert codes("held-out/horse_3", "held-out/kitten_1") == ["shared_sources"]
    assert codes("held-out/Horse", "held-out/b") == ["shared_sources"]
    assert codes("held-out/painter_3", "held-out/road_1") == []
    camera = ["clips/IMG", "clips/IMG", "clips/001", "clips/001"]
    assert codes("held-out/IMG_3", "held-out/001", training=camera) == []
    single = ["clips/cat_1", "clips/cat_2"]
    assert codes("held-out/cat_3", "held-out/cat_4", training=single) == []
