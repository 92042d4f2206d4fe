"""Folders become a library: every file accounted for, the split, captions, what the
account says and warns about.

Also of generated datasets under random settings: no file unaccounted for, planned
frames decoded, nothing dropped.
"""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import noise, write_clip, write_image
from tests.support.datasets import config_of, scanned
from videotune.config.schema import Config
from videotune.data.buckets import buckets
from videotune.data.dataset import scan, to_json, totals
from videotune.data.decode import decode
from videotune.data.file_checks import REASONS
from videotune.data.frame_counts import planned_frames
from videotune.data.frame_sampling import draw_frames
from videotune.data.library import Library
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules
from videotune.types import DETERMINISTIC_VARIANT, ClipShape


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files by kind: eight good ones, one too short for any window, and junk."""
    folder = tmp_path_factory.mktemp("made")
    for i in range(8):
        write_clip(folder / f"good{i}.mp4", noise(30 + 3 * i, seed=i))
    write_clip(folder / "tiny.mp4", noise(5, seed=99))
    write_clip(folder / "one.mp4", noise(1))
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("hello " * 100)
    whole = (folder / "good0.mp4").read_bytes()
    (folder / "headless.mp4").write_bytes(whole[: len(whole) // 2])
    return folder


def dataset(
    made: Path,
    folder: Path,
    files: dict[str, str],
    captions: dict[str, bytes | None] | None = None,
) -> Path:
    """Copy {name: kind} into the guide's layout, with a caption each unless
    ``captions`` says otherwise.
    """
    for name, kind in files.items():
        target = folder / "videos" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / f"{kind}.mp4", target)
        caption = (captions or {}).get(name, f"a clip of {kind}".encode())
        if caption is not None:
            place = (folder / "captions" / name).with_suffix(".txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(caption)
    return folder


def test_clips_windows_and_accounts(made: Path, tmp_path: Path) -> None:
    library = scanned(dataset(made, tmp_path, {"b.mp4": "good7", "a.mp4": "good0"}))
    assert [Path(clip.path).name for clip in library.clips] == ["a.mp4", "b.mp4"]
    assert [clip.captions for clip in library.clips] == [
        ("a clip of good0",),
        ("a clip of good7",),
    ]
    # good0: 30 frames at 24 are 20 at 16, one window; good7: 51 are 34, two windows
    assert [w.clip_id for w in library.windows] == [library.clips[0].id] + [
        library.clips[1].id
    ] * 2
    assert [(w.start, w.end) for w in library.windows][1:] == [
        (0.0, 17 / 16),
        (17 / 16, 34 / 16),
    ]
    assert {w.shape for w in library.windows} == {ClipShape(17, 48, 80, 16.0)}
    account = library.accounts[1]
    facts = {"used": True, "held_out": False, "windows": 2, "frames": 34}
    assert (
        account
        | facts
        | {"source_frames": 51, "width": 96, "height": 64, "shape": "17x48x80"}
        == account
    )
    assert totals(library) == {"found": 2, "used": 2, "held_out": 0, "skipped": 0}


def test_every_reason(made: Path, tmp_path: Path) -> None:
    kinds = [
        "good0",
        "tiny",
        "one",
        "empty",
        "text",
        "headless",
        "good1",
        "good2",
        "good3",
    ]
    files = {f"{kind}.mp4": kind for kind in kinds} | {"good0_again.mp4": "good0"}
    captions = {"good1.mp4": None, "good2.mp4": b"\n", "good3.mp4": b"\xff\xfe"}
    library = scanned(dataset(made, tmp_path, files, captions), missing_caption="skip")
    assert {Path(path).name: reason for path, reason, _ in library.skipped} == {
        "tiny.mp4": "too_short",
        "one.mp4": "one_frame",
        "empty.mp4": "empty",
        "text.mp4": "not_a_video",
        "headless.mp4": "unreadable",
        "good0_again.mp4": "duplicate",
        "good1.mp4": "missing_caption",
        "good2.mp4": "empty_caption",
        "good3.mp4": "undecodable_caption",
    }
    details = {Path(path).name: detail for path, _, detail in library.skipped}
    assert "good0.mp4, whose captions" not in details["good0_again.mp4"]
    assert details["tiny.mp4"] == "has 3 frames at 16 fps; the smallest window is 5"
    assert totals(library) == {"found": 10, "used": 1, "held_out": 0, "skipped": 9}


def test_a_missing_caption_is_an_error_that_lists_the_clips(
    made: Path, tmp_path: Path
) -> None:
    files = {f"n{i}.mp4": f"good{i}" for i in range(4)}
    dataset(made, tmp_path, files, {"n0.mp4": None, "n1.mp4": b"", "n2.mp4": b"\xff"})
    with pytest.raises(VideotuneError) as caught:
        scanned(tmp_path, missing_caption="error")
    text = str(caught.value)
    assert all(
        name in text
        for name in (
            "3 clips",
            "n0.mp4",
            "n1.mp4",
            "n2.mp4",
            "--allow-skips 3",
            "missing_caption=empty",
            "UTF-8",
        )
    )
    assert "n3.mp4" not in text
    with pytest.raises(
        VideotuneError, match="1 clip has no usable caption"
    ):  # what cannot be read is not empty
        scanned(tmp_path)
    (tmp_path / "captions" / "n2.txt").write_text("a cat\na dog")
    captions = [("",), ("",), ("a cat", "a dog"), ("a clip of good3",)]
    assert [clip.captions for clip in scanned(tmp_path).clips] == captions
    text_of = scanned(tmp_path, missing_caption="text", missing_caption_text="a thing")
    assert [clip.captions for clip in text_of.clips] == [
        ("a thing",),
        ("a thing",),
        *captions[2:],
    ]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 source videos, four of which are cut in two."""
    folder = tmp_path_factory.mktemp("many") / "many"
    names = [f"v{i}" for i in range(20)] + [
        f"w{i}_part{k}" for i in range(4) for k in (1, 2)
    ]
    for seed, name in enumerate(names):
        write_clip(folder / f"{name}.mp4", noise(20, 32, 32, seed=seed))
    return folder


