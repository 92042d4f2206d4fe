"""What is printed never ends a run: a full disk, a closed standard error, a reader that has gone."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.commands import small_disk
from tests.commands.safety_kit import Finished, Make, assert_same_run, start
from videotune.errors import DONE

pytestmark = pytest.mark.usefixtures("server")


def log_on_the_disk(home: Path, kept: Path, limited: bool, when: Callable[..., Any]) -> None:
    """Standard error is a file on the small disk, and its last page is full when the rest of the disk is."""

    def pad() -> None:
        with suppress(OSError):
            while True:
                os.write(2, b"\n")

    small_disk.on_small_disk(home, kept, limited, lambda fill: when(lambda: (fill(), pad())))
    os.dup2(os.open(home / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def test_a_full_disk_that_also_holds_the_log_pauses_the_run(
    overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    home, kept = tmp_path / "disk", tmp_path / "kept"
    home.mkdir()
    kept.mkdir()
    given = (home, kept, False, small_disk.after_the_first_save)
    running = start(overrides("steps=6", "save_every=2"), home / "run", first=log_on_the_disk, given=given)
    disk = small_disk.seen(running.pid, home)
    running.until((disk / small_disk.FILLER).is_file, "the full disk")
    assert running.ended(2) is None, "it waits"
    assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["step-2"]
    small_disk.make_room(running.pid, home, kept)
    assert running.ended() == DONE
    assert_same_run(kept / "copy" / "run", finished("steps=6", "save_every=2"), 6)


def unwritable(how: str) -> None:
    """Standard error is a full device, a pipe without a reader, or closed."""
    read, write = os.pipe()
    match how:
        case "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        case "no reader":
            os.dup2(write, 2)
            os.close(read)
            os.close(write)
        case "closed":
            os.close(2)


@pytest.mark.parametrize("how", ["full", "no reader", "closed"])
def test_an_unwritable_standard_error_does_not_end_a_run(how: str, overrides: Make, tmp_path: Path) -> None:
    assert start(overrides("steps=3"), tmp_path / "run", first=unwritable, given=(how,)).ended() == DONE
    assert (tmp_path / "run" / "report.html").is_file()


def test_closed_descriptors_are_not_given_to_files_of_the_run() -> None:
    """Started by a shell with 2>&-: the next file that is opened would otherwise get what libraries print."""
    code = "from videotune.console import echo, guard_stderr; guard_stderr(); echo('x'); "
    code += "f = open('/dev/null'); print(f.fileno())"
    ended = subprocess.run(
        ["bash", "-c", f'exec "{sys.executable}" -c "{code}" 2>&-'], capture_output=True, text=True, check=False
    )
    assert ended.returncode == DONE
    assert int(ended.stdout) > 2


# ---- the bar in a terminal


def in_a_terminal(code: str, columns: int) -> list[str]:
    """The lines that a process draws in a terminal of so many columns, without their colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    more = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=follower, env=more)
    os.close(follower)
    drawn = b""
    with suppress(OSError):  # the terminal's other end is closed
        while part := os.read(leader, 1 << 16):
            drawn += part
    os.close(leader)
    assert process.wait() == 0
    return [line.strip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode()))]


BAR = """
import time
from videotune.console import bar
now = []
with bar("training", lambda: "".join(now)) as progress:
    progress.update(0, 2000)
    progress.update(1234, 2000, ["loss 1.5840", "0.613 s a step", "LEARNING", "72.5 views a window, high"], 4321)
    time.sleep(0.6)
    now.append("drawing previews")
    time.sleep(0.6)
"""


def test_at_80_columns_the_bar_says_what_matters_whole() -> None:
    lines = in_a_terminal(BAR, 80)
    assert all(len(line) <= 80 for line in lines)
    (step,) = {line.split(" ━")[0] for line in lines if "loss" in line and "left" in line}
    assert step.split("  ") == ["training 1234/2000", "1:12:01 left", "loss 1.5840", "0.613 s a step"]
    assert any(line.startswith("training 1234/2000  drawing previews  loss 1.5840") for line in lines)
    assert any("72.5 views a window, high" in line for line in in_a_terminal(BAR, 120))
    assert any(line.startswith("training 1234/2000") for line in in_a_terminal(BAR, 30))
