"""Masks and start images: which files they are, and which clips they belong to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import noise, write_clip, write_image
from tests.support.datasets import config_of
from videotune.data.companion_files import CompanionSettings
from videotune.data.dataset import scan
from videotune.data.layouts import read_folder
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
