"""A small disk for a process alone: a tmpfs in a mount namespace of its own, or a limit
on its files where there is none.

The process fills it itself at a moment that a test names; from outside room is made.
What lies on it is reached through ``/proc/PID/root`` while the process lives, and
copied to a real folder when it ends.
"""

import ctypes
import os
import resource
import shutil
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tests.support.interruptions import before, nth

NEW_NAMESPACE, NEW_USER = 0x00020000, 0x10000000
FILLER = "filler"
TRY_AGAIN = 0.1
"""Seconds instead of five between two looks at the full disk."""


def mounted(place: Path, size: int) -> bool:
    """Mount a tmpfs of so many bytes for this process alone; whether the system let it."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACE | (0 if user == 0 else NEW_USER)) != 0:
        return False
    if user != 0:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: nobody else sees what is mounted
    if libc.mount(b"none", b"/", None, private, None) != 0:
        return False
    return bool(
        libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, f"size={size}".encode()) == 0
    )


def on_small_disk(
    home: Path, kept: Path, limited: bool, fill_at: Callable[[Callable[[], None]], None]
) -> None:
    """Called in the process before the command, whose --out lies in ``home``;
    ``fill_at(fill)`` says when it is filled.
    """
    from videotune.trainer import saving

    saving.TRY_AGAIN = TRY_AGAIN
    tmpfs = not limited and mounted(home, 32 << 20)
    (kept / "how.txt").write_text("tmpfs" if tmpfs else "limit")
    Finalize(None, lambda: keep(home, kept / "copy"), exitpriority=1)
    fill_at(lambda: fill(home, tmpfs))


def keep(home: Path, copy: Path) -> None:
    """What lies on the disk at the end, where it can still be seen."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns(FILLER))


def fill(home: Path, tmpfs: bool) -> None:
    """No byte more goes onto the disk; or no file becomes longer than the journal is,
    as a checkpoint's would.
    """
    if not tmpfs:
        (journal,) = home.glob("*/journal.jsonl")
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (journal.stat().st_size, resource.RLIM_INFINITY)
        )
        return
    with (home / FILLER).open("wb", buffering=0) as file:
        for count in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * count) == count:
                    pass
            except OSError:
                continue


def make_room(pid: int, home: Path, kept: Path) -> None:
    """What a person does."""
    if (kept / "how.txt").read_text() == "tmpfs":
        seen(pid, home).joinpath(FILLER).unlink()
    else:
        resource.prlimit(
            pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )


def seen(pid: int, home: Path) -> Path:
    """The folder as the process sees it."""
    return Path(f"/proc/{pid}/root") / home.relative_to("/")


# ---- when the disk fills up


def after_the_first_save(fill: Callable[[], None]) -> None:
    """Somebody else fills the disk when the first checkpoint is complete."""
    from videotune.trainer import saving

    save, met = saving.save_checkpoint, nth(1)

    def save_and_fill(*given: Any) -> Any:
        done = save(*given)
        if met():
            fill()
        return done

    saving.save_checkpoint = save_and_fill


def in_the_second_save(fill: Callable[[], None]) -> None:
    """So that the check before it says nothing, and a file of tensors meets the full
    disk.
    """
    before(
        "runs.checkpoint_writer:write_tensors", fill, nth(4)
    )  # weights, optimizer, weights, and this optimizer


def before_the_export(fill: Callable[[], None]) -> None:
    """All steps are done and saved; a file of tensors meets the full disk."""
    before("commands.train:export_run", fill, nth(1))


def after_step_three(fill: Callable[[], None]) -> None:
    """Only the journal is written then."""
    before("trainer.loop:write_step", fill, lambda _, record, __: record.step == 4)
