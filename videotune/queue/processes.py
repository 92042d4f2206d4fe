"""Identify a process across restarts of the server and steps of the clock.

A process number alone proves nothing: the system gives it to another process later, and
a file may hold any number. A mark adds the start of the process and its command line,
which must all be those of the living process.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
from typing_extensions import TypedDict

from videotune.files import Number, ProcessId

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

START_FIELD = 22
"""Field of /proc/PID/stat with the start in clock ticks since boot, counted from 1."""


class ProcessMark(TypedDict):
    """What identifies a process."""

    pid: ProcessId

    boot: str
    """The boot of the machine; empty where the system has no name for it."""

    started: Number
    """Its start: on Linux in clock ticks since boot, which no step of the clock moves."""

    command_line: list[str]
    """Its arguments, without the program."""


class Uptime(TypedDict):
    """A moment that no step of the clock moves."""

    boot: str
    seconds: Number


@cache
def boot_id() -> str:
    """Return the name of the machine's present boot; empty if the system has none."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def uptime() -> Uptime:
    """Return the present moment; the seconds leave out the time that the machine slept."""
    return {"boot": boot_id(), "seconds": round(time.monotonic(), 3)}


def seconds_since(moment: Uptime) -> float | None:
    """Return the seconds since a moment; None if the machine was started again since."""
    if moment["boot"] != boot_id():
        return None
    seconds = time.monotonic() - moment["seconds"]
    return seconds if seconds >= -1 else None


def mark_process(pid: int, command_line: Sequence[str]) -> ProcessMark:
    """Return the mark of a process that this process has started, or of itself.

    Args:
        pid: its number.
        command_line: its arguments with the program.

    Raises:
        psutil.Error: if it is gone.
    """
    return {
        "pid": pid,
        "boot": boot_id(),
        "started": _start_of(pid),
        "command_line": list(command_line[1:]),
    }


def find_process(mark: ProcessMark) -> psutil.Process | None:
    """Return the living process that a mark identifies; None if it is gone."""
    if mark["boot"] != boot_id():
        return None
    try:
        process = psutil.Process(mark["pid"])
        # A zombie has no command line; it has ended.
        is_same = (
            _start_of(mark["pid"]) == mark["started"]
            and process.cmdline()[1:] == mark["command_line"]
        )
        return process if is_same else None
    except (psutil.Error, OSError):
        return None


def _start_of(pid: int) -> float:
    """Return when a process started, on Linux in clock ticks since boot.

    There, psutil's time is calculated from the clock of the machine, so it moves with
    each step of the clock.
    """
    if not psutil.LINUX:
        return float(psutil.Process(pid).create_time())
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    # The name of the program, in brackets, may hold spaces and brackets.
    fields = content.rpartition(b")")[2].split()
    return float(fields[START_FIELD - 3])
