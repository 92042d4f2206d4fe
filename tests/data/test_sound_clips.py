"""Which clips and windows have sound, and what a scan finds of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import numbered, write_clip, write_image
from tests.support.datasets import scanned
from tests.support.sounds import tone, write_sounding
from videotune.data.dataset import Library, buckets
from videotune.data.probe import probe
from videotune.data.sound import read_sound
from videotune.data.sound_scan import SoundScan, scan_sound
from videotune.data.workers import default_workers

BOTH = ["video", "sound"]
SHORT: Mapping[str, Any] = {"frames": 9, "target_fps": 24.0}
STRETCH: Mapping[str, Any] = {**SHORT, "stretch": True}


def sounding(path: Path, *, level: float = 1.0, **options: Any) -> Path:
    """Write 2 s of pictures with a sine of 2 s."""
    sine = level * tone(44100, options.pop("seconds", 2.0), 440)
    return write_sounding(path, sine, 44100, codec="pcm_s16le", **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clips with sound, with a silent track, without a track, and an image."""
    clips = tmp_path / "clips"
    clips.mkdir()
    sounding(clips / "loud.mov")
    sounding(clips / "silent.mov", level=1e-4)
    write_clip(clips / "none.mov", numbered(48)[::-1])
    write_image(clips / "still.png", numbered(3)[2])
    return clips


def windows_by_clip(library: Library) -> dict[str, set[bool]]:
    """Return whether the windows of each clip have sound, by the file's name."""
    names = {clip.id: Path(clip.path).name for clip in library.clips}
    sounds: dict[str, set[bool]] = {}
    for window in library.windows:
        sounds.setdefault(names[window.clip_id], set()).add(window.shape.sound)
    return sounds


def test_windows_have_sound_where_their_clip_has_some_that_can_be_heard(
    folder: Path,
) -> None:
    library = scanned(folder, video=SHORT, generate=BOTH)
    assert windows_by_clip(library) == {
        "loud.mov": {True},
        "silent.mov": {False},
        "none.mov": {False},
        "still.png": {False},
    }
    shapes = {key.shape for key in buckets(library)}
    videos = {shape.sound for shape in shapes if shape.frames == 9}
    assert videos == {True, False}

    silent = windows_by_clip(scanned(folder, video=SHORT))
    assert set(silent) == {"loud.mov", "silent.mov", "none.mov", "still.png"}
    assert all(sounds == {False} for sounds in silent.values())


def test_what_learns_only_sound_skips_clips_without(folder: Path) -> None:
    library = scanned(folder, video=SHORT, generate=["sound"])
    assert windows_by_clip(library) == {"loud.mov": {True}}
    reasons = {Path(path).name: reason for path, reason, _ in library.skipped}
    assert reasons == dict.fromkeys(("silent.mov", "none.mov", "still.png"), "no_sound")


@pytest.mark.effect("sound.changed_speed")
@pytest.mark.parametrize("video", [STRETCH, SHORT | {"temporal_augmentation": True}])
def test_what_does_not_run_as_filmed_has_no_sound_or_is_refused(
    folder: Path, video: Mapping[str, Any]
) -> None:
    dropped = scanned(
        folder, video=video, generate=BOTH, sound={"changed_speed": "drop"}
    )
    assert windows_by_clip(dropped)["loud.mov"] == {False}
    assert not dropped.skipped

    refused = scanned(
        folder, video=video, generate=BOTH, sound={"changed_speed": "refuse"}
    )
    reasons = {Path(path).name: reason for path, reason, _ in refused.skipped}
    assert reasons == {"loud.mov": "sound_speed"}
    assert set(windows_by_clip(refused)) == {"silent.mov", "none.mov", "still.png"}

    # Nothing is left that only sound could be learnt from.
    foley = scanned(folder, video=video, generate=["sound"])
    assert {reason for _, reason, _ in foley.skipped} == {"no_sound"}
    assert not foley.windows


@pytest.mark.parametrize(
    "video",
    [
        SHORT,
        SHORT | {"frame_sample_strategy": "random"},
        {"frames": 97, "target_fps": 24.0, "pad_short": "freeze"},
        SHORT | {"temporal_compression_ratio": 8},
    ],
)
def test_windows_that_run_as_filmed_keep_their_sound(
    folder: Path, video: Mapping[str, Any]
) -> None:
    library = scanned(
        folder, video=video, generate=BOTH, sound={"changed_speed": "refuse"}
    )
    assert windows_by_clip(library)["loud.mov"] == {True}
    assert not library.skipped


