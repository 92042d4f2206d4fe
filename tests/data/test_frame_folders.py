"""Folders of numbered images as clips."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import numbered, read_numbers, write_image
from tests.support.datasets import scanned
from videotune.data.decode import decode
from videotune.data.frame_folders import find_frame_folders
from videotune.data.layouts import read_folder
from videotune.data.library import Library

FRAMES = numbered(17, 48, 64)


def write_frames(
    folder: Path, count: int = 17, suffix: str = ".png", caption: str | None = "a cat"
) -> Path:
    for number in range(count):
        name = f"shot_{number + 3:04d}{suffix}"
        write_image(
            folder / name,
            FRAMES[number],
            **({"quality": 95} if suffix == ".jpg" else {}),
        )
    if caption is not None:
        folder.with_name(f"{folder.name}.txt").write_text(caption, encoding="utf-8")
    return folder


def frames_of(root: Path, fps: float = 24) -> Library:
    return scanned({"path": str(root), "frame_folder_fps": fps}, video={"frames": 9})


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_folder_is_a_clip_of_its_frames(tmp_path: Path, suffix: str) -> None:
    folder = write_frames(tmp_path / "clip.v2", suffix=suffix)
    library = frames_of(tmp_path)
    (clip,) = library.clips
    assert clip.path == str(folder)
    assert clip.captions == ("a cat",)

    info = library.media[clip.id]
    assert (info.fps, len(info.ticks), info.still) == (24, 17, False)
    assert (info.width, info.height) == (64, 48)
    times = tuple(number / 24 for number in range(17))
    pictures = decode(info, times, 48, 64)
    assert read_numbers(pictures) == list(range(17))
    if suffix == ".png":
        assert np.array_equal(pictures, FRAMES)


def test_the_clip_is_the_same_as_long_as_its_images_are(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "data" / "clip")
    (first,) = frames_of(tmp_path / "data").clips
    made = list((tmp_path / "data" / ".videotune-cache" / "frames").iterdir())
    assert len(made) == 1

    # Made anew, it is the same clip; the file is not part of the id.
    made[0].unlink()
    (again,) = frames_of(tmp_path / "data").clips
    assert again.id == first.id

    (slower,) = frames_of(tmp_path / "data", fps=12).clips
    assert slower.id != first.id
    write_image(folder / "shot_0003.png", FRAMES[9])
    (changed,) = frames_of(tmp_path / "data").clips
    assert changed.id != first.id


def test_which_folders_are_clips(tmp_path: Path) -> None:
    for name in (
        "top_1.png", "top_2.png",             # the root itself
        "images/1.png", "images/2.png",       # a folder of clips by its name
        "names/cat.png", "names/dog.png",     # no numbers
        "mixed/1.png", "mixed/2.jpg",         # two kinds
        "two/a1.png", "two/b2.png",           # two series
        "with/1.png", "with/2.png", "with/film.mp4",
        "single/1.png",
        "yes/1.png", "yes/10.png", "yes/2.png", "yes/notes.txt",
        "images/deep/7.JPG", "images/deep/8.jpg",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = [str(path) for path in tmp_path.rglob("*.*")]
    frames = find_frame_folders(files, str(tmp_path))
    assert {Path(folder).name for folder in frames} == {"yes", "deep"}
    assert [path.name for path in frames[str(tmp_path / "yes")]] == [
        "1.png",
        "2.png",
        "10.png",
    ]

    # Without the key all images are clips of one frame.
    (tmp_path / "with" / "film.mp4").unlink()
    clips, _ = read_folder(tmp_path)
    assert len(clips) == 18
    clips, _ = read_folder(tmp_path, frame_folders=True)
    assert sum(bool(clip.frames) for clip in clips) == 3


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("gap", "missing_file", "frame 7 is missing before shot_0008.png"),
        ("twice", "missing_file", "frame 7 appears twice before shot_07.png"),
        ("size", "unreadable", "shot_0009.png has another size"),
        ("text", "decode_error", "shot_0009.png is damaged"),
        ("webp", "unreadable", "WEBP"),
    ],
)
def test_a_folder_that_cannot_be_used_is_skipped_with_its_reason(
    tmp_path: Path, fault: str, reason: str, words: str
) -> None:
    write_frames(tmp_path / "good")
    folder = write_frames(
        tmp_path / "bad", suffix=".webp" if fault == "webp" else ".png"
    )
    if fault == "gap":
        (folder / "shot_0007.png").unlink()
    if fault == "twice":
        write_image(folder / "shot_07.png", FRAMES[0])
    if fault == "size":
        write_image(folder / "shot_0009.png", FRAMES[0][:32])
    if fault == "text":
        (folder / "shot_0009.png").write_text("no image", encoding="utf-8")

    library = frames_of(tmp_path)
    assert [Path(clip.path).name for clip in library.clips] == ["good"]
    ((path, code, detail),) = library.skipped
    assert Path(path).name == "bad"
    assert code == reason
    assert words in detail


def test_a_damaged_image_costs_its_clip(tmp_path: Path) -> None:
    write_frames(tmp_path / "good")
    folder = write_frames(tmp_path / "bad")
    content = (folder / "shot_0005.png").read_bytes()
    (folder / "shot_0005.png").write_bytes(content[: len(content) // 2])
    library = frames_of(tmp_path)
    assert [Path(clip.path).name for clip in library.clips] == ["good"]
    assert len(library.skipped) == 1


def test_metadata_files_name_the_folder(tmp_path: Path) -> None:
    write_frames(tmp_path / "a", caption=None)
    rows = '{"file_name": "a", "text": "by the row"}\n'
    (tmp_path / "metadata.jsonl").write_text(rows, encoding="utf-8")
    (clip,) = frames_of(tmp_path).clips
    assert clip.captions == ("by the row",)