def test_held_out_by_source(many: Path) -> None:
    library = scanned(
        many,
        validation_fraction=0.25,
        resize="random",
        video={"frame_sample_strategy": "random"},
    )
    held = {clip.source for clip in library.clips if clip.held_out}
    assert len(held) == 6
    assert not held & {clip.source for clip in library.clips if not clip.held_out}
    ids = {clip.id for clip in library.clips if clip.held_out}
    assert {w.clip_id for w in library.held_out_windows} == ids
    assert not any(window.varies for window in library.held_out_windows)
    assert all(window.varies for window in library.windows)
    assert not {w.clip_id for w in library.windows} & ids
    assert totals(library) == {
        "found": 28,
        "used": 28 - len(ids),
        "held_out": len(ids),
        "skipped": 0,
    }
    assert not any("validation" in note for note in library.notes)


def test_the_split_depends_on_the_seed_and_on_names_alone(
    many: Path, tmp_path: Path
) -> None:
    def held(folder: Path, **changes: Any) -> set[str]:
        return {
            Path(clip.path).stem
            for clip in scanned(folder, **changes).clips
            if clip.held_out
        }

    assert held(many) == {"v11", "v13"}, "as in all versions: validation losses compare"
    first = held(many, seed=1)
    assert len({s.split("_")[0] for s in first}) == 2
    assert held(many, seed=1) == first
    assert any(held(many, seed=s) != first for s in (2, 3))
    assert len({s.split("_")[0] for s in held(many, validation_fraction=0.01)}) == 2
    assert held(many, validation_fraction=0.0) == set()
    # the same folder elsewhere, with a clip that is skipped
    copy = tmp_path / many.name
    shutil.copytree(many, copy)
    (copy / "a_broken.mp4").touch()
    assert held(copy, seed=1) == first


