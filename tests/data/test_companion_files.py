"""Masks and start images: which files they are, and which clips they belong to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.clips import noise, write_clip, write_image
from tests.support.datasets import config_of
from videotune.data.companion_files import CompanionSettings
from videotune.data.dataset import scan
from videotune.data.layouts import read_folder
from videotune.data.locations import open_location
from videotune.data.remarks import code_of
from videotune.errors import VideotuneError
from videotune.models.wan import Wan

RULES = Wan.spec.rules


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return folder


def companions(folder: Path, **settings: Any) -> dict[str, dict[str, str]]:
    """Return for each clip its companions by role, as paths in the folder."""
    files, _ = read_folder(folder, companions=CompanionSettings(**settings))
    found = {}
    for file in files:
        name = file.path.relative_to(folder).as_posix()
        found[name] = {
            role: path.relative_to(folder.parent).as_posix()
            for role, path in file.companions
        }
    return found


@pytest.mark.parametrize(
    ("clip", "mask"),
    [
        ("videos/a.mp4", "masks/a.png"),
        ("videos/a.mp4", "loss_masks/a.mp4"),
        ("videos/deep/er/a.mp4", "masks/deep/er/a.webp"),
        ("set/videos/a.mp4", "set/masks/a.png"),
        ("images/a.png", "masks/a.png"),
        ("a.mp4", "masks/a.png"),
        ("sub/a.mp4", "sub/masks/a.png"),
        ("sub/a.mp4", "masks/sub/a.png"),
        ("a.png", "a-masklabel.png"),
    ],
)
def test_a_mask_has_the_name_of_its_clip(tmp_path: Path, clip: str, mask: str) -> None:
    folder = touch(tmp_path / "data", clip, mask, "videos/other.mp4")
    found = companions(folder)
    assert found.pop("videos/other.mp4") == {}
    roles = {"loss_mask": f"data/{mask}"}
    if "/masks/" in f"/{mask}":
        roles["mask"] = f"data/{mask}"
    assert found == {clip: roles}


def test_loss_masks_come_before_masks(tmp_path: Path) -> None:
    names = ("videos/a.mp4", "videos/b.mp4", "masks/a.png", "masks/b.png")
    folder = touch(tmp_path / "data", *names, "loss_masks/a.png")
    assert companions(folder) == {
        "videos/a.mp4": {
            "loss_mask": "data/loss_masks/a.png",
            "mask": "data/masks/a.png",
        },
        "videos/b.mp4": {
            "loss_mask": "data/masks/b.png",
            "mask": "data/masks/b.png",
        },
    }


def test_a_folder_of_clips_may_be_called_masks(tmp_path: Path) -> None:
    folder = touch(tmp_path / "data", "masks/venice.mp4", "parade/b.mp4")
    assert set(companions(folder)) == {"masks/venice.mp4", "parade/b.mp4"}


def test_masks_beside_a_root_that_is_the_folder_of_videos(tmp_path: Path) -> None:
    touch(tmp_path, "videos/a.mp4", "masks/a.png")
    found = companions(tmp_path / "videos")
    assert found == {"a.mp4": {"loss_mask": "masks/a.png", "mask": "masks/a.png"}}


def test_masks_of_no_clip_are_named(tmp_path: Path) -> None:
    names = ("videos/a.mp4", "masks/a.png", "masks/lost.png")
    folder = touch(tmp_path / "data", *names)
    _, notes = read_folder(folder)
    assert any("masks/lost.png" in note and "masks/a.png" not in note for note in notes)


def test_masks_in_another_folder(tmp_path: Path) -> None:
    names = ("videos/a.mp4", "videos/sub/b.mp4", "masks/a.png")
    folder = touch(tmp_path / "data", *names)
    masks = touch(tmp_path / "elsewhere", "a.png", "sub/b.png", "c.png")
    assert companions(folder, loss_masks=masks) == {
        "videos/a.mp4": {
            "loss_mask": "elsewhere/a.png",
            "mask": "data/masks/a.png",
        },
        "videos/sub/b.mp4": {"loss_mask": "elsewhere/sub/b.png"},
    }
    with pytest.raises(VideotuneError, match=r"datasets\.loss_masks"):
        read_folder(folder, companions=CompanionSettings(loss_masks=tmp_path / "no"))


def test_start_images_are_no_clips_only_if_they_are_used(tmp_path: Path) -> None:
    names = ("videos/a.mp4", "videos/b.mp4", "images/a.png", "images/lone.png")
    folder = touch(tmp_path / "data", *names)
    assert set(companions(folder)) == set(names)
    found = companions(folder, start_images=True)
    assert found == {
        "videos/a.mp4": {"start_image": "data/images/a.png"},
        "videos/b.mp4": {},
        "images/lone.png": {},
    }


@pytest.mark.parametrize(
    ("mask", "fault"),
    [
        (np.zeros((9, 64, 64, 3), np.uint8), "64x64"),
        (np.zeros((12, 64, 96, 3), np.uint8), "12 frames"),
        (None, "a.png: "),
    ],
)
def test_a_mask_that_does_not_fit_is_a_problem_of_its_clip(
    tmp_path: Path, mask: np.ndarray | None, fault: str
) -> None:
    write_clip(tmp_path / "videos/a.mp4", noise(9), fps=16)
    write_clip(tmp_path / "videos/b.mp4", noise(9, seed=1), fps=16)
    write_clip(tmp_path / "masks/b.mp4", noise(9, seed=2), fps=16)
    if mask is None:
        touch(tmp_path, "masks/a.png")
    else:
        write_clip(tmp_path / "masks/a.mp4", mask, fps=16)

    settings = {"resolution": "32x48"}
    masked = scan(config_of(tmp_path, loss_mask={"outside": 0.0}, **settings), RULES)
    [(path, reason, detail)] = masked.skipped
    assert Path(path).name == "a.mp4"
    assert reason == "bad_mask"
    assert fault in detail

    # Without a use for masks nobody reads them.
    assert not scan(config_of(tmp_path, **settings), RULES).skipped


def test_an_image_is_the_mask_of_every_frame_of_its_clip(tmp_path: Path) -> None:
    write_clip(tmp_path / "videos/a.mp4", noise(9), fps=16)
    write_image(tmp_path / "masks/a.png", np.full((128, 192, 3), 255, np.uint8))
    settings = {"resolution": "32x48"}
    library = scan(config_of(tmp_path, loss_mask={"outside": 0.0}, **settings), RULES)
    assert not library.skipped
    [(role, mask_id)] = library.windows[0].companions
    assert role == "loss_mask"
    assert library.media[mask_id].still


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write a file of rows in the form of its suffix."""
    path = folder / name
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if name.endswith(".csv"):
        lines = [columns, *([row.get(key, "") for key in columns] for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = {key: [row.get(key) for row in rows] for key in columns}
        parquet.write_table(pa.table(cells), path)
    return path


METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
ROW_FILE_NAMES = ("rows.csv", "rows.jsonl", "rows.parquet")


@pytest.mark.parametrize("name", [*METADATA_NAMES, *ROW_FILE_NAMES])
def test_rows_name_companions(tmp_path: Path, name: str) -> None:
    folder = touch(tmp_path / "data", "a.mp4", "b.mp4", "x/r.mp4", "x/c.mp4", "m.png")
    touch(folder, "l.png")
    roles = {"reference": "x/r.mp4", "control": "./x/c.mp4", "mask": "m.png"}
    path = write_rows(
        folder,
        name,
        [
            {"file_name": "a.mp4", "text": "a", **roles, "loss_mask": "l.png"},
            {"file_name": "b.mp4", "text": "b", "mask": "m.png"},
        ],
    )
    location = folder if name.startswith("metadata") else path
    files = open_location(str(location), tmp_path / "cache").files
    assert {file.path.name: dict(file.companions) for file in files} == {
        "a.mp4": {
            "loss_mask": folder / "l.png",
            "mask": folder / "m.png",
            "reference": folder / "x/r.mp4",
            "control": folder / "x/c.mp4",
        },
        "b.mp4": {"loss_mask": folder / "m.png", "mask": folder / "m.png"},
    }


def test_a_named_file_comes_before_that_of_a_folder(tmp_path: Path) -> None:
    names = ("videos/a.mp4", "videos/b.mp4", "masks/a.png", "masks/b.png")
    folder = touch(tmp_path / "data", *names, "loss_masks/b.png", "other/a.png")
    touch(folder, "other/b.png")
    write_rows(
        folder,
        "metadata.csv",
        [
            {"file_name": "videos/a.mp4", "text": "a", "mask": "other/a.png"},
            {"file_name": "videos/b.mp4", "text": "b", "mask": "other/b.png"},
        ],
    )
    assert companions(folder) == {
        "videos/a.mp4": {
            "loss_mask": "data/other/a.png",
            "mask": "data/other/a.png",
        },
        "videos/b.mp4": {
            "loss_mask": "data/loss_masks/b.png",
            "mask": "data/other/b.png",
        },
    }
    _, notes = read_folder(folder)
    (note,) = [note for note in notes if "companion" in note]
    assert "metadata.csv:2: mask other/a.png, not masks/a.png" in note
    assert "other/b.png, not masks/b.png" in note

    masks = touch(tmp_path / "elsewhere", "videos/a.png")
    found = companions(folder, loss_masks=masks)
    assert found["videos/a.mp4"]["loss_mask"] == "elsewhere/videos/a.png"
    assert "loss_mask" not in found["videos/b.mp4"]


def test_a_named_file_is_a_clip_only_if_a_row_lists_it(tmp_path: Path) -> None:
    folder = touch(tmp_path / "data", "a.mp4", "b.mp4", "c.mp4")
    rows = [
        {"file_name": "a.mp4", "text": "a", "reference": "b.mp4"},
        {"file_name": "c.mp4", "text": "c", "reference": "a.mp4", "control": None},
    ]
    write_rows(folder, "metadata.jsonl", rows)
    assert companions(folder) == {
        "a.mp4": {"reference": "data/b.mp4"},
        "c.mp4": {"reference": "data/a.mp4"},
    }


@pytest.mark.parametrize("name", METADATA_NAMES)
def test_a_metadata_file_may_name_companions_only(tmp_path: Path, name: str) -> None:
    folder = touch(tmp_path / "data", "a.mp4", "b.mp4", "r.mp4")
    (folder / "a.txt").write_text("from the text file")
    rows = [{"file_name": clip, "reference": "r.mp4"} for clip in ("a.mp4", "b.mp4")]
    write_rows(folder, name, rows)
    (first, second), notes = read_folder(folder)
    assert first.caption_file == folder / "a.txt"
    assert first.metadata_texts is None
    assert dict(first.companions) == {"reference": folder / "r.mp4"}
    assert second.missing_detail == f"{folder / 'b.txt'} does not exist"
    assert notes == []

    # In a file of rows there is nowhere else to look for a caption.
    path = write_rows(folder, name.replace("metadata", "rows"), rows)
    with pytest.raises(VideotuneError, match="caption_column"):
        open_location(str(path), tmp_path / "cache")


@pytest.mark.parametrize("role", ["reference", "control", "mask", "loss_mask"])
@pytest.mark.parametrize("name", ["metadata.jsonl", "rows.jsonl"])
@pytest.mark.parametrize(
    "path", ["../out.png", "/etc/passwd", "link.png", "a\0.png", 3]
)
def test_named_files_lead_nowhere_outside(
    tmp_path: Path, role: str, name: str, path: Any
) -> None:
    folder = touch(tmp_path / "data", "a.mp4")
    touch(tmp_path, "out.png")
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    row = {"file_name": "a.mp4", "text": "a", role: path}
    rows = write_rows(folder, name, [row])
    location = folder if name.startswith("metadata") else rows
    with pytest.raises(VideotuneError, match=rf"{name}:1") as caught:
        open_location(str(location), tmp_path / "cache")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("column", ["mask", "loss_mask", "reference", "control"])
def test_a_column_that_means_something_else_is_named(
    tmp_path: Path, column: str
) -> None:
    """Values that are no files give no advice on masks, but the column's name."""
    for name in ("a", "b"):
        write_clip(tmp_path / f"{name}.mp4", noise(9, seed=ord(name)), fps=16)
    rows = [{"file_name": f"{name}.mp4", "text": "x", column: "yes"} for name in "ab"]
    write_rows(tmp_path, "metadata.csv", rows)
    settings = {"resolution": "32x48"}

    library = scan(config_of(tmp_path, **settings), RULES)
    (note,) = [note for note in library.notes if code_of(note).startswith("unused")]
    assert f"column {column} of metadata.csv" in note
    assert "2 clips" in note
    assert "--set" not in note

    if "mask" in column:
        masked = config_of(tmp_path, loss_mask={"outside": 0.0}, **settings)
        for _, reason, detail in scan(masked, RULES).skipped:
            assert reason == "bad_mask"
            assert f"column {column}" in detail

    # A file that is there is still a mask that may be used.
    if "mask" in column:
        write_clip(tmp_path / "m.mp4", noise(9, seed=2), fps=16)
        rows[0][column] = "m.mp4"
        write_rows(tmp_path, "metadata.csv", rows)
        notes = scan(config_of(tmp_path, **settings), RULES).notes
        unused = [note for note in notes if code_of(note) == "unused_masks"]
        assert len(unused) == 2
        assert any("1 clip with a mask" in note and "--set" in note for note in unused)


def test_a_root_of_videos_names_files_beside_it(tmp_path: Path) -> None:
    touch(tmp_path, "videos/a.mp4", "masks/x.png", "elsewhere/y.png")
    root = tmp_path / "videos"
    row = {"file_name": "a.mp4", "text": "a", "mask": "../masks/x.png"}
    write_rows(root, "metadata.jsonl", [row])
    assert companions(root)["a.mp4"]["mask"] == "masks/x.png"

    for outside in ("../elsewhere/y.png", "../masks/../elsewhere/y.png"):
        write_rows(root, "metadata.jsonl", [{**row, "mask": outside}])
        with pytest.raises(VideotuneError, match="outside"):
            read_folder(root)
    (tmp_path / "masks" / "link.png").symlink_to(tmp_path / "elsewhere/y.png")
    write_rows(root, "metadata.jsonl", [{**row, "mask": "../masks/link.png"}])
    with pytest.raises(VideotuneError, match="outside"):
        read_folder(root)


CONDITIONS = {
    "reference": {"conditions": [{"type": "reference"}]},
    "control": {"conditions": [{"type": "control"}]},
    "mask": {"conditions": [{"type": "mask"}]},
    "loss_mask": {"loss_mask": {"outside": 0.0}},
}


@pytest.mark.parametrize("role", list(CONDITIONS))
@pytest.mark.parametrize("name", ["metadata.csv", "rows.csv"])
def test_a_named_file_that_cannot_be_used_is_a_problem_of_its_clip(
    tmp_path: Path, role: str, name: str
) -> None:
    folder = tmp_path / "data"
    rows = []
    for number, companion in enumerate(("good.mp4", "gone.mp4", "bad.mp4")):
        clip = folder / f"{number}.mp4"
        write_clip(clip, noise(9, 64, 96, seed=number), fps=16)
        rows.append({"file_name": clip.name, "text": "a", role: f"x/{companion}"})
    write_clip(folder / "x/good.mp4", noise(9, 64, 96, seed=9), fps=16)
    touch(folder, "x/bad.mp4")
    path = write_rows(folder, name, rows)

    dataset = folder if name.startswith("metadata") else path
    config = config_of(dataset, resolution="32x48", **CONDITIONS[role])
    library = scan(config, RULES)
    assert [Path(clip.path).name for clip in library.clips] == ["0.mp4"]
    assert dict(library.windows[0].companions).keys() == {role}
    details = {Path(path).name: detail for path, _, detail in library.skipped}
    reasons = {reason for _, reason, _ in library.skipped}
    assert reasons == {"bad_mask" if "mask" in role else f"bad_{role}"}
    assert f"{name}:3" in details["1.mp4"]
    assert "bad.mp4" in details["2.mp4"]
