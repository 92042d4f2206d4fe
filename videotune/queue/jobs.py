"""Jobs: ``videotune`` commands as separate processes, described only by files on disk.

So they survive the page and the server, and a restarted server finds them again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, NotRequired

import psutil
from typing_extensions import TypedDict

from videotune.errors import DONE, INTERRUPTED, SKIPPED, VideotuneError
from videotune.files import checked, read_json, write_json

JobState = Literal["running", "paused", "done", "failed", "stopped", "dead"]

_runners: list[subprocess.Popen[bytes]] = []
"""Runners that this process has started; polled, so that they do not stay zombies."""

STARTUP_SECONDS = 20.0
"""Time that a runner has for writing its ``pid.json``."""

MAX_ARGUMENT_BYTES = 100_000
"""Size limit of one argument; that of Linux is 128 kB."""

LOG_TAIL_BYTES = 65536

ALL_OR_NOTHING = ("split", "train")
"""Kinds whose exit code 2 means that nothing was done: no split video, a refused run.
"""

MAX_ENDED_JOBS = 40
"""Folders of ended jobs that stay, per kind."""

OUTCOMES: Mapping[str, str] = {
    "running": "running",
    "paused": "paused",
    "done": "done",
    "stopped": "stopped by the user",
}
"""Descriptions of the states that need no explanation."""


class JobRecord(TypedDict):
    """``job.json``: what was started, when, and how."""

    kind: str
    about: str
    words: list[str]
    started: float
    env: NotRequired[dict[str, str]]


class ProcessRecord(TypedDict):
    """``pid.json``: the process ids, and when they were written."""

    runner: int
    command: int
    time: float


class ExitRecord(TypedDict):
    """``rc.json``: how and when the command ended."""

    code: int
    ended: float


@dataclass(frozen=True)
class QueuedJob:
    """A command that was started. Times are seconds since 1970."""

    folder: Path

    kind: str
    """check, plan, train, …"""

    about: str
    """The object of the command, such as the name of a run or a clip."""

    arguments: tuple[str, ...]
    state: JobState

    code: int | None
    """The exit code; None while it runs, or if it died without one."""

    started: float
    ended: float | None

    env: Mapping[str, str] = field(hash=False)
    """Environment variables on top of those of the starting process."""

    @property
    def is_running(self) -> bool:
        """Whether its process exists, running or paused."""
        return self.state in ("running", "paused")


def start(
    project: Path,
    kind: str,
    arguments: Sequence[str],
    about: str = "",
    env: Mapping[str, str] | None = None,
) -> QueuedJob:
    """Start ``videotune ARGUMENTS`` as a separate process.

    Args:
        project: folder that gets the job, and working directory of the command.
        kind: kind of the job.
        arguments: the command.
        about: the object of the command.
        env: environment variables on top of those of this process.

    Raises:
        VideotuneError: if no process can take an argument.
    """
    _check_arguments(arguments)
    folder = _new_folder(project, kind)
    record = {
        "kind": kind,
        "about": about,
        "words": list(arguments),
        "cwd": str(project),
        "started": round(time.time(), 3),
    }
    if env:
        record["env"] = dict(env)
    write_json(folder / "job.json", record)

    runner = subprocess.Popen(
        [sys.executable, "-m", "videotune.queue.runner", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "runner-log").open("wb"),
        env={**os.environ, **(env or {})},
        start_new_session=os.name != "nt",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    _runners[:] = [process for process in _runners if process.poll() is None]
    _runners.append(runner)
    return read_job(folder)


def _check_arguments(arguments: Sequence[str]) -> None:
    for argument in arguments:
        size = len(argument.encode(errors="surrogatepass"))
        if "\0" in argument or size > MAX_ARGUMENT_BYTES:
            raise VideotuneError(
                f"{argument[:40]!r}…: an argument is at most {MAX_ARGUMENT_BYTES:,} bytes of "
                "text without NUL characters"
            )


def _new_folder(project: Path, kind: str) -> Path:
    """Create the folder of a job, named by the next free number and its kind."""
    home = project / "jobs"
    home.mkdir(exist_ok=True)
    numbers = [
        int(path.name[:6])
        for path in home.iterdir()
        if re.fullmatch(r"\d{6}-\w+", path.name)
    ]

    for number in count(max(numbers, default=0) + 1):
        folder = home / f"{number:06d}-{kind}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")


def read_job(folder: Path) -> QueuedJob:
    """Return the current state of a job; ValueError if its folder is damaged."""
    try:
        return _read_job(folder, (folder / "rc.json").stat().st_mtime_ns)
    except FileNotFoundError:
        return _read_job.__wrapped__(folder, 0)


@lru_cache(maxsize=4096)
def _read_job(folder: Path, ended_at: int) -> QueuedJob:
    """Return a job; an ended one is read only once, since it does not change any more."""
    record: JobRecord = checked(JobRecord, read_json(folder / "job.json"))
    is_alive = not (folder / "rc.json").is_file() and _is_alive(
        folder, record["started"]
    )

    # Read after the check above, since the job may end in between.
    exit_record = None if is_alive else _read_record(folder / "rc.json", ExitRecord)
    code = exit_record["code"] if exit_record else None
    if is_alive:
        state: JobState = "paused" if _is_paused(folder) else "running"
    else:
        state = _end_state(code, record["kind"])

    return QueuedJob(
        folder=folder,
        kind=record["kind"],
        about=record["about"],
        arguments=tuple(record["words"]),
        state=state,
        code=code,
        started=record["started"],
        ended=exit_record["ended"] if exit_record else None,
        env=record.get("env", {}),
    )


def _end_state(code: int | None, kind: str) -> JobState:
    if code == DONE or (code == SKIPPED and kind not in ALL_OR_NOTHING):
        return "done"
    if code in (INTERRUPTED, -15, -2):
        return "stopped"
    return "dead" if code is None or code < 0 else "failed"


def _is_alive(folder: Path, started: float) -> bool:
    """Return whether the runner, or the command that it left behind, exists."""
    for runner in _runners:
        runner.poll()  # an ended child is a zombie until it is polled

    record = _read_record(folder / "pid.json", ProcessRecord)
    if record is None:
        return time.time() - started < STARTUP_SECONDS
    return any(
        _is_same_process(pid, record["time"])
        for pid in (record["runner"], record["command"])
    )


def _is_same_process(pid: int, written: float) -> bool:
    """Return whether the process of this id is the one recorded at ``written``.

    The system may have given the id to a newer process.
    """
    try:
        process = psutil.Process(pid)
        return (
            process.create_time() < written + 2
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, ValueError):  # ValueError: a negative number
        return False


def _is_paused(folder: Path) -> bool:
    with suppress(psutil.Error):
        return any(
            process.status() == psutil.STATUS_STOPPED
            for process in _command_processes(folder)
        )
    return False


def _command_processes(
    folder: Path, *, with_children: bool = False
) -> list[psutil.Process]:
    """Return the process of a job's command, optionally with its children; empty if
    gone.
    """
    record = _read_record(folder / "pid.json", ProcessRecord)
    with suppress(psutil.Error):
        if record is not None and _is_same_process(record["command"], record["time"]):
            command = psutil.Process(record["command"])
            children = command.children(recursive=True) if with_children else []
            return [command, *children]
    return []


def _read_record(path: Path, record_type: Any) -> Any:
    """Return a file's content, checked against a TypedDict; None if missing or damaged."""
    with suppress(OSError, ValueError):
        return checked(record_type, read_json(path))
    return None


