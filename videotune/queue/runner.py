"""Runs one job from start to end: ``python -m videotune.queue.runner FOLDER``.

It has a process group of its own, so neither a closed page nor a stopped server ends
the job. The output of the job and its exit code are files in the folder.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.files import read_json, write_json
from videotune.queue.processes import mark_process


def run(folder: Path) -> int:
    """Run the command of ``job.json``; write ``out``, ``log``, ``pid.json`` and
    ``rc.json``.
    """
    job = read_json(folder / "job.json")

    # The command gets the signal itself; the runner waits for its end. A handler, since
    # the command would inherit SIG_IGN.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: None)

    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        arguments = [sys.executable, "-m", *_command(job)]
        command = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            cwd=job["cwd"],
        )
        write_json(
            folder / "pid.json",
            {
                "folder": str(folder.stat().st_ino),
                "runner": mark_process(os.getpid(), sys.orig_argv),
                "command": mark_process(command.pid, arguments),
            },
        )
        exit_code = command.wait()

    write_json(folder / "rc.json", {"code": exit_code, "ended": round(time.time(), 3)})
    return 0


def _command(job: Mapping[str, Any]) -> list[str]:
    """Return the module that runs a job, and its arguments."""
    processes = job.get("processes", 1)
    if processes > 1:
        return ["videotune.cli.launcher", str(processes), *job["words"]]
    return ["videotune", *job["words"]]


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
