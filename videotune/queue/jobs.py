"""Jobs: ``videotune`` commands as processes of their own, known by what they left on the disk alone.

So they outlive the page and the server, and a server that begins again finds them as they are.
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

_started: list[subprocess.Popen[bytes]] = []
"""Runners that this process has begun and that are to be waited for once they end."""

STARTUP_SECONDS = 20.0
"""Seconds that a runner may take until it has said its number."""

MAX_ARGUMENT_BYTES = 100_000
"""Bytes of one argument; Linux takes 128 kB."""

ALL_OR_NOTHING = ("split", "train")
"""Kinds whose exit code 2 says that nothing was done: the video is not split, the run is refused."""

MAX_ENDED_JOBS = 40
"""Folders of ended jobs that stay, of one kind."""


class JobRecord(TypedDict):
    """``job.json``: what was started, when, and how."""

    kind: str
    about: str
    words: list[str]
    started: float
    env: NotRequired[dict[str, str]]


class ProcessRecord(TypedDict):
    """``pid.json``: the processes, and when they were written down."""

    runner: int
    command: int
    time: float


class ExitRecord(TypedDict):
    """``rc.json``: how and when the command ended."""

    code: int
    ended: float


@dataclass(frozen=True)
class QueuedJob:
    """A command that was started: its kind (check, plan, train …), what it is about, and how it stands.

    ``code`` is the exit code, None while it runs and where it died without one; times are seconds since 1970; ``env``:
    environment variables that it was given beside the starting process's.
    """

    folder: Path
    kind: str
    about: str
    arguments: tuple[str, ...]
    state: JobState
    code: int | None
    started: float
    ended: float | None
    env: Mapping[str, str] = field(hash=False)

    @property
    def is_running(self) -> bool:
        """Whether its process is there, at work or paused."""
        return self.state in ("running", "paused")


def start(
    project: Path,
    kind: str,
    words: Sequence[str],
    about: str = "",
    env: Mapping[str, str] | None = None,
) -> QueuedJob:
    """Start ``videotune WORDS`` apart from this process.

    ``env``: environment variables beside this process's own. Raises VideotuneError for a word that no process can be given.
    """
    for word in words:
        if "\0" in word or len(word.encode(errors="surrogatepass")) > MAX_ARGUMENT_BYTES:
            raise VideotuneError(
                f"{word[:40]!r}…: at most {MAX_ARGUMENT_BYTES:,} bytes of text, without a NUL character"
            )
    home = project / "jobs"
    home.mkdir(exist_ok=True)
    taken = [
        int(path.name[:6]) for path in home.iterdir() if re.fullmatch(r"\d{6}-\w+", path.name)
    ]
    for number in count(max(taken, default=0) + 1):
        folder = home / f"{number:06d}-{kind}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    facts = {
        "kind": kind,
        "about": about,
        "words": list(words),
        "cwd": str(project),
        "started": round(time.time(), 3),
    }
    facts |= {"env": dict(env)} if env else {}
    write_json(folder / "job.json", facts)
    process = subprocess.Popen(
        [sys.executable, "-m", "videotune.queue.runner", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "runner-log").open("wb"),
        env={**os.environ, **(env or {})},
        start_new_session=os.name != "nt",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    _started[:] = [one for one in _started if one.poll() is None] + [process]
    return read_job(folder)


def read_job(folder: Path) -> QueuedJob:
    """A job as its folder and the table of processes say that it stands; ValueError where its folder is damaged."""
    try:
        return _read(folder, (folder / "rc.json").stat().st_mtime_ns)
    except FileNotFoundError:
        return _read.__wrapped__(folder, 0)


@lru_cache(maxsize=4096)
def _read(folder: Path, ended_at: int) -> QueuedJob:
    """A job; one that ended is read once, since its folder does not change any more."""
    facts: JobRecord = checked(JobRecord, read_json(folder / "job.json"))
    alive = not (folder / "rc.json").is_file() and _alive(folder, facts["started"])
    end = (
        None if alive else _json(folder / "rc.json", ExitRecord)
    )  # read after: it may end between the two looks
    code, ended = (None, None) if end is None else (end["code"], end["ended"])
    state = ("paused" if _paused(folder) else "running") if alive else _how(code, facts["kind"])
    times = facts["started"], ended
    return QueuedJob(
        folder,
        facts["kind"],
        facts["about"],
        tuple(facts["words"]),
        state,
        code,
        *times,
        facts.get("env", {}),
    )


def _how(code: int | None, kind: str) -> JobState:
    if code == DONE or (code == SKIPPED and kind not in ALL_OR_NOTHING):
        return "done"
    if code in (INTERRUPTED, -15, -2):
        return "stopped"
    return "dead" if code is None or code < 0 else "failed"


def _alive(folder: Path, started: float) -> bool:
    """Whether the runner, or the command that it left behind, is there: the same process, not its number alone."""
    for one in _started:
        one.poll()  # an ended child is a zombie until it is asked
    pids = _json(folder / "pid.json", ProcessRecord)
    if pids is None:
        return time.time() - started < STARTUP_SECONDS
    return any(_same(pid, pids["time"]) for pid in (pids["runner"], pids["command"]))


def _same(pid: int, written: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() < written + 2 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):  # ValueError: a number below 0
        return False


def _paused(folder: Path) -> bool:
    """Whether the command of a job is suspended."""
    with suppress(psutil.Error):
        return any(process.status() == psutil.STATUS_STOPPED for process in _command(folder))
    return False


def _command(folder: Path, family: bool = False) -> list[psutil.Process]:
    """The command of a job, with its children where the ``family`` is asked for; none where it is gone."""
    pids = _json(folder / "pid.json", ProcessRecord)
    with suppress(psutil.Error):
        if pids is not None and _same(pids["command"], pids["time"]):
            command = psutil.Process(pids["command"])
            return [command, *(command.children(recursive=True) if family else ())]
    return []


def _json(path: Path, kind: Any) -> Any:
    """A file's content as that TypedDict; None where it is not there, or damaged."""
    with suppress(OSError, ValueError):
        return checked(kind, read_json(path))
    return None


