"""A large library is opened again without a scan: it is the same, and any change of the
files or the settings makes it anew.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import RULES, config_of, scanned
from videotune import files
from videotune.config.schema import Config
from videotune.data import dataset as module
from videotune.data import library_snapshot, media_index
from videotune.data.dataset import scan, to_json
from videotune.data.library import Library
from videotune.data.library_snapshot import KEYS_WITHOUT_EFFECT, snapshots_folder
from videotune.errors import VideotuneError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of videos with captions and one with none; three files are many."""
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path / "user")
    monkeypatch.setattr(module, "FEWEST_CLIPS", 3)
    root = tmp_path / "set"
    for number in range(4):
        path = root / "videos" / f"v{number}x.mp4"
        write_clip(path, noise(20 + number, seed=number))
        caption = root / "captions" / f"v{number}x.txt"
        caption.parent.mkdir(exist_ok=True)
        caption.write_text(f"caption {number}")
    (root / "videos" / "text.mp4").write_text("hello " * 100)
    return root


def library_of(folder: Path, **values: object) -> Library:
    return scanned(
        folder,
        index=folder / ".videotune-cache" / "index.sqlite",
        validation_fraction=0.0,
        **values,
    )


def refuse_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "MediaIndex", lambda *_: pytest.fail("the files were looked up")
    )


def same(library: Library, other: Library) -> None:
    """All that two libraries hold is equal."""
    assert tuple(library.clips) == tuple(other.clips)
    assert library.windows == tuple(other.windows)
    assert library.held_out_windows == tuple(other.held_out_windows)
    assert library.skipped == other.skipped
    assert list(library.accounts) == list(other.accounts)
    assert library.notes == other.notes
    assert dict(library.media) == dict(other.media)
    assert library.roots == other.roots
    assert library.regularization == other.regularization
    account, expected = to_json(library), to_json(other)
    for json in (account, expected):
        json["clips"] = list(json["clips"])
    assert account == expected


def test_a_library_of_files_is_that_of_objects(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = library_of(folder)
    (snapshot,) = snapshots_folder().iterdir()
    assert snapshot.is_dir()
    with monkeypatch.context() as patch:
        refuse_scans(patch)
        again = library_of(folder)
    monkeypatch.setattr(module, "FEWEST_CLIPS", 100)
    objects = library_of(folder)
    assert isinstance(objects.clips, tuple)
    assert len(objects.clips) == 4
    assert [reason for _, reason, _ in objects.skipped] == ["not_a_video"]
    same(written, objects)
    same(again, objects)
    codes = [account["warning_codes"] for account in again.accounts]
    assert codes == [account["warning_codes"] for account in objects.accounts]


def edit_caption(folder: Path) -> None:
    (folder / "captions" / "v0x.txt").write_text("another text")


def replace_clip(folder: Path) -> None:
    write_clip(folder / "videos" / "v0x.mp4", noise(31, seed=9))


def add_clip(folder: Path) -> None:
    write_clip(folder / "videos" / "v9x.mp4", noise(31, seed=9))


def remove_clip(folder: Path) -> None:
    (folder / "videos" / "v0x.mp4").unlink()


def rename_clip(folder: Path) -> None:
    for kind, suffix in (("videos", ".mp4"), ("captions", ".txt")):
        path = folder / kind / f"v0x{suffix}"
        path.rename(path.with_stem("z0x"))


def add_metadata(folder: Path) -> None:
    row = '{"file_name": "v1x.mp4", "text": "of the metadata"}'
    (folder / "videos" / "metadata.jsonl").write_text(row)


CHANGES: list[Callable[[Path], None]] = [
    edit_caption,
    replace_clip,
    add_clip,
    remove_clip,
    rename_clip,
    add_metadata,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_makes_it_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    before = library_of(folder)
    change(folder)
    changed = library_of(folder)
    monkeypatch.setattr(module, "FEWEST_CLIPS", 100)
    objects = library_of(folder)
    same(changed, objects)
    assert tuple(before.clips) != tuple(objects.clips)


def test_other_settings_have_a_library_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = len(library_of(folder).windows)
    video = {"frames": 5, "windows": "chunks"}
    more = len(library_of(folder, video_config=video).windows)
    assert more > windows
    refuse_scans(monkeypatch)
    assert len(library_of(folder).windows) == windows
    assert len(library_of(folder, video_config=video).windows) == more


@pytest.mark.parametrize(
    "damage", ["torn", "torn rows", "missing", "no JSON", "no manifest"]
)
def test_a_damaged_snapshot_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    first = library_of(folder)
    (snapshot,) = snapshots_folder().iterdir()
    if damage == "torn":
        path = snapshot / "windows.start.npy"
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "torn rows":
        path = snapshot / "accounts.rows"
        content = path.read_bytes()[:-9]
        path.unlink()  # the first library still reads the old file
        path.write_bytes(content)
    elif damage == "missing":
        (snapshot / "clips.rows").unlink()
    elif damage == "no JSON":
        (snapshot / "snapshot.json").write_text("{")
    else:
        (snapshot / "snapshot.json").unlink()
    same(library_of(folder), first)
    refuse_scans(monkeypatch)
    same(library_of(folder), first)


def test_a_home_that_cannot_be_written_costs_only_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path / "file")
    first = library_of(folder)
    assert len(first.clips) == 4
    same(library_of(folder), first)


def test_what_may_go_away_by_itself_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = media_index.stat_of

    def refuse(path: Path) -> os.stat_result:
        if path.name == "v0x.mp4":
            raise module.ClipProblem("unreadable", "of the test")
        return refused(path)

    with monkeypatch.context() as patch:
        patch.setattr(media_index, "stat_of", refuse)
        assert len(library_of(folder).clips) == 3
    assert len(library_of(folder).clips) == 4


def test_only_the_latest_snapshots_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_snapshot, "MOST_SNAPSHOTS", 2)
    for frames in (5, 9, 13):
        library_of(folder, video_config={"frames": frames})
    assert len(list(snapshots_folder().iterdir())) == 2
    refuse_scans(monkeypatch)
    library_of(folder, video_config={"frames": 13})


