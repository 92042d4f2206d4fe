"""Which clips and windows have sound, and what a scan finds of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.datasets import scanned
from tests.support.index_files import read_index, write_index
from tests.support.sounds import (
    sounding,
    sounds_by_clip,
    tone,
    write_sounding,
    write_sounding_folder,
)
from videotune.data.buckets import buckets
from videotune.data.index_rows import Examined
from videotune.data.media_index import MediaIndex
from videotune.data.probe import probe
from videotune.data.remarks import code_of
from videotune.data.sound import read_sound
from videotune.data.sound_scan import SoundScan, scan_sound
from videotune.data.workers import default_workers

BOTH = ["video", "sound"]
SHORT: dict[str, Any] = {"frames": 9, "target_fps": 24.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clips with sound, with a silent track, without a track, and an image."""
    return write_sounding_folder(tmp_path / "clips")


def test_windows_have_sound_where_their_clip_has_some_that_can_be_heard(
    folder: Path,
) -> None:
    library = scanned(folder, video=SHORT, generate=BOTH)
    assert sounds_by_clip(library) == {
        "loud.mov": {True},
        "silent.mov": {False},
        "none.mov": {False},
        "still.png": {False},
    }
    shapes = {key.shape for key in buckets(library)}
    videos = {shape.sound for shape in shapes if shape.frames == 9}
    assert videos == {True, False}

    silent = sounds_by_clip(scanned(folder, video=SHORT))
    assert set(silent) == {"loud.mov", "silent.mov", "none.mov", "still.png"}
    assert all(sounds == {False} for sounds in silent.values())


def test_what_learns_only_sound_skips_clips_without(folder: Path) -> None:
    library = scanned(folder, video=SHORT, generate=["sound"])
    assert sounds_by_clip(library) == {"loud.mov": {True}}
    reasons = {Path(path).name: reason for path, reason, _ in library.skipped}
    assert reasons == dict.fromkeys(("silent.mov", "none.mov", "still.png"), "no_sound")


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
    assert sounds_by_clip(library)["loud.mov"] == {True}
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
    return list(read_index(index)["contents"].values())


