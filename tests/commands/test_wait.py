"""``wait`` blocks until a run is where it is asked for, and says so when it will not
come.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import options_of
from tests.support.run_processes import Make
from videotune.commands.wait import wait
from videotune.errors import DONE, FAILED, SKIPPED


def test_a_finished_run_is_there_at_once(finished: Callable[..., Path]) -> None:
    run = finished("steps=2")
    code, found = wait(run)
    assert (code, found["state"], found["step"], found["steps"]) == (DONE, "done", 2, 2)
    assert wait(run, step=2)[0] == DONE
    assert wait(run, step=3)[0] == FAILED


def test_a_folder_without_a_run_is_waited_for(tmp_path: Path) -> None:
    code, found = wait(tmp_path / "run", timeout=0)
    assert (code, found["state"]) == (SKIPPED, "absent")


@pytest.mark.slow
def test_a_run_is_followed_from_before_it_begins_until_it_is_killed(
    overrides: Make, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", options_of(overrides("steps=10000"))
    sets = [word for one in words.pop("set") for word in ("--set", one)]
    flags = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "videotune", "train", *flags, *sets, "--out", str(run)]
    )
    try:
        code, found = wait(run, step=2, timeout=60)
        assert (code, found["state"]) == (DONE, "running")
        assert wait(run, timeout=0)[0] == SKIPPED
    finally:
        process.kill()
        process.wait()
    code, found = wait(run, timeout=60)
    assert (code, found["state"]) == (FAILED, "dead")