def test_a_copied_dataset_has_a_library_of_its_own(
    folder: Path, tmp_path: Path
) -> None:
    library_of(folder)
    shutil.copytree(folder, tmp_path / "copy")
    copy = library_of(tmp_path / "copy")
    assert all(clip.path.startswith(str(tmp_path / "copy")) for clip in copy.clips)


class RecordingConfig(Config):
    """A config that records which of its keys are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in Config.model_fields:
            READ_KEYS.add(name)
        return super().__getattribute__(name)


READ_KEYS: set[str] = set()

SETTINGS_READ: dict[str, dict[str, Any]] = {
    "plain": {},
    "sound": {"generate": ["video", "sound"]},
    "conditions": {"conditions": [{"type": "reference", "probability": 1.0}]},
    "first frame": {"first_frame_probability": 0.5},
    "masks": {"loss_mask": {"outside": 0.1}},
    "windows": {
        "resize": "random",
        "video_config": {"windows": "slide", "frame_sample_strategy": "random"},
    },
}


@pytest.mark.parametrize("name", SETTINGS_READ)
def test_no_key_that_a_scan_reads_is_left_out(folder: Path, name: str) -> None:
    """Keys of which another value needs no other library are really not read."""
    if name == "masks":
        shutil.copytree(folder / "videos", folder / "masks")
    config = config_of(folder, **{"resolution": 64, **SETTINGS_READ[name]})
    recording = RecordingConfig.model_construct(**dict(config))
    READ_KEYS.clear()
    scan(recording, RULES, folder / ".videotune-cache" / "index.sqlite")
    assert {"datasets", "video_config", "seed", "missing_caption"} <= READ_KEYS
    assert not READ_KEYS & set(KEYS_WITHOUT_EFFECT)


def test_another_learning_rate_needs_no_scan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library_of(folder, learning_rate=1e-4)
    refuse_scans(monkeypatch)
    same(library_of(folder, learning_rate=2e-4, batch_size=3, steps=7), first)


def test_a_run_that_needs_captions_uses_a_check_unless_some_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_of(folder, missing_caption="skip")
    with monkeypatch.context() as patch:
        refuse_scans(patch)
        library_of(folder, missing_caption="error")
    (folder / "captions" / "v0x.txt").unlink()
    library_of(folder, missing_caption="skip")
    with pytest.raises(VideotuneError, match="v0x"):
        library_of(folder, missing_caption="error")