def _each(project: Path, kind: str | None) -> Iterator[QueuedJob]:
    for folder in sorted((project / "jobs").glob(f"*-{kind or '*'}"), reverse=True):
        with suppress(
            OSError, ValueError
        ):  # a folder that is being made or taken away, or that nobody can read
            yield read_job(folder)


def all_jobs(project: Path, kind: str | None = None) -> list[QueuedJob]:
    """The project's jobs, the last one first."""
    return list(_each(project, kind))


def latest(project: Path, kind: str, about: str | None = None) -> QueuedJob | None:
    """The last job of a kind, and of what it is about where that is named; None where there was none."""
    return next((job for job in _each(project, kind) if about in (None, job.about)), None)


def stop(job: QueuedJob) -> bool:
    """Ask a job's command to end (SIGTERM), a paused one too; whether there was one to ask."""
    unpause(job)
    return _signal(_command(job.folder), psutil.Process.terminate)


def pause(job: QueuedJob) -> bool:
    """Suspend a job's command and its children, which keep their memory; whether there was one."""
    return _signal(_command(job.folder, family=True), psutil.Process.suspend)


def unpause(job: QueuedJob) -> bool:
    """Let a suspended command go on, its children first; whether there was one."""
    return _signal(_command(job.folder, family=True)[::-1], psutil.Process.resume)


def _signal(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended a moment ago
            act(process)
    return bool(processes)


def log_tail(job: QueuedJob, lines: int = 30) -> list[str]:
    """The last lines that the command printed for the user, of 64 kB at most, without the codes of colours and bars."""
    try:
        with (job.folder / "log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            content = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content)
    return [line.rpartition("\r")[2] for line in plain.split("\n") if line.strip()][-lines:]


def result(job: QueuedJob) -> Any:
    """The JSON that the command printed, or None where it printed none."""
    with suppress(OSError, ValueError):
        return json.loads((job.folder / "out").read_bytes())
    return None


def describe_outcome(job: QueuedJob) -> str:
    """How a job ended, in words; an error as the command told it, which may be several lines."""
    known = {
        "running": "at work",
        "paused": "paused",
        "done": "done",
        "stopped": "stopped, as asked",
    }
    if job.state in known:
        return known[job.state]
    if job.state == "dead":
        by = f" by signal {-job.code}" if job.code is not None and job.code < 0 else ""
        return f"its process was killed{by}, or the computer went off"
    lines = log_tail(job, 40)
    begins = [place for place, line in enumerate(lines) if line.startswith("videotune: ")]
    text = "\n".join(lines[begins[-1] :] if begins else lines[-1:]).removeprefix("videotune: ")
    return text.replace(f"{job.folder.parent.parent.absolute()}/", "") or "it said nothing"


def restart(project: Path, kind: str, words: Sequence[str], about: str = "") -> None:
    """Start a job in place of the last one of its kind, which is ended if it runs; the oldest ended ones are removed."""
    for place, job in enumerate(all_jobs(project, kind)):
        if job.is_running and place == 0:
            stop(job)
        elif place >= MAX_ENDED_JOBS and not job.is_running:
            shutil.rmtree(job.folder)
    start(project, kind, words, about)
