"""Scene cuts: exact times whatever the frame rate, no false ones, and what is said without PySceneDetect."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from clips import write_clip
from scenery import pan, shots

from videotune.data.probe import probe
from videotune.data.scenes import scenes
from videotune.errors import VideotuneError


@pytest.mark.parametrize(
    ("name", "fps"), [("a.mp4", 24), ("a.mp4", 59.94), ("a.mp4", 8), ("a.mkv", 23.976), ("a.avi", 25), ("a.webm", 30)]
)
def test_a_cut_is_the_timestamp_of_the_first_frame_after_it(tmp_path: Path, name: str, fps: float) -> None:
    facts = probe(write_clip(tmp_path / name, shots([1, 2, 3], 15), fps))
    assert scenes(facts, 99) == (facts.timestamps[15], facts.timestamps[30])


def test_a_cut_at_a_variable_rate_is_exact(tmp_path: Path) -> None:
    gaps = np.random.default_rng(0).uniform(0.01, 0.1, 60)
    facts = probe(write_clip(tmp_path / "a.mp4", shots([1, 2, 3], 20), times=list(np.cumsum(gaps))))
    assert scenes(facts, 99) == (facts.timestamps[20], facts.timestamps[40])


def test_scenes_of_one_frame_at_the_ends_are_cut_off(tmp_path: Path) -> None:
    frames = np.concatenate([shots([1], 1), shots([2], 30), shots([3], 1)])
    facts = probe(write_clip(tmp_path / "a.mp4", frames))
    assert scenes(facts, 99) == (facts.timestamps[1], facts.timestamps[31])


def test_a_rotated_tall_file_has_its_cuts(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mov", shots([1, 2], 20), rotation=90))
    assert scenes(facts, 99) == (facts.timestamps[20],)


def test_only_the_first_seconds_are_searched(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", shots([1, 2, 3], 24)))
    assert scenes(facts, 1.5) == (1.0,)
    assert scenes(facts, 0.5) == ()


def test_a_flash_a_flicker_and_a_pan_are_no_cuts(tmp_path: Path) -> None:
    flash, flicker = shots([1], 48), shots([2], 48)
    flash[20:22] = 255
    flicker[10:40:3] = flicker[10:40:3] // 3
    swing = pan(3, [float(max(0, min(i - 12, 24)) * 12) for i in range(48)])
    for name, frames in (("flash", flash), ("flicker", flicker), ("swing", swing)):
        assert scenes(probe(write_clip(tmp_path / f"{name}.mp4", frames)), 99) == (), name


def test_a_higher_threshold_finds_fewer_cuts(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", shots([1, 2], 24)))
    assert len(scenes(facts, 99)) == 1
    assert scenes(facts, 99, threshold=300.0) == ()


def test_a_threshold_that_finds_everything_is_refused(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", shots([1], 4)))
    with pytest.raises(VideotuneError, match="greater than 1"):
        scenes(facts, 99, threshold=0.5)


def test_without_pyscenedetect_the_error_names_what_to_install(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", shots([1], 4))
    code = (
        "import sys; sys.modules['scenedetect'] = None\n"
        "from videotune.data.probe import probe; from videotune.data.scenes import scenes\n"
        f"scenes(probe({str(path)!r}), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "VideotuneError" in done.stderr
    assert 'pip install "videotune[scenes]"' in done.stderr
