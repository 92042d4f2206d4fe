"""Folders of runs and jobs as the commands leave them."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from tests.support.journal_lines import step_line
from videotune.files import write_json
from videotune.studio.projects import Project


def ended_job(
    project: Project, kind: str, code: int, log: str = "", **facts: Any
) -> Path:
    """The folder of a job that has ended."""
    folder = (
        project.folder
        / "jobs"
        / f"{1 + len(list((project.folder / 'jobs').iterdir())):06d}-{kind}"
    )
    folder.mkdir()
    now = time.time()
    told = {
        "kind": kind,
        "about": "run-1",
        "words": [],
        "cwd": str(project.folder),
        "started": now,
    }
    write_json(folder / "job.json", told | facts)
    write_json(folder / "rc.json", {"code": code, "ended": now + 1})
    (folder / "log").write_text(log)
    return folder


def steps(run: Path, numbers: range) -> None:
    """Lines of the journal of a run."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "journal.jsonl").open("a") as file:
        if not file.tell():
            file.write('{"kind": "start"}\n')
        for number in numbers:
            file.write(
                json.dumps(step_line(number, mse=1.0 / number, seconds={"step": 0.5}))
                + "\n"
            )


def write_heartbeat(run: Path, pid: int, state: str = "training") -> None:
    """The heartbeat of a run."""
    facts = {"pid": pid, "host": socket.gethostname(), "step": 3, "state": state}
    write_json(
        run / "heartbeat.json",
        facts | dict.fromkeys(("started", "since", "time"), time.time()),
    )
