"""Jobs: ``videotune`` commands as separate processes, described only by files on disk.

So they survive the page and the server, and a restarted server finds them again.
"""

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
from typing import Annotated, Any, Literal, NotRequired

import psutil
from annotated_types import Interval
from typing_extensions import TypedDict

from videotune.errors import DONE, INTERRUPTED, SKIPPED, VideotuneError
from videotune.files import Count, Moment, read_typed, write_json
from videotune.queue.processes import (
    ProcessMark,
    Uptime,
    find_process,
    seconds_since,
    uptime,
)

JobState = Literal["running", "paused", "done", "failed", "stopped", "dead"]

_runners: dict[Path, subprocess.Popen[bytes]] = {}
"""Runners that this process has started, by the folders of their jobs.

They are polled, so that they do not stay zombies.
"""

STARTUP_SECONDS = 20.0
"""Time that a runner has for writing its ``pid.json``."""

MAX_ARGUMENT_BYTES = 100_000
"""Size limit of one argument; that of Linux is 128 kB."""

LOG_TAIL_BYTES = 65536

MAX_OUTPUT_BYTES = 32_000_000
"""Size limit of the JSON that a command prints: a check of some 20,000 clips."""

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
    started: Moment
    uptime: NotRequired[Uptime]
    turn: NotRequired[Count]
    env: NotRequired[dict[str, str]]
    processes: NotRequired[Count]


class ProcessRecord(TypedDict):
    """``pid.json``: the processes of a job."""

    folder: str
    """The number of the job's folder on its disk, which a copy of the folder has not."""

    runner: ProcessMark
    command: ProcessMark


class ExitRecord(TypedDict):
    """``rc.json``: how and when the command ended."""

    code: Annotated[int, Interval(ge=-(2**31), lt=2**32)]
    ended: Moment


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

    turn: int = 0
    """The turn of its queue entry that it belongs to."""

    processes: int = 1
    """How many processes run the command together, each with a GPU of its own."""

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
    turn: int = 0,
    processes: int = 1,
) -> QueuedJob:
    """Start ``videotune ARGUMENTS`` as a separate process.

    Args:
        project: folder that gets the job, and working directory of the command.
        kind: kind of the job.
        arguments: the command.
        about: the object of the command.
        env: environment variables on top of those of this process.
        turn: the turn of the queue entry that the job belongs to.
        processes: how many processes run the command together.

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
        "uptime": uptime(),
        "turn": turn,
    }
    if env:
        record["env"] = dict(env)
    if processes > 1:
        record["processes"] = processes
    write_json(folder / "job.json", record)

    with (folder / "runner-log").open("wb") as runner_log:
        runner = subprocess.Popen(
            [sys.executable, "-m", "videotune.queue.runner", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=runner_log,
            env={**os.environ, **(env or {})},
            start_new_session=os.name != "nt",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
    _forget_ended_runners()
    _runners[folder.absolute()] = runner
    return read_job(folder)


def _forget_ended_runners() -> None:
    for folder, runner in list(_runners.items()):
        if runner.poll() is not None:
            _runners.pop(folder, None)


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
    record: JobRecord = read_typed(folder / "job.json", JobRecord)
    is_alive = not (folder / "rc.json").is_file() and _is_alive(
        folder, record.get("uptime")
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
        turn=record.get("turn", 0),
        processes=record.get("processes", 1),
    )


def _end_state(code: int | None, kind: str) -> JobState:
    if code == DONE or (code == SKIPPED and kind not in ALL_OR_NOTHING):
        return "done"
    if code in (INTERRUPTED, -15, -2):
        return "stopped"
    return "dead" if code is None or code < 0 else "failed"


def _is_alive(folder: Path, started: Uptime | None) -> bool:
    """Return whether the runner, or the command that it left behind, exists."""
    _forget_ended_runners()
    if folder.absolute() in _runners:
        return True

    record = _read_processes(folder)
    if record is None and (folder / "pid.json").exists():
        return False
    if record is None:
        seconds = None if started is None else seconds_since(started)
        return seconds is not None and seconds < STARTUP_SECONDS
    return any(find_process(mark) for mark in (record["runner"], record["command"]))


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
    record = _read_processes(folder)
    command = find_process(record["command"]) if record is not None else None
    if command is None:
        return []
    with suppress(psutil.Error):
        children = command.children(recursive=True) if with_children else []
        return [command, *children]
    return []


def _read_processes(folder: Path) -> ProcessRecord | None:
    """Return the processes of a job; None if it has none, or was copied from another."""
    record: ProcessRecord | None = _read_record(folder / "pid.json", ProcessRecord)
    if record is None or record["folder"] != str(folder.stat().st_ino):
        return None
    return record


def _read_record(path: Path, record_type: Any) -> Any:
    """Return a file's content, checked against a TypedDict; None if missing or damaged."""
    with suppress(OSError, ValueError):
        return read_typed(path, record_type)
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


def result(job: QueuedJob, kind: Any = Any) -> Any:
    """Return the JSON that the command printed; None if it printed none of that type.

    Args:
        job: the job.
        kind: the type that its content must have.
    """
    with suppress(OSError, ValueError):
        return read_typed(job.folder / "out", kind, MAX_OUTPUT_BYTES)
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
