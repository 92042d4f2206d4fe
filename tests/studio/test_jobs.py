"""Jobs outlive the page and the server: what they are is read from the disk and the
table of processes alone.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import steps, write_heartbeat
from tests.support.journal_lines import step_line
from tests.support.waiting import wait_until
from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import jobs
from videotune.queue.processes import mark_process
from videotune.reporter.progress import progress
from videotune.studio import projects, status


def test_a_job_says_what_it_printed_and_how_it_ended(tmp_path: Path) -> None:
    job = jobs.start(tmp_path, "check", ["presets", "nonsense"])
    assert job.is_running
    wait_until(lambda: not jobs.read_job(job.folder).is_running)
    ended = jobs.read_job(job.folder)
    assert (ended.state, ended.code) == ("failed", 1)
    assert "nonsense" in jobs.describe_outcome(ended)
    assert jobs.latest(tmp_path, "check") == ended
    assert hash(ended) == hash(jobs.read_job(job.folder)), "pages are kept by their job"
    assert jobs.latest(tmp_path, "plan") is None


def sleeper(
    tmp_path: Path, about: str = "run-1"
) -> tuple[jobs.QueuedJob, subprocess.Popen[bytes]]:
    """A job folder as the runner leaves it, of a process that sleeps apart from this
    one.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True
    )
    folder = tmp_path / "jobs" / "000001-train"
    folder.mkdir(parents=True)
    facts = {"kind": "train", "about": about, "words": [], "cwd": str(tmp_path)}
    write_json(folder / "job.json", facts | {"started": time.time()})
    mark = mark_process(process.pid, process.args)
    write_pids(folder, mark)
    return jobs.read_job(folder), process


def write_pids(folder: Path, mark: Any) -> None:
    """The file of a runner."""
    pids = {"folder": str(folder.stat().st_ino), "runner": mark, "command": mark}
    write_json(folder / "pid.json", pids)


OTHERS: list[dict[str, Any]] = [
    {"started": 1.0},
    {"boot": "another"},
    {"command_line": ["-c", "import time; time.sleep(101)"]},
    {"pid": os.getpid()},
    {"pid": 10**30},
    {"pid": -1},
    {"pid": 0},
    {"started": "x"},
]
"""What another process, or a file that somebody else wrote, has of a mark."""


