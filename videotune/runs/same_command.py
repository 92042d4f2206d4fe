"""Whether the run in a folder was begun by the command that runs now, so that a launcher
may give the command again and again.

A launcher such as torchrun knows nothing of runs: it starts the same command anew after a
failure, and when the number of machines changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.runs.run_dir import BegunRun, read_run_config
from videotune.runs.way_on import describe_way_on

if TYPE_CHECKING:  # it imports torch, and the command line reads this module first
    from videotune.distributed import DistributedContext

NO_RUN = ""
"""What stands for a folder without a run, in place of its command."""

UNKNOWN = "unknown"
"""What stands for a run that does not say which command began it."""


def launcher_restarts() -> bool:
    """Return whether torchrun was told to start its command again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def command_digest(begun: BegunRun) -> str:
    """Return a digest of what a user asked for."""
    content: Mapping[str, Any] = begun
    return digest(dict(content))


def begun_by(run: Path) -> str:
    """Return the digest of the command that began the run in a folder, NO_RUN or
    UNKNOWN.
    """
    if not (run / "config.json").is_file():
        return NO_RUN
    return read_run_config(run).get("command") or UNKNOWN


def begun_by_this_command(run: Path, begun: BegunRun, dist: DistributedContext) -> bool:
    """Return whether the folder holds a run of this command. False: it holds none.

    Args:
        run: the run folder.
        begun: what this command asks for.
        dist: this process among those of the run.

    Raises:
        VideotuneError: if another command has begun the run, or if the processes do not
            all see the same run.
    """
    commands = dist.all_gather(begun_by(run))
    different = [
        rank for rank, command in enumerate(commands) if command != commands[0]
    ]
    if different:
        raise VideotuneError(
            f"--out: process {different[0]} does not see the same run in {run} as process "
            "0. To continue a run on other machines, put it on a disk that all of them share"
        )
    if commands[0] == NO_RUN:
        return False
    if commands[0] != command_digest(begun):
        raise VideotuneError(
            f"--out: {run} holds a run that another command began, with another preset, "
            f"config, --set, --data or --allow-skips. {describe_way_on(run)}; or "
            "choose another --out"
        )
    return True