def test_notes_on_frames_and_rate(made: Path, tmp_path: Path) -> None:
    dataset(made, tmp_path, {"a.mp4": "good0"})
    notes = scanned(tmp_path, video={"target_fps": 24}).notes
    assert not any("becomes" in note for note in notes), "nobody asked for 16"
    assert "0.67x as fast" in notes[0]
    asked = scanned(tmp_path, video={"max_frames": 20}).notes
    assert "max_frames 20 becomes 21: this model takes 4n+1 frames" in asked
    assert scanned(tmp_path, video={"frames": 17}, validation_fraction=0.0).notes == ()


def test_buckets_come_largest_first(made: Path, tmp_path: Path) -> None:
    dataset(
        made,
        tmp_path,
        {"a.mp4": "tiny", "b.mp4": "good0", "c.mp4": "good7", "d.mp4": "good3"},
    )
    library = scanned(tmp_path, video={"frames": 33, "min_frames": 1})
    found = buckets(library)
    assert [key.shape.frames for key in found] == [33, 25, 17, 1]
    assert sorted(w.id for ws in found.values() for w in ws) == sorted(
        w.id for w in library.windows
    )
    assert [row["shape"] for row in to_json(library)["buckets"]] == [
        str(key.shape) for key in found
    ]


def test_a_dataset_named_twice_is_refused(made: Path, tmp_path: Path) -> None:
    dataset(made, tmp_path, {"a.mp4": "good0"})
    with pytest.raises(VideotuneError, match="named 2 times"):
        scanned(tmp_path, tmp_path)


def test_folders_that_begin_with_a_number_repeat_their_clips(tmp_path: Path) -> None:
    wanted = {
        "10_ohwx horse/a": 20,
        "1_b/b": 2,
        "2024_holiday/c": 2,
        "02_intro/d": 2,
        "plain/e": 2,
        "10_x/2_y/g": 20,
    }
    wanted["f"] = 2
    root = tmp_path / "set"
    for i, name in enumerate(wanted):
        write_clip(root / f"{name}.mp4", noise(17, seed=i), 16)
    library = scanned({"path": str(root), "repeats": 2})
    found = {
        Path(clip.path).relative_to(root).with_suffix("").as_posix(): clip.repeats
        for clip in library.clips
    }
    assert found == wanted
    assert any(
        "10_ohwx horse 10" in note and "2024" not in note for note in library.notes
    )
    assert [clip.repeats for clip in scanned(root / "10_x" / "2_y").clips] == [2]
    held = scanned({"path": str(root / "10_x"), "kind": "validation"}, root / "1_b")
    assert {clip.repeats for clip in held.clips} == {1}


def hints(
    tmp_path: Path,
    frames: np.ndarray,
    fps: float,
    caption: str = "a cat",
    **changes: Any,
) -> tuple[str, ...]:
    """The warnings and notes on one clip."""
    path = write_clip(tmp_path / "set" / "a.mp4", frames, fps)
    path.with_suffix(".txt").write_text(caption)
    account = scanned(tmp_path / "set", **changes).accounts[0]
    return (*account["warnings"], *account["notes"])


PORTRAIT = {"resolution": "32x48"}


LONG = {"video": {"frames": 33}}