def test_sound_is_scanned_once_and_only_by_runs_that_read_it(
    folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "cache" / "index.sqlite"
    scanned(folder, index=index, video=SHORT)
    assert not any("sound" in row for row in contents_of(index))

    # An index of an earlier version knows nothing of sound.
    value = read_index(index)
    for row in value["contents"].values():
        del row["info"]["sound"], row["info"]["unusable_sound"]
    write_index(index, value)

    library = scanned(folder, index=index, video=SHORT, generate=BOTH)
    assert sounds_by_clip(library)["loud.mov"] == {True}
    scans = [row["sound"] for row in contents_of(index) if row.get("sound")]
    assert sorted(scan["peak"] > 0.4 for scan in scans) == [False, True]

    written_at = index.stat().st_mtime_ns
    again = scanned(folder, index=index, video=SHORT, generate=BOTH)
    assert again == library
    assert index.stat().st_mtime_ns == written_at

    # A damaged scan is made again.
    value = read_index(index)
    for row in value["contents"].values():
        if row.get("sound"):
            row["sound"]["peak"] = "loud"
    write_index(index, value)
    assert scanned(folder, index=index, video=SHORT, generate=BOTH) == library


def examined_sounds(
    folder: Path, index: Path
) -> tuple[MediaIndex, list[tuple[Path, Examined]]]:
    """Two clips with sound, examined; what is heard in them is still unknown."""
    paths = [sounding(folder / f"{name}.mov", level=name) for name in (0.5, 0.9)]
    media = MediaIndex(index)
    examined = media.examine(paths, [folder], 10.0)
    return media, list(zip(paths, examined, strict=True))


def test_a_content_that_another_process_dropped_is_heard_all_the_same(
    tmp_path: Path,
) -> None:
    index = tmp_path / "index.sqlite"
    media, clips = examined_sounds(tmp_path, index)
    write_index(index, read_index(index) | {"contents": {}})
    heard = media.listen(clips, 10.0)
    assert [clip.sound is not None and clip.sound.peak > 0.05 for clip in heard] == [
        True,
        True,
    ]
    assert [clip.scan for clip in heard] == [clip.scan for _, clip in clips]
    assert all(row["sound"] for row in contents_of(index))


def test_a_clip_that_vanishes_before_its_sound_is_scanned_has_that_problem(
    tmp_path: Path,
) -> None:
    media, clips = examined_sounds(tmp_path, tmp_path / "index.sqlite")
    clips[0][0].unlink()
    vanished, other = media.listen(clips, 10.0)
    assert vanished.problem is not None
    assert vanished.problem.reason == "missing_file"
    assert other.problem is None
    assert other.sound is not None


LISTENER = """
import os, signal, sys
from pathlib import Path
from videotune.data import media_index

def kill_after_three(done, total, name):
    if is_listening and done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

folder, index = Path(sys.argv[1]), Path(sys.argv[2])
media_index.SAVE_EVERY = 0.0
is_listening = False
paths = sorted(folder.iterdir())
media = media_index.MediaIndex(index, kill_after_three)
clips = list(zip(paths, media.examine(paths, [folder], 10.0)))
is_listening = True
media.listen(clips, 10.0)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_scan_of_sounds_keeps_those_that_it_has_saved(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(5):
        sounding(folder / f"{number}.mov", level=1 - 0.1 * number)
    index = tmp_path / "index.sqlite"
    command = [sys.executable, "-c", LISTENER, str(folder), str(index)]
    process = subprocess.run(command, timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert sum("sound" in row for row in contents_of(index)) == 3


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


def notes_by_code(library: Any) -> dict[str, str]:
    return {code_of(note): note for note in library.notes if code_of(note)}


def test_notes_name_the_clips_whose_sound_has_a_fault(folder: Path) -> None:
    sounding(folder / "short.mov", seconds=1.2)
    sounding(folder / "overdriven.mov", level=4)
    library = scanned(folder, video=SHORT, generate=BOTH)
    notes = notes_by_code(library)
    for code, name in (
        ("no_sound", "none.mov"),
        ("silent_sound", "silent.mov"),
        ("clipped_sound", "overdriven.mov"),
        ("short_sound", "short.mov"),
    ):
        assert f"({name})" in notes[code]
    assert "sound_dropped" not in notes

    stretched = scanned(folder, video=SHORT | {"stretch": True}, generate=BOTH)
    assert "loud.mov" in notes_by_code(stretched)["sound_dropped"]
    without = scanned(folder, video=SHORT)
    assert not any("sound" in code for code in notes_by_code(without))


def test_the_account_has_the_facts_of_each_sound_track(folder: Path) -> None:
    library = scanned(folder, video=SHORT, generate=BOTH)
    facts = {Path(row["path"]).name: row["sound"] for row in library.accounts}
    assert facts["none.mov"] is None
    assert facts["still.png"] is None
    loud = facts["loud.mov"]
    assert (loud["codec"], loud["sample_rate"], loud["channels"]) == (
        "pcm_s16le",
        44100,
        1,
    )
    assert loud["problem"] is None
    assert loud["windows"] == sum(window.shape.sound for window in library.windows)
    assert loud["loudness"] == pytest.approx(-9.03, abs=0.05)
    assert facts["silent.mov"]["problem"]
    assert facts["silent.mov"]["windows"] == 0

    # Nothing is decoded for a run without sound.
    without = scanned(folder, video=SHORT)
    facts = {Path(row["path"]).name: row["sound"] for row in without.accounts}
    assert facts["loud.mov"]["seconds"] == pytest.approx(2.0)
    assert facts["loud.mov"]["loudness"] is None
    assert facts["loud.mov"]["windows"] == 0
