"""A plan needs no network: the configs of published base models come with videotune."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clips import noise, write_dataset


def offline(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that may not ask the Hub, and whose cache of it is empty."""
    return subprocess.run(
        [sys.executable, "-m", "videotune", *settings],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "clips", {"a.mp4": noise(40, 96, 160, seed=1)}, {}, fps=16)


@pytest.mark.parametrize("preset", ["wan 2.1 1.3B LoRA 16GB", "hidream LoRA 24GB"])
def test_check_and_plan_answer_for_a_preset(tmp_path: Path, clips: Path, preset: str) -> None:
    settings = (str(clips), "--preset", preset)
    assert offline(tmp_path, "check", *settings).returncode == 0
    done = offline(tmp_path, "plan", *settings, "--vram", "24", "--json")
    assert done.returncode == 0, done.stderr
    assert "come with videotune" in done.stderr
    assert json.loads(done.stdout)["fits"] is True


def test_a_training_still_says_what_is_not_here(tmp_path: Path, clips: Path) -> None:
    done = offline(tmp_path, "train", "--data", str(clips), "--preset", "wan 2.1 1.3B LoRA 16GB", "--out", "run")
    assert done.returncode == 1
    assert "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_come_with_videotune_is_named(tmp_path: Path, clips: Path) -> None:
    done = offline(tmp_path, "plan", str(clips), "--base", "somebody/other")
    assert done.returncode == 1
    assert "somebody/other" in done.stderr
