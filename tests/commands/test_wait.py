"""``wait`` blocks until a run is where it is asked for, and says so when it will not
come.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Printed, options_of, run
from tests.support.reports import write_file
from tests.support.run_processes import Make
from videotune import console
from videotune.commands import wait as waiting
from videotune.commands.wait import wait
from videotune.errors import DONE, FAILED, SKIPPED


def test_a_finished_run_is_there_at_once(finished: Callable[..., Path]) -> None:
    run = finished("steps=2")
    code, found = wait(run)
    assert (code, found["state"], found["step"], found["steps"]) == (DONE, "done", 2, 2)
    assert wait(run, step=2)[0] == DONE
    assert wait(run, step=3)[0] == FAILED


def test_the_state_of_a_running_run_names_no_page(tmp_path: Path) -> None:
    write_file(tmp_path, "config.json", {"settings": {}, "steps": 9})
    now = time.time()
    beat = {"pid": os.getpid(), "host": socket.gethostname(), "time": now}
    beat |= {"step": 3, "state": "training", "started": now}
    write_file(tmp_path, "heartbeat.json", beat)
    _, found = wait(tmp_path, timeout=0)
    assert found["state"] == "running"
    assert "training" in found["why"]
    assert "page" not in found["why"]


@pytest.mark.parametrize("heartbeat", [None, "", "{}", '{"step": "x"}'])
def test_a_finished_run_without_a_heartbeat_has_ended(
    finished: Callable[..., Path], tmp_path: Path, heartbeat: str | None
) -> None:
    """As of a run that was imported into the studio, or whose heartbeat is damaged."""
    run = shutil.copytree(finished("steps=2"), tmp_path / "run")
    (run / "heartbeat.json").unlink()
    if heartbeat is not None:
        (run / "heartbeat.json").write_text(heartbeat)
    code, found = wait(run, timeout=5)
    assert (code, found["state"]) == (DONE, "done")
    assert wait(run, step=2, timeout=5)[0] == DONE
    assert wait(run, step=3, timeout=5)[0] == FAILED


def test_a_run_that_broke_off_long_ago_without_a_heartbeat_has_ended(
    finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(finished("steps=2"), tmp_path / "run")
    (run / "heartbeat.json").unlink()
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    until_end = [line for line in lines if json.loads(line)["kind"] != "end"]
    (run / "journal.jsonl").write_text("".join(until_end))

    assert wait(run, timeout=0)[0] == SKIPPED  # its process may just have begun
    monkeypatch.setattr(waiting, "LATE", 0.1)
    code, found = wait(run, step=3, timeout=5)
    assert (code, found["state"]) == (FAILED, "no end")


def test_a_folder_without_a_run_is_waited_for(tmp_path: Path) -> None:
    code, found = wait(tmp_path / "run", timeout=0)
    assert (code, found["state"]) == (SKIPPED, "absent")


def test_a_folder_that_is_not_there_is_said_and_no_time_left_is_invented(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    run("wait", tmp_path / "nope", timeout=1.2)
    printed = capsys.readouterr()
    first_line = printed.err.splitlines()[0]
    assert first_line.startswith(f"There is no folder {tmp_path / 'nope'} yet")
    assert "left" not in printed.err
    assert "0/1" not in printed.err


def test_a_bar_says_no_time_left_before_the_first_step(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with console.bar("steps") as progress:
        progress.update(3, 10)
        assert "left" not in capsys.readouterr().err
        progress.update(4, 10)
        assert "left" in capsys.readouterr().err


def test_what_is_waited_for_are_the_steps_of_the_run(
    finished: Callable[..., Path],
) -> None:
    told: list[tuple[int, int]] = []
    wait(finished("steps=2"), tell=lambda done, total: told.append((done, total)))
    assert told == [(2, 2)]


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