@pytest.mark.parametrize(
    ("frames", "fps", "changes", "said"),
    [
        (noise(17), 16, {}, ""),
        (
            noise(17),
            16,
            {"resolution": "128x192"},
            "upscaled 2x: 96x64 pixels to 192x128",
        ),
        (
            noise(17),
            8,
            LONG,
            "48% of the frames repeat the one before: 8 fps is slower than the 16 fps of training",
        ),
        (noise(40), 16, {}, "0.38 of 2.50 s are in no window"),
        (noise(34), 16, {}, ""),
        (
            noise(64),
            60,
            {},
            "60 fps is far above the 16 fps of training: most frames are left out",
        ),
        (
            noise(68),
            16,
            {"video": {"stretch": True}},
            "stretch: motion plays 4x as fast as filmed",
        ),
        (
            noise(17, 96, 48),
            16,
            PORTRAIT,
            "the crop keeps 33% of the picture: 48x96 becomes 48x32",
        ),
        (
            noise(17, 96, 48),
            16,
            PORTRAIT | {"resize": "pad"},
            "black borders fill 67% of the frame: 48x96 in 48x32",
        ),
        (
            noise(17, 96, 48),
            16,
            PORTRAIT | {"resize": "stretch"},
            "distorted: 48x96 becomes 48x32",
        ),
        (noise(17, 96, 48), 16, {"resolution": ["32x48", "64x32"]}, ""),
        (
            np.zeros((34, 64, 96, 3), np.uint8),
            16,
            {},
            "100% of it is black or one flat colour",
        ),
        (
            noise(1).repeat(34, 0),
            16,
            {},
            "100% of it is frozen: the picture does not change",
        ),
    ],
)
def test_what_an_account_warns_of(
    tmp_path: Path, frames: np.ndarray, fps: float, changes: Any, said: str
) -> None:
    assert hints(tmp_path, frames, fps, **changes) == ((said,) if said else ())


def test_cuts_inside_windows_and_caption_hints_are_warned_of_once(
    tmp_path: Path,
) -> None:
    (warning,) = hints(
        tmp_path, noise(17), 16, caption="a cat, then a dog\na dog, then a cat"
    )
    assert "sequence" in warning
    scenes = np.concatenate(
        [noise(1, seed=1).repeat(20, 0), noise(1, seed=2).repeat(14, 0)]
    )
    assert any(
        text.startswith("1 cut inside the windows (at 1.25 s)")
        for text in hints(tmp_path, scenes, 16)
    )
    video = {"frame_sample_strategy": "keyframe", "keyframe_source": "scenes"}
    assert not any(
        "cut inside" in text for text in hints(tmp_path, scenes, 16, video=video)
    )


@pytest.mark.parametrize(
    ("captions", "used"),
    [
        ({"kitten": "a kitten", "kitten (1)": "ohwx"}, "kitten"),
        ({"kitten": None, "kitten (1)": "a kitten"}, "kitten (1)"),
        ({"kitten": "a kitten", "a": "ohwx", "kitten (1)": ""}, "a"),
        ({"kitten": "", "kitten (1)": "a kitten"}, "kitten (1)"),
    ],
)
def test_of_copies_the_described_one_of_the_shortest_name_is_used(
    tmp_path: Path, captions: dict[str, str | None], used: str
) -> None:
    """A space sorts before a dot, so a file manager's copy comes before its original."""
    for name, caption in captions.items():
        write_clip(tmp_path / f"{name}.mp4", noise(20, seed=3), 16)
        if caption is not None:
            (tmp_path / f"{name}.txt").write_text(caption)
    library = scanned(tmp_path, missing_caption="skip")
    assert [Path(clip.path).stem for clip in library.clips] == [used]
    assert library.clips[0].captions == (captions[used],)
    assert {reason for _, reason, _ in library.skipped} == {"duplicate"}


def test_a_copy_in_a_later_dataset_stays_the_copy(tmp_path: Path) -> None:
    for folder, name in (("first", "a long name"), ("second", "b")):
        write_clip(tmp_path / folder / f"{name}.mp4", noise(20, seed=3), 16)
        (tmp_path / folder / f"{name}.txt").write_text(folder)
    write_clip(tmp_path / "second" / "other.mp4", noise(20, seed=4), 16)
    (tmp_path / "second" / "other.txt").write_text("other")
    library = scanned(tmp_path / "first", tmp_path / "second")
    names = {Path(clip.path).stem for clip in library.clips}
    assert names == {"a long name", "other"}