def _iter_jobs(project: Path, kind: str | None) -> Iterator[QueuedJob]:
    folders = (project / "jobs").glob(f"*-{kind or '*'}")
    for folder in sorted(folders, reverse=True):
        # The folder may be just being created or removed, or be unreadable.
        with suppress(OSError, ValueError):
            yield read_job(folder)


def all_jobs(project: Path, kind: str | None = None) -> list[QueuedJob]:
    """Return the jobs of a project, newest first."""
    return list(_iter_jobs(project, kind))


def latest(project: Path, kind: str, about: str | None = None) -> QueuedJob | None:
    """Return the newest job of a kind, optionally about a certain object; None if none."""
    for job in _iter_jobs(project, kind):
        if about in (None, job.about):
            return job
    return None


def stop(job: QueuedJob) -> bool:
    """Ask a job, also a paused one, to end (SIGTERM); return whether it was running."""
    unpause(job)
    return _signal(_command_processes(job.folder), psutil.Process.terminate)


def pause(job: QueuedJob) -> bool:
    """Suspend a job and its children, which keep their memory; return whether it ran."""
    processes = _command_processes(job.folder, with_children=True)
    return _signal(processes, psutil.Process.suspend)


def unpause(job: QueuedJob) -> bool:
    """Continue a suspended job, its children first; return whether it was running."""
    processes = _command_processes(job.folder, with_children=True)
    return _signal(processes[::-1], psutil.Process.resume)


def _signal(
    processes: Sequence[psutil.Process], send: Callable[[psutil.Process], None]
) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended a moment ago
            send(process)
    return bool(processes)


def log_tail(job: QueuedJob, lines: int = 30) -> list[str]:
    """Return the last lines that the command printed, without colours and progress
    bars.
    """
    try:
        with (job.folder / "log").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            content = file.read().decode("utf-8", "replace")
    except OSError:
        return []

    plain_text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content)
    printed_lines = [
        line.rpartition("\r")[2] for line in plain_text.split("\n") if line.strip()
    ]
    return printed_lines[-lines:]


def result(job: QueuedJob) -> Any:
    """Return the JSON that the command printed, or None."""
    with suppress(OSError, ValueError):
        return json.loads((job.folder / "out").read_bytes())
    return None


def describe_outcome(job: QueuedJob) -> str:
    """Describe how a job ended; for an error its message, which may have more than one
    line.
    """
    if job.state in OUTCOMES:
        return OUTCOMES[job.state]
    if job.state == "dead":
        is_signal = job.code is not None and job.code < 0
        by_signal = f" by signal {-job.code}" if is_signal and job.code else ""
        return f"its process was killed{by_signal}, or the computer was shut down"
    return _error_message(job) or "it printed no message"


def _error_message(job: QueuedJob) -> str:
    """Return the error that a job printed last, or else its last line."""
    lines = log_tail(job, 40)
    message_starts = [
        index for index, line in enumerate(lines) if line.startswith("videotune: ")
    ]
    message_lines = lines[message_starts[-1] :] if message_starts else lines[-1:]
    message = "\n".join(message_lines).removeprefix("videotune: ")

    project_folder = job.folder.parent.parent.absolute()
    return message.replace(f"{project_folder}/", "")


def restart(
    project: Path, kind: str, arguments: Sequence[str], about: str = ""
) -> None:
    """Start a job in place of the last one of its kind.

    That one is stopped if it runs, and the oldest ended ones are deleted.
    """
    for index, job in enumerate(all_jobs(project, kind)):
        if job.is_running and index == 0:
            stop(job)
        elif index >= MAX_ENDED_JOBS and not job.is_running:
            shutil.rmtree(job.folder)
    start(project, kind, arguments, about)