def test_a_held_out_clip_has_sound_too(tmp_path: Path) -> None:
    folders = [tmp_path / "train", tmp_path / "validation"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        sounding(folder / "clip.mov", level=1 - 0.1 * number)
    library = scanned(
        folders[0],
        {"path": str(folders[1]), "kind": "validation"},
        video=SHORT | {"temporal_augmentation": True},
        generate=BOTH,
    )
    assert {window.shape.sound for window in library.windows} == {False}
    assert {window.shape.sound for window in library.held_out_windows} == {True}


def contents_of(index: Path) -> list[dict[str, Any]]:
    return list(json.loads(index.read_text())["contents"].values())


def test_sound_is_scanned_once_and_only_by_runs_that_read_it(
    folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "cache" / "index.json"
    scanned(folder, index=index, video=SHORT)
    assert not any("sound" in row for row in contents_of(index))

    # An index of an earlier version knows nothing of sound.
    value = json.loads(index.read_text())
    for row in value["contents"].values():
        del row["info"]["sound"], row["info"]["unusable_sound"]
    index.write_text(json.dumps(value))

    library = scanned(folder, index=index, video=SHORT, generate=BOTH)
    assert windows_by_clip(library)["loud.mov"] == {True}
    scans = [row["sound"] for row in contents_of(index) if row.get("sound")]
    assert sorted(scan["peak"] > 0.4 for scan in scans) == [False, True]

    written_at = index.stat().st_mtime_ns
    again = scanned(folder, index=index, video=SHORT, generate=BOTH)
    assert again == library
    assert index.stat().st_mtime_ns == written_at

    # A damaged scan is made again.
    value = json.loads(index.read_text())
    for row in value["contents"].values():
        if row.get("sound"):
            row["sound"]["peak"] = "loud"
    index.write_text(json.dumps(value))
    assert scanned(folder, index=index, video=SHORT, generate=BOTH) == library


def test_a_scan_measures_loudness_clipping_and_silence(tmp_path: Path) -> None:
    sine = tone(48000, 1.0, 1000)
    quiet = np.zeros(48000)
    path = write_sounding(
        tmp_path / "a.mov", np.concatenate([sine, quiet]), 48000, codec="pcm_s16le"
    )
    scan = scan_sound(probe(path), 10.0)
    assert scan.peak == pytest.approx(0.5, abs=1e-4)
    assert scan.rms == pytest.approx(0.25, abs=1e-4)
    assert scan.loudness == pytest.approx(-12.04, abs=0.01)
    assert scan.silent == pytest.approx(0.5, abs=0.01)
    assert scan.clipped == 0
    assert not scan.is_silent
    assert len(scan.envelope) == 200
    assert min(scan.envelope[:99]) > 0.49
    assert max(scan.envelope[101:]) == 0
    assert SoundScan.from_json(json.loads(json.dumps(scan.to_json()))) == scan

    # The first second alone is not silent.
    assert scan_sound(probe(path), 1.0).silent == 0

    overdriven = np.clip(3 * tone(48000, 2.0, 1000), -1, 1)
    path = write_sounding(tmp_path / "b.mov", overdriven, 48000, codec="pcm_s16le")
    loud = np.abs(overdriven) >= 0.999
    assert scan_sound(probe(path), 10.0).clipped == pytest.approx(loud.mean(), abs=1e-3)


def test_silence_counts_where_the_track_is_short_or_late(tmp_path: Path) -> None:
    path = sounding(tmp_path / "a.mov", seconds=1.0, sound_at=0.5)
    scan = scan_sound(probe(path), 10.0)
    assert scan.silent == pytest.approx(0.5, abs=0.02)
    assert not any(scan.envelope[:49])
    assert min(scan.envelope[51:149]) > 0.4


def test_a_worker_reads_the_same_samples(tmp_path: Path) -> None:
    info = probe(sounding(tmp_path / "a.mov"))
    arguments = {"info": info, "start": 0.3, "seconds": 0.5, "rate": 16000}
    answer = default_workers().submit("read_sound", arguments).result()
    assert answer.dtype == np.float32
    assert np.array_equal(answer, read_sound(info, 0.3, 0.5, 16000))