def test_near_duplicates_are_named(tmp_path: Path) -> None:
    for name, crf in (("a", "18"), ("b", "24")):
        write_clip(
            tmp_path / f"{name}.mp4",
            noise(20, 128, 192, seed=5),
            16,
            options={"crf": crf},
        )
    library = scanned(tmp_path)
    said = [
        warning
        for account in library.accounts
        for warning in account["warnings"]
        if "same" in warning
    ]
    assert said == [f"looks nearly the same as {name}.mp4" for name in "ba"]
    assert library.clips[0].source == library.clips[1].source


def test_mixed_frame_rates_are_noted_of_the_whole(tmp_path: Path) -> None:
    for i, fps in enumerate([24, 24, 30, 60]):
        write_clip(tmp_path / "set" / f"{'abcd'[i]}.mp4", noise(60, seed=i), fps)
    notes = scanned(tmp_path / "set").notes
    assert any(
        note.startswith("3 frame rates are mixed: 24 fps (2), 30 fps (1), 60 fps (1)")
        for note in notes
    )
    write_clip(tmp_path / "slow" / "a.mp4", noise(20), 8)
    assert any(
        "slower than the 16 fps" in note for note in scanned(tmp_path / "slow").notes
    )
    write_clip(
        tmp_path / "clear" / "a.mov", noise(20), 16, codec="qtrle", pix_fmt="argb"
    )
    assert any(
        "transparency is ignored" in warning
        for warning in scanned(tmp_path / "clear").accounts[0]["warnings"]
    )
    as_mask = scanned(tmp_path / "clear", loss_mask={"outside": 0.0})
    assert not any("transparency" in text for text in as_mask.accounts[0]["warnings"])


MODELS = [
    VideoRules(4, 1, 16, 16.0, 8, 4),
    VideoRules(8, 1, 16, 8.0, 8, 4),
    VideoRules(0, 1, 16, 24.0, 8, 4),
]


@pytest.fixture(scope="module")
def mixed(made: Path) -> Path:
    """Real files of many kinds, and junk."""
    folder, rng = made.with_name("mixed"), random.Random(0)
    shutil.copytree(
        made, folder, ignore=shutil.ignore_patterns("good[1-7].mp4", "tiny.mp4")
    )
    for i, fps in enumerate([8, 12, 16, 23.976, 24, 25, 29.97, 30, 50, 60] * 2):
        high, wide = rng.choice([(64, 96), (96, 64), (64, 64), (48, 128)])
        suffix = rng.choice([".mp4", ".mkv", ".avi", ".webm", ".mov"])
        write_clip(
            folder / f"clip{i}{suffix}",
            noise(rng.randint(3, 120), high, wide, seed=i + 20),
            fps,
        )
    times = np.cumsum([0, *rng.choices([0.02, 0.033, 0.05, 0.2], k=49)]).tolist()
    write_clip(folder / "uneven.mp4", noise(50, seed=90), 30, times=times)
    write_clip(folder / "turned.mp4", noise(40, seed=91), 24, rotation=90)
    for i in range(3):
        write_image(folder / f"still{i}.png", noise(1, 64 + 32 * i, 96, seed=70 + i)[0])
    return folder


def some_settings(rng: random.Random) -> dict[str, Any]:
    """Any of the settings that decide what becomes of a clip."""
    shrink = rng.random() < 0.15
    return {
        "video": {
            "max_frames": rng.choice([1, 5, 8, 16, 33]),
            "min_frames": rng.choice([None, 1]),
            "target_fps": rng.choice([None, 8.0, 24.0]),
            "max_duration": rng.choice([0.5, 2.0, 10.0]),
            "windows": rng.choice(["chunks", "head", "slide"]),
            "window_stride": rng.choice([None, 3]),
            "frame_sample_strategy": rng.choice(["uniform", "random", "keyframe"]),
            "keyframe_source": rng.choice(["container", "scenes"]),
            "pad_short": rng.choice([None, None, "freeze"]),
            "temporal_augmentation": rng.random() < 0.3,
            "temporal_compression_ratio": rng.choice([None, None, 8]),
            "spatial_compression_ratio": 16 if shrink else None,
        },
        "resolution": 64
        if shrink
        else rng.choice([32, 64, "32x48", ["48x32", "32x48", 48]]),
        "resize": rng.choice(["center", "random", "pad", "stretch"]),
        "missing_caption": "skip",
        "validation_fraction": rng.choice([0.0, 0.2]),
        "seed": rng.randint(0, 9),
    }


