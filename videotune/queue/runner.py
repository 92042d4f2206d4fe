"""One job, from its beginning to its end: ``python -m videotune.queue.runner FOLDER``.

It is a process of its own group, so neither a page that is closed nor a server that ends takes a job with it; what the job
said and how it ended lies in the folder.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from videotune.files import read_json, write_json


def run(folder: Path) -> int:
    """Run the words of ``job.json``; write ``out``, ``log``, ``pid.json``, and at the end ``rc.json``."""
    job = read_json(folder / "job.json")
    for number in (signal.SIGINT, signal.SIGTERM):
        # a handler, not SIG_IGN, which the command would inherit: it hears the signal itself, and its end is waited for
        signal.signal(number, lambda *_: None)
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "videotune", *job["words"]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            cwd=job["cwd"],
        )
        write_json(
            folder / "pid.json",
            {"runner": os.getpid(), "command": child.pid, "time": round(time.time(), 3)},
        )
        code = child.wait()
    write_json(folder / "rc.json", {"code": code, "ended": round(time.time(), 3)})
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
