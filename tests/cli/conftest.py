"""What the tests of the command line share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip
from videotune.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def videotune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process; its exit code, output and messages."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["videotune", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three short clips in a folder whose name has a space."""
    folder = tmp_path / "my clips"
    for seed in range(3):
        clip = write_clip(folder / f"{seed}.mp4", noise(40, 64, 64, seed=seed), 16)
        clip.with_suffix(".txt").write_text(f"clip number {seed}")
    return folder