def generate(
    rng: random.Random, mixed: Path, folder: Path, files: list[str]
) -> list[dict[str, Any]]:
    """One or two folders of some of the files, by links, with captions or without."""
    datasets = []
    for part in range(rng.choice([1, 2])):
        inside = folder / f"set{part}"
        inside.mkdir(parents=True)
        for name in rng.sample(files, rng.randint(1, len(files))):
            os.link(mixed / name, inside / name)
            if rng.random() < 0.8:
                caption = rng.choice([b"a cat\na dog", b"a clip", b"", b"\xff"])
                (inside / name).with_suffix(".txt").write_bytes(caption)
        kind = rng.choice(["train", "train", "regularization"])
        datasets.append(
            {"path": str(inside), "repeats": rng.choice([1, 1, 3]), "kind": kind}
        )
    return datasets


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_generated_datasets_keep_every_promise(
    mixed: Path, tmp_path: Path, block: int
) -> None:
    """Twenty-five datasets a block."""
    files = sorted(path.name for path in mixed.iterdir())
    index = tmp_path / "index.sqlite"
    for number in range(25):
        rng = random.Random(1000 * block + number)
        datasets = generate(rng, mixed, tmp_path / str(number), files)
        config, rules = config_of(*datasets, **some_settings(rng)), rng.choice(MODELS)
        library = scan(config, rules, index)
        found = sum(
            len([p for p in Path(one.path).iterdir() if p.suffix != ".txt"])
            for one in config.datasets
        )
        every_file_is_accounted_for(library, found)
        planned_frames_are_decoded(library, config, rules, rng)
        buckets_hold_every_window(library)


def every_file_is_accounted_for(library: Library, found: int) -> None:
    counts = totals(library)
    assert (
        counts["found"]
        == found
        == counts["used"] + counts["held_out"] + counts["skipped"]
    )
    assert {reason for _, reason, _ in library.skipped} <= set(REASONS)
    assert all(detail for _, _, detail in library.skipped)
    assert {w.clip_id for w in library.windows} == {
        clip.id for clip in library.clips if not clip.held_out
    }
    assert {w.clip_id for w in library.held_out_windows} == {
        clip.id for clip in library.clips if clip.held_out
    }
    held = {clip.source for clip in library.clips if clip.held_out}
    assert not held & {
        clip.source
        for clip in library.clips
        if not clip.held_out and clip.kind == "train"
    }
    account = to_json(library)
    assert sum(clip["windows"] for clip in account["clips"]) == len(
        library.windows
    ) + len(library.held_out_windows)


def planned_frames_are_decoded(
    library: Library, config: Config, rules: VideoRules, rng: random.Random
) -> None:
    planned, _ = planned_frames(config.video_config, rules)
    every = (*library.windows, *library.held_out_windows)
    for window in rng.sample(every, min(2, len(every))):
        shape, variant = window.shape, rng.choice([DETERMINISTIC_VARIANT, 0, 1])
        sample = draw_frames(window, variant, config.seed)
        assert len(sample.times) == shape.frames <= planned
        size, how = (shape.height, shape.width), (window.resize, sample.crop_position)
        frames = decode(library.media[window.clip_id], sample.times, *size, *how)
        assert frames.shape == (shape.frames, *size, 3)


def buckets_hold_every_window(library: Library) -> None:
    """As often as its clip is repeated."""
    repeats = {clip.id: clip.repeats for clip in library.clips}
    entries = Counter(
        window.id for bucket in buckets(library).values() for window in bucket
    )
    assert entries == {window.id: repeats[window.clip_id] for window in library.windows}