@pytest.mark.parametrize("other", OTHERS)
def test_only_the_process_that_was_started_is_its_own(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    job, process = sleeper(tmp_path)
    try:
        assert job.is_running
        mark = mark_process(process.pid, process.args)
        write_pids(job.folder, mark | other)
        assert jobs.read_job(job.folder).state == "dead"
        assert not jobs.stop(job)
        assert not jobs.pause(job)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_number_alone_ends_no_process(tmp_path: Path) -> None:
    """The file of an earlier version, or of a stranger."""
    job, process = sleeper(tmp_path)
    try:
        pids = {"runner": process.pid, "command": process.pid, "time": 9e9}
        write_json(job.folder / "pid.json", pids)
        assert jobs.read_job(job.folder).state == "dead"
        assert not jobs.stop(job)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_killed_process_is_dead(tmp_path: Path) -> None:
    job, process = sleeper(tmp_path)
    assert job.is_running
    process.kill()
    wait_until(lambda: jobs.read_job(job.folder).state == "dead")
    assert "killed" in jobs.describe_outcome(jobs.read_job(job.folder))
    process.wait()


STATES = {0: "done", 2: "done", 1: "failed", 130: "stopped", -9: "dead", -15: "stopped"}


@pytest.mark.parametrize(("code", "state"), STATES.items())
def test_exit_codes_in_words(tmp_path: Path, code: int, state: str) -> None:
    folder = tmp_path / "jobs" / "000001-check"
    folder.mkdir(parents=True)
    write_json(
        folder / "job.json",
        {"kind": "check", "about": "", "words": [], "cwd": ".", "started": 1.0},
    )
    write_json(folder / "rc.json", {"code": code, "ended": 2.0})
    assert jobs.read_job(folder).state == state


def test_a_video_that_cannot_be_split_comes_back_and_the_job_has_failed(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    film = project.folder / "clips" / "film.mp4"
    film.write_bytes(b"\0\0\0\x18ftypmp42" + bytes(3000))
    film.with_suffix(".txt").write_text("a cat")
    assert (
        client.post("/p/one/data/cut", data={"path": "clips/film.mp4"}).status_code
        == 204
    )
    wait_until(
        lambda: (
            not (
                jobs.latest(project.folder, "split") or pytest.fail("no job")
            ).is_running
        )
    )
    ended = jobs.latest(project.folder, "split")
    assert ended is not None
    assert ended.state == "failed"
    assert film.is_file()
    assert film.with_suffix(".txt").read_text() == "a cat"


@pytest.mark.parametrize("prompt", ["a\0b", "x" * 3_000_000])
def test_a_word_that_no_process_takes_is_refused_and_leaves_no_job(
    tmp_path: Path, prompt: str
) -> None:
    with pytest.raises(VideotuneError):
        jobs.start(tmp_path, "sample", ["sample", "--prompt", prompt])
    assert jobs.latest(tmp_path, "sample") is None


def test_only_a_process_that_lives_is_asked_to_stop(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))

    def ask(word: str) -> int:
        return int(
            client.post(
                "/p/one/run/ask", data={"run": "run-1", "word": word}
            ).status_code
        )

    assert ask("stop") == 422, "it has no heartbeat"
    write_heartbeat(run, os.getpid())
    assert ask("leap") == 422
    assert not (run / "control.json").exists()
    assert ask("stop") == 204
    assert json.loads((run / "control.json").read_text()) == {"stop": True}


def shown(run: Path) -> list[int]:
    return list(status.read_journal(run)[1].at)


def test_a_journal_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert shown(run) == []
    steps(run, range(1, 4))
    assert shown(run) == [1, 2, 3]
    line = json.dumps(step_line(4))
    with (run / "journal.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        assert shown(run) == [1, 2, 3], "half a line waits"
        file.write(line[20:] + "\n")
    assert shown(run) == [1, 2, 3, 4]
    aside = tmp_path / "aside"
    steps(aside, range(1, 3))
    os.replace(aside / "journal.jsonl", run / "journal.jsonl")
    assert shown(run) == [1, 2], "a journal written anew is read anew"


def test_progress_and_time_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps(run, range(1, 11))
    write_json(run / "config.json", {"steps": 30, "settings": {}})
    far = progress(status.read_live(run))
    assert (far.done, far.total, far.left, far.throughput) == (10, 30, 10.0, 0.5)


def test_a_dead_run_is_shown_as_dead_and_a_living_one_as_running(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    write_json(run / "config.json", {"steps": 30, "settings": {}})

    def part() -> str:
        page = str(client.get("/p/one/train").text)
        return page[page.index('id="r-run"') : page.index('id="charts"')]

    def offered(page: str) -> list[bool]:
        return [f"<span>{word}</span>" in page for word in ("Stop and save", "Resume")]

    write_heartbeat(run, os.getpid())
    assert ">running<" in part()
    assert offered(part()) == [True, False]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_heartbeat(run, gone.pid)
    assert ">died<" in part()
    assert "died at step 3" in part()
    assert "No checkpoint exists" in part()
    assert offered(part()) == [False, True]

    heartbeat = (run / "heartbeat.json").read_bytes()
    (run / "heartbeat.json").unlink()
    assert "or the run was copied while it trained" in part(), "as in an imported one"
    (run / "heartbeat.json").write_bytes(heartbeat)
    with (run / "journal.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"kind": "end", "step": 3, "time": time.time(), "why": "stopped"}
            )
            + "\n"
        )
    assert "Stopped and saved" in part()
