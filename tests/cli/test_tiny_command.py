"""`videotune tiny`: a base model to try a run with, in a process as a person starts it."""

import subprocess
import sys
from pathlib import Path

from videotune.models.base_model import place, spec_for


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "videotune", "tiny", *words],
        capture_output=True,
        text=True,
    )


def test_it_writes_the_kind_that_is_asked_for_and_nothing_else(tmp_path: Path) -> None:
    done = run("wan", str(tmp_path / "base"), "--variant", "i2v")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (
        0,
        str(tmp_path / "base"),
        "making random weights …\n",
    )
    assert spec_for(None, place(str(tmp_path / "base"))).first_frame_probability == 1.0
