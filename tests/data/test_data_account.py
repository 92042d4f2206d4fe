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
SETTINGS = LibrarySettings(WindowSettings(), 64, "empty", 0.1)


def warnings(tmp_path: Path, frames: np.ndarray, fps: float, caption: str = "a cat", **changes: Any) -> tuple[str, ...]:
    path = write_clip(tmp_path / "set" / "a.mp4", frames, fps)
    path.with_suffix(".txt").write_text(caption)
    library = scan([Source(str(tmp_path / "set"))], RULES, replace(SETTINGS, **changes))
    return library.accounts[0].warnings


def test_a_clip_without_surprises_has_no_warnings(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(17), 16) == ()


def test_upscaling_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(17), 16, resolution="128x192") == ("upscaled 2x: 96x64 pixels to cover 192x128",)


def test_repeats_are_said(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, noise(17), 8, windows=WindowSettings(frames=33))
    assert warning == "48% of its frames repeat the one before: 8 fps is slower than the 16 fps of training"


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path, noise(40), 16) == ("0.38 of its 2.50 s are cut",)
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
    assert any(note.startswith("no validation: 1 source videos") for note in value["notes"])
