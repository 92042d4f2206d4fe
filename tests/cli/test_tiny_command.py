"""`videotune tiny`: a base model to try a run with, in a process as a person starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from videotune.models.base_model import place, spec_for
from videotune.models.registry import find


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "videotune", "tiny", *words], capture_output=True, text=True)


def test_it_writes_the_kind_that_is_asked_for_and_nothing_else(tmp_path: Path) -> None:
    done = run("wan", str(tmp_path / "base"), "--variant", "i2v")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tmp_path / "base"), "")
    assert spec_for(None, place(str(tmp_path / "base"))).first_frame == 1.0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("wan", "{}/base", "--variant", "x"), find("wan").variants),
        (("none", "{}/base"), ["cogvideox"]),
        (("wan", "{}"), ["new folder"]),
    ],
)
def test_what_it_cannot_do_is_told(words: tuple[str, ...], named: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = run(*(word.format(tmp_path) for word in words))
    assert done.returncode == 1
    assert all(name in done.stderr for name in named)
    assert "Traceback" not in done.stderr
