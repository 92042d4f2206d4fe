"""What the account says of each clip, and what it warns about."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clips import noise, write_clip

from videotune.data.account import to_json
from videotune.data.library import LibrarySettings, Source, scan
from videotune.data.windows import WindowSettings
from videotune.types import VideoRules

RULES = VideoRules(4, 1, 16, 16.0, 8, 4)
SETTINGS = LibrarySettings(WindowSettings(), 64, missing_caption="empty")


def warnings(tmp_path: Path, frames: np.ndarray, fps: float, caption: str = "a cat", **changes: Any) -> tuple[str, ...]:
    path = write_clip(tmp_path / "set" / "a.mp4", frames, fps)
    path.with_suffix(".txt").write_text(caption)
    library = scan([Source(str(tmp_path / "set"))], RULES, replace(SETTINGS, **changes))
    return library.accounts[0].warnings + library.accounts[0].notes


def test_a_clip_without_surprises_has_no_warnings(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(17), 16) == ()


def test_upscaling_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(17), 16, resolution="128x192") == ("upscaled 2x: 96x64 pixels to 192x128",)


def test_repeats_are_said(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, noise(17), 8, windows=WindowSettings(frames=33))
    assert warning == "48% of the frames repeat the one before: 8 fps is slower than the 16 fps of training"


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(40), 16) == ("0.38 of 2.50 s are in no window",)
    assert warnings(tmp_path, noise(34), 16) == ()


def test_a_far_faster_source_is_said(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, noise(64), 60)
    assert "60 fps is far above" in warning


def test_caption_hints_are_said_once(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, noise(17), 16, caption="a cat, then a dog\na dog, then a cat")
    assert "sequence" in warning


def test_account_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_clip(folder / "a.mp4", noise(40), 16)
    write_clip(folder / "b.mp4", noise(3, seed=2), 16)
    (folder / "c.mp4").touch()
    value = json.loads(json.dumps(to_json(scan([Source(str(folder))], RULES, SETTINGS))))
    assert {k: value[k] for k in ("found", "used", "held_out", "skipped")} == {
        "found": 3,
        "used": 1,
        "held_out": 0,
        "skipped": 2,
    }
    assert value["buckets"] == [{"shape": "17x48x80", "windows": 2}]
    first, short, empty = value["clips"]
    expected = {"used": True, "held_out": False, "reason": None, "source_fps": 16.0, "source_frames": 40, "width": 96}
    expected |= {"height": 64, "windows": 2, "frames": 34, "shape": "17x48x80", "repeats_share": 0.0, "speed": 1.0}
    assert {k: first[k] for k in expected} == expected
    assert first["seconds_cut"] == pytest.approx(0.375)
    assert first["views"] is None
    assert (short["reason"], short["source_frames"], short["windows"]) == ("too_short", 3, 0)
    assert (empty["reason"], empty["source_fps"]) == ("empty", None)
    assert Path(empty["path"]).name == "c.mp4"
    assert any(note.startswith("no validation: 1 source video") for note in value["notes"])


def test_a_crop_that_loses_much_is_said(tmp_path: Path) -> None:
    (crop,) = warnings(tmp_path, noise(17, 96, 48), 16, resolution="32x48")
    assert crop == "the crop keeps 33% of the picture: 48x96 becomes 48x32"
    assert warnings(tmp_path, noise(17, 96, 48), 16, resolution="32x48", resize="pad") == (
        "black borders fill 67% of the frame: 48x96 in 48x32",
    )
    assert warnings(tmp_path, noise(17, 96, 48), 16, resolution="32x48", resize="stretch") == (
        "distorted: 48x96 becomes 48x32",
    )
    assert warnings(tmp_path, noise(17, 96, 48), 16, resolution=["32x48", "64x32"]) == (), "portrait is portrait"


def test_what_its_pictures_show_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, np.zeros((34, 64, 96, 3), np.uint8), 16) == ("100% of it is black or one flat colour",)
    assert warnings(tmp_path, noise(1).repeat(34, 0), 16) == ("100% of it is frozen: the picture does not change",)
    scenes = np.concatenate([noise(1, seed=1).repeat(20, 0), noise(1, seed=2).repeat(14, 0)])
    cut = next(w for w in warnings(tmp_path, scenes, 16) if "cut" in w)
    assert cut.startswith("1 cut inside the windows (at 1.25 s)")
    settings = WindowSettings(frame_sample_strategy="keyframe", keyframe_source="scenes")
    assert not any("inside its windows" in w for w in warnings(tmp_path, scenes, 16, windows=settings))


def test_how_fast_motion_plays_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(68), 16, windows=WindowSettings(stretch=True)) == (
        "stretch: motion plays 4x as fast as filmed",
    )


def test_near_duplicates_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name, options in (("a", {"crf": "18"}), ("b", {"crf": "24"})):
        path = write_clip(folder / f"{name}.mp4", noise(20, 128, 192, seed=5), 16, options=options)
        path.with_suffix(".txt").write_text("a cat")
    library = scan([Source(str(folder))], RULES, SETTINGS)
    assert [warning for account in library.accounts for warning in account.warnings if "same" in warning] == [
        "shows nearly the same as b.mp4",
        "shows nearly the same as a.mp4",
    ]
    assert library.clips[0].source == library.clips[1].source


def test_mixed_frame_rates_are_said_of_the_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for i, fps in enumerate([24, 24, 30, 60]):
        write_clip(folder / f"{'abcd'[i]}.mp4", noise(60, seed=i), fps)
    notes = scan([Source(str(folder))], RULES, SETTINGS).notes
    assert any(note.startswith("3 frame rates are mixed: 24 fps (2), 30 fps (1), 60 fps (1)") for note in notes)
    slow = tmp_path / "slow"
    write_clip(slow / "a.mp4", noise(20), 8)
    assert any("slower than the 16 fps" in note for note in scan([Source(str(slow))], RULES, SETTINGS).notes)


def test_transparency_and_high_dynamic_range_are_said(tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "set"
    folder.mkdir()
    clear = np.full((64, 64, 4), 255, np.uint8)
    clear[:, :32, 3] = 0
    Image.fromarray(clear).save(folder / "a.png")
    library = scan([Source(str(folder))], RULES, SETTINGS)
    assert any("transparency is left out" in warning for warning in library.accounts[0].warnings)
    hdr = tmp_path / "hdr"
    color = {"x265-params": "log-level=none:transfer=smpte2084:colorprim=bt2020:colormatrix=bt2020nc"}
    write_clip(hdr / "a.mp4", noise(17), 16, codec="libx265", pix_fmt="yuv420p10le", options=color)
    account = scan([Source(str(hdr))], RULES, SETTINGS).accounts[0]
    assert any("high dynamic range (PQ)" in note for note in account.notes)
