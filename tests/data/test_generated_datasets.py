"""Generated datasets under random settings: no file unaccounted for, planned frames decoded, nothing dropped."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.clips import noise, write_clip
from tests.data_kit import config_of
from videotune.config.schema import Config
from videotune.data.dataset import Library, buckets, scan, to_json, totals
from videotune.data.decode import decode
from videotune.data.file_checks import REASONS
from videotune.data.frame_sampling import planned_frames, sample_window
from videotune.types import PLAIN, VideoRules

RULES = [VideoRules(4, 1, 16, 16.0, 8, 4), VideoRules(8, 1, 16, 8.0, 8, 4), VideoRules(0, 1, 16, 24.0, 8, 4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real files of many kinds, and junk."""
    folder = tmp_path_factory.mktemp("made")
    rng = random.Random(0)
    for i, fps in enumerate([8, 12, 16, 23.976, 24, 25, 29.97, 30, 50, 60] * 2):
        high, wide = rng.choice([(64, 96), (96, 64), (64, 64), (48, 128)])
        suffix = rng.choice([".mp4", ".mkv", ".avi", ".webm", ".mov"])
        write_clip(folder / f"clip{i}{suffix}", noise(rng.randint(3, 120), high, wide, seed=i), fps)
    times = np.cumsum([0, *rng.choices([0.02, 0.033, 0.05, 0.2], k=49)]).tolist()
    write_clip(folder / "uneven.mp4", noise(50, seed=90), 30, times=times)
    write_clip(folder / "turned.mp4", noise(40, seed=91), 24, rotation=90)
    for i in range(3):
        Image.fromarray(noise(1, 64 + 32 * i, 96, seed=70 + i)[0]).save(folder / f"still{i}.png")
    write_clip(folder / "one.mp4", noise(1))
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("hello " * 100)
    whole = (folder / "turned.mp4").read_bytes()
    (folder / "headless.mp4").write_bytes(whole[: len(whole) // 2])
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
        "resolution": 64 if shrink else rng.choice([32, 64, "32x48", ["48x32", "32x48", 48]]),
        "resize": rng.choice(["center", "random", "pad", "stretch"]),
        "missing_caption": "skip",
        "validation_fraction": rng.choice([0.0, 0.2]),
        "seed": rng.randint(0, 9),
    }


def generate(rng: random.Random, made: Path, folder: Path, files: list[str]) -> list[dict[str, Any]]:
    """One or two folders of some of the files, by links, with captions or without."""
    datasets = []
    for part in range(rng.choice([1, 2])):
        inside = folder / f"set{part}"
        inside.mkdir(parents=True)
        for name in rng.sample(files, rng.randint(1, len(files))):
            os.link(made / name, inside / name)
            if rng.random() < 0.8:
                caption = rng.choice([b"a cat\na dog", b"a clip", b"", b"\xff"])
                (inside / name).with_suffix(".txt").write_bytes(caption)
        kind = rng.choice(["train", "train", "regularization"])
        datasets.append({"path": str(inside), "repeats": rng.choice([1, 1, 3]), "kind": kind})
    return datasets


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_generated_datasets_keep_every_promise(made: Path, tmp_path: Path, block: int) -> None:
    """Twenty-five datasets a block."""
    files = sorted(path.name for path in made.iterdir())
    index = tmp_path / "index.json"
    for number in range(25):
        rng = random.Random(1000 * block + number)
        datasets = generate(rng, made, tmp_path / str(number), files)
        config, rules = config_of(*datasets, **some_settings(rng)), rng.choice(RULES)
        library = scan(config, rules, index)
        found = sum(len([p for p in Path(one.path).iterdir() if p.suffix != ".txt"]) for one in config.datasets)
        every_file_is_accounted_for(library, found)
        planned_frames_are_decoded(library, config, rules, rng)
        buckets_hold_every_window(library)


def every_file_is_accounted_for(library: Library, found: int) -> None:
    counts = totals(library)
    assert counts["found"] == found == counts["used"] + counts["held_out"] + counts["skipped"]
    assert {reason for _, reason, _ in library.skipped} <= set(REASONS)
    assert all(detail for _, _, detail in library.skipped)
    assert {w.clip_id for w in library.windows} == {clip.id for clip in library.clips if not clip.held_out}
    assert {w.clip_id for w in library.held_out_windows} == {clip.id for clip in library.clips if clip.held_out}
    held = {clip.source for clip in library.clips if clip.held_out}
    assert not held & {clip.source for clip in library.clips if not clip.held_out and clip.kind == "train"}
    account = to_json(library)
    assert sum(clip["windows"] for clip in account["clips"]) == len(library.windows) + len(library.held_out_windows)


def planned_frames_are_decoded(library: Library, config: Config, rules: VideoRules, rng: random.Random) -> None:
    planned, _ = planned_frames(config.video_config, rules)
    every = (*library.windows, *library.held_out_windows)
    for window in rng.sample(every, min(2, len(every))):
        shape, variant = window.shape, rng.choice([PLAIN, 0, 1])
        sample = sample_window(window, variant, config.seed)
        assert len(sample.times) == shape.frames <= planned
        frames = decode(
            library.media[window.clip_id], sample.times, shape.height, shape.width, window.resize, sample.place
        )
        assert frames.shape == (shape.frames, shape.height, shape.width, 3)


def buckets_hold_every_window(library: Library) -> None:
    """As often as its clip is repeated."""
    repeats = {clip.id: clip.repeats for clip in library.clips}
    entries = Counter(window.id for bucket in buckets(library).values() for window in bucket)
    assert entries == {window.id: repeats[window.clip_id] for window in library.windows}
