"""The queue: what runs when, what is tried again, and what a kill leaves."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil._pslinux as psutil_linux
import pytest

from tests.support.command_line import options_of, run
from tests.support.run_processes import Make
from tests.support.run_results import assert_same_run, complete, steps_of
from tests.support.waiting import wait_until
from videotune.cli import queue_progress
from videotune.cli.queue_stop import STOPPING, interrupts_as_stops
from videotune.errors import DONE, FAILED, INTERRUPTED, VideotuneError
from videotune.files import write_json
from videotune.queue import entries as queue
from videotune.queue import jobs, worker
from videotune.queue.entries import (
    GPU_VARIABLE,
    add,
    entries,
    find_entry,
    hold,
    remove,
    reorder,
    requeue,
)
from videotune.queue.processes import uptime
from videotune.queue.sweep import combinations
from videotune.queue.worker import run_queue

Queue = Callable[..., Path]


@pytest.fixture
def filled(tmp_path: Path) -> Queue:
    """A queue with entries of these names and priorities, whose configs nobody reads."""

    def make(**priorities: int) -> Path:
        for name, priority in priorities.items():
            add(
                tmp_path / "queue",
                name,
                {"steps": 1},
                tmp_path / f"run {name}",
                priority,
                "all",
            )
        return tmp_path / "queue"

    return make


def ended(
    home: Path,
    name: str,
    code: int | None,
    *,
    card: str | None = None,
    turn: int = 0,
    is_starting: bool = False,
) -> None:
    """A process of an entry as the runner leaves it; without a code the machine went
    off under it.
    """
    number = len(list((home / "jobs").glob("*"))) + 1 if (home / "jobs").is_dir() else 1
    folder = home / "jobs" / f"{number:06d}-train"
    folder.mkdir(parents=True)
    begun = time.time() - 100
    facts = {
        "kind": "train",
        "about": name,
        "words": [],
        "cwd": ".",
        "started": begun,
        "turn": turn,
        "env": {} if card is None else {GPU_VARIABLE: card},
    }
    if is_starting:
        facts["uptime"] = uptime()
    write_json(folder / "job.json", facts)
    if code is not None:
        write_json(folder / "rc.json", {"code": code, "ended": begun + 1})


def states(home: Path) -> dict[str, str]:
    return {one.name: one.state for one in entries(home)}


def test_the_highest_priority_is_first_and_then_what_was_added_first(
    filled: Queue,
) -> None:
    home = filled(a=0, b=5, c=0)
    (home / "by-hand.yaml").write_text(
        "steps: 1  # a file that was put there is an entry too\n"
    )
    assert [one.name for one in entries(home)] == ["b", "a", "c", "by-hand"]


def test_a_new_command_for_an_old_entry_goes_after_what_waits(filled: Queue) -> None:
    home = filled(a=0, b=0, c=0)
    ended(home, "a", 0)
    requeue(home, "a", ["train", "--resume"])
    assert [one.name for one in entries(home)] == ["b", "c", "a"]
    ended(home, "b", 0)
    requeue(home, "b")
    assert [one.name for one in entries(home)] == ["b", "c", "a"], "tried again"


OUTCOMES = [
    ([1], "waiting", 1), ([1, 1], "failed", 2), ([2, 1], "failed", 2), ([-9, -9], "failed", 2), ([0], "done", 0),
    ([1, 0], "done", 0), ([130], "stopped", 0), ([None], "waiting", 0), ([1, None], "waiting", 0), ([None, 1], "waiting", 1),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "state", "tries"), OUTCOMES)
def test_a_failure_is_tried_once_more_and_a_power_cut_as_often_as_it_comes(
    filled: Queue, codes: list[int | None], state: str, tries: int
) -> None:
    home = filled(a=0)
    for code in codes:
        ended(home, "a", code)
    assert (find_entry(home, "a").state, find_entry(home, "a").tries) == (state, tries)


@pytest.mark.parametrize(("busy_card", "free_card"), [("0", "1"), ("1", "0")])
def test_each_card_has_one_training(
    busy_card: str, free_card: str, filled: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, started = filled(a=3, b=2, c=1), []
    monkeypatch.setattr(
        worker, "start", lambda _, entry, cards: started.append((entry.name, *cards))
    )
    assert worker._start_ready(
        home, ["0", "1"], (), worker.StateReporter(lambda _: None)
    )
    assert started == [("a", "0"), ("b", "1")]
    started.clear()
    # begun a moment ago: it runs
    ended(home, "a", None, card=busy_card, is_starting=True)
    assert worker._start_ready(
        home, ["0", "1"], (), worker.StateReporter(lambda _: None)
    )
    assert started == [("b", free_card)]


@pytest.mark.parametrize(
    "name", ["../out", "a/b", "", ".hidden", "queue", "x" * 200, "a b"]
)
def test_a_name_that_is_no_file_of_the_queue_is_refused(
    filled: Queue, name: str
) -> None:
    with pytest.raises(VideotuneError):
        add(filled(a=0), name, {})


@pytest.mark.parametrize("skips", ["2", "all"])
def test_an_entry_keeps_its_run_folder_and_its_skips(
    skips: str, tmp_path: Path
) -> None:
    add(tmp_path / "queue", "a", {"steps": 1}, tmp_path / "runs" / "a", skips=skips)
    found = find_entry(tmp_path / "queue", "a")
    assert (found.run, found.skips) == (tmp_path / "runs" / "a", skips)


def test_a_taken_name_and_a_damaged_list_are_refused(filled: Queue) -> None:
    home = filled(a=0)
    with pytest.raises(VideotuneError):
        add(home, "a", {})
    for content in ("{", '{"a": 3}', '{"a": {"priority": "high"}}', "[]"):
        (home / "queue.json").write_text(content)
        with pytest.raises(VideotuneError):
            entries(home)


DAMAGED = {
    "job.json": [
        "{",
        "[]",
        '{"kind": "train"}',
        '{"kind": "train", "about": "a", "words": [], "started": "x"}',
    ],
    "rc.json": ['{"code": "x", "ended": 1}', "{", "null"],
    "pid.json": ['{"runner": "x"}', "[1]"],
}


@pytest.mark.parametrize(
    ("file", "content"), [(file, one) for file, many in DAMAGED.items() for one in many]
)
def test_a_damaged_file_of_a_process_stops_nothing(
    filled: Queue, file: str, content: str
) -> None:
    home = filled(a=0)
    ended(home, "a", None if file == "pid.json" else 1)
    (home / "jobs" / "000001-train" / file).write_text(content)
    assert states(home) == {"a": "waiting"}


def test_a_run_folder_belongs_to_one_entry(filled: Queue, tmp_path: Path) -> None:
    """Another run there would be resumed, with the settings that it began with."""
    home, done = filled(a=0), tmp_path / "queue" / "runs" / "b"
    write_json(done / "config.json", {})
    for name, out in (("b", None), ("c", done), ("c", tmp_path / "run a")):
        with pytest.raises(VideotuneError):
            add(home, name, {}, out)
    assert states(home) == {"a": "waiting"}


def test_what_is_no_config_of_its_own_is_left_out_or_refused(filled: Queue) -> None:
    home = filled(a=0)
    (home / "gone.json").symlink_to("nowhere")
    (home / "folder.yaml").mkdir()
    assert states(home) == {"a": "waiting"}
    for name in (b"a.yaml", b"b\nc.json", b"d\xff.json"):
        wrong = home / os.fsdecode(name)
        wrong.write_text("{}")
        with pytest.raises(VideotuneError):
            entries(home)
        wrong.unlink()


@pytest.mark.parametrize("gpus", ["all", "-1", "0,x", "[0]"])
def test_gpus_that_are_no_numbers_are_refused(gpus: str, filled: Queue) -> None:
    """CUDA would hide all cards behind such a name, and the training would run on the
    CPU.
    """
    home = filled(a=0)
    with pytest.raises(VideotuneError):
        run("queue", "run", queue=home, gpus=gpus)
    assert states(home) == {"a": "waiting"}


def test_a_wrong_setting_is_refused_when_it_is_added(
    overrides: Make, tmp_path: Path
) -> None:
    words = options_of(overrides("steps=2"))
    with pytest.raises(VideotuneError):
        run(
            "queue",
            "add",
            **words | {"set": [*words["set"], "stepz=3"]},
            name="a",
            queue=tmp_path / "queue",
        )
    assert entries(tmp_path / "queue") == []


def test_entries_run_in_the_order_that_was_given_whatever_their_priorities(
    filled: Queue,
) -> None:
    home = filled(a=0, b=5, c=0, d=0)
    reorder(home, ["d", "a", "b", "nothing"])
    assert [one.name for one in entries(home)] == ["d", "a", "c", "b"], (
        "c keeps its place"
    )
    reorder(home, ["c", "b", "a", "d"])
    assert [one.name for one in entries(home)] == ["c", "b", "a", "d"]


def ran(home: Path) -> list[list[str]]:
    """The commands of all processes so far, the first one first."""
    return [list(job.arguments) for job in reversed(jobs.all_jobs(home))]


def test_an_entry_of_another_command_runs_that_command_and_fails_once(
    tmp_path: Path,
) -> None:
    home, run_folder = tmp_path / "queue", tmp_path / "run"
    for name in ("a--sample-1", "a--sample-2"):
        add(
            home,
            name,
            {},
            run_folder,
            arguments=["sample", str(run_folder), "--nonsense"],
        )
    assert find_entry(home, "a--sample-1").kind == "sample"
    assert run_queue(home, report=lambda _: None) == FAILED
    assert states(home) == {"a--sample-1": "failed", "a--sample-2": "failed"}
    assert [one[0] for one in ran(home)] == ["sample"] * 2, (
        "what failed before it began is not tried again"
    )
    assert remove(home, "a--sample-1") == run_folder
    assert [job.about for job in jobs.all_jobs(home)] == ["a--sample-2"]


def test_a_training_that_was_queued_again_begins_with_its_words_and_is_resumed_after_that(
    filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, started = filled(a=0), []
    monkeypatch.setattr(jobs, "start", lambda *about, **_: started.append(about[2]))
    ended(home, "a", 1)
    ended(home, "a", 1)
    write_json(tmp_path / "run a" / "config.json", {})
    requeue(
        home,
        "a",
        resumed := [
            "train",
            "--out",
            str(tmp_path / "run a"),
            "--resume",
            "--from",
            "20",
        ],
    )
    entry = find_entry(home, "a")
    assert (entry.state, entry.tries) == ("waiting", 0), "its tries count anew"
    queue.start(home, entry)
    ended(home, "a", None, turn=entry.turn)
    assert find_entry(home, "a").state == "waiting", "the machine went off under it"
    queue.start(home, find_entry(home, "a"))
    assert started == [resumed, ["train", "--out", str(tmp_path / "run a"), "--resume"]]


def test_what_a_person_has_stopped_stays_so_until_it_is_queued_again(
    filled: Queue,
) -> None:
    home = filled(a=0, b=0, c=0)
    ended(home, "a", INTERRUPTED)
    ended(home, "b", INTERRUPTED)
    hold(home, "b")
    hold(home, "c")
    assert states(home) == {"a": "stopped", "b": "stopped", "c": "stopped"}
    before = [one.job.folder for one in entries(home) if one.job]
    assert [worker._was_interrupted(one, before) for one in entries(home)] == [
        True,
        False,
        False,
    ]
    requeue(home, "b")
    requeue(home, "c")
    assert states(home) == {"a": "stopped", "b": "waiting", "c": "waiting"}


def test_a_running_command_is_paused_goes_on_and_can_be_stopped_while_paused(
    tmp_path: Path,
) -> None:
    (tmp_path / "queue").mkdir()
    job = jobs.start(
        tmp_path / "queue", "wait", ["wait", str(tmp_path), "--timeout", "120"]
    )
    wait_until(lambda: (job.folder / "pid.json").is_file())
    assert jobs.pause(job)
    wait_until(lambda: jobs.read_job(job.folder).state == "paused")
    assert jobs.read_job(job.folder).is_running
    assert jobs.unpause(job)
    wait_until(lambda: jobs.read_job(job.folder).state == "running")
    jobs.pause(job)
    assert jobs.stop(job)
    wait_until(lambda: not jobs.read_job(job.folder).is_running)
    assert not jobs.pause(jobs.read_job(job.folder))


def command(*words: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "videotune", *map(str, words)])


@pytest.mark.slow
def test_a_killed_queue_and_a_killed_training_go_on_as_if_nothing_had_been(
    overrides: Make, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """The worker is killed, then the training that outlived it; the next worker resumes
    that, and runs what waits.
    """
    home, sets = tmp_path / "queue", ("steps=60", "save_every=20")
    words = options_of(overrides(*sets))
    assert run("queue", "add", **words, name="first", queue=home, priority=1) == DONE
    (home / "second.json").write_text(
        '{"steps": 3, "base_model_name": "nowhere-at-all"}'
    )
    worker = command("queue", "run", "--queue", home)
    first = home / "runs" / "first"
    wait_until(lambda: (first / "checkpoints").is_dir() and complete(first))
    worker.kill()
    worker.wait()
    job = find_entry(home, "first").job
    assert job is not None
    assert job.is_running, "the training outlives its worker"
    pids = json.loads((job.folder / "pid.json").read_text())
    os.kill(pids["runner"]["pid"], signal.SIGKILL)
    os.kill(pids["command"]["pid"], signal.SIGKILL)
    wait_until(lambda: find_entry(home, "first").state == "waiting")
    assert run_queue(home, report=lambda _: None) == FAILED
    assert states(home) == {"first": "done", "second": "failed"}
    assert find_entry(home, "second").tries == 2
    assert_same_run(first, finished(*sets), 60)


@pytest.mark.slow
def test_an_interrupt_saves_and_the_next_worker_resumes(
    overrides: Make, tmp_path: Path
) -> None:
    home = tmp_path / "queue"
    run("queue", "add", **options_of(overrides("steps=400")), name="a", queue=home)
    worker = command("queue", "run", "--queue", home)
    a = home / "runs" / "a"
    wait_until(lambda: (a / "journal.jsonl").is_file() and len(steps_of(a)) > 3)
    with pytest.raises(VideotuneError):
        run_queue(home)  # another worker has it
    worker.send_signal(signal.SIGINT)
    assert worker.wait(60) == INTERRUPTED
    assert states(home) == {"a": "stopped"}
    reached = complete(a)
    assert reached
    again = command("queue", "run", "--queue", home)
    wait_until(lambda: len(steps_of(a)) > reached[-1])
    assert remove(home, "a") == a
    assert again.wait(60) == DONE
    assert entries(home) == []
    assert jobs.all_jobs(home) == []
    assert (a / "config.json").is_file()


def test_a_bar_follows_the_training_that_runs(
    filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[str, list[Any]]] = []

    @contextmanager
    def record(title: str) -> Iterator[Any]:
        updates: list[Any] = []
        bars.append((title, updates))
        yield SimpleNamespace(update=lambda *values: updates.append(values))

    monkeypatch.setattr(queue_progress, "bar", record)
    home = filled(a=0, b=0)
    a, b = entries(home)
    for entry in (a, b):
        write_json(entry.run / "config.json", {"settings": {}, "steps": 40})
    now = time.time()
    beat = {"pid": os.getpid(), "host": socket.gethostname(), "time": now}
    beat |= {"step": 10, "state": "training", "seconds": {"training": 20.0}}

    with queue_progress.QueueProgress() as progress:
        progress.update([a, b])
        assert bars == [], "nothing runs"
        running = replace(a, state="running")
        progress.update([running, b])
        write_json(a.run / "heartbeat.json", beat)
        progress.update([running, b])
        sampling = {"state": "sampling", "progress": None}
        write_json(a.run / "heartbeat.json", beat | sampling)
        progress.update([running, b])
        progress.update([replace(a, state="done"), replace(b, state="running")])

    (first, updates), (second, _) = bars
    assert (first, second) == ("a: steps", "b: steps")
    assert updates[:2] == [(0, 40, [], None), (10, 40, [], 60.0)]
    assert updates[2][2] == ["sampling"]


def test_ctrl_c_says_that_the_trainings_save_and_is_answered_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = [signal.getsignal(signal.SIGINT)]
    with suppress(KeyboardInterrupt), interrupts_as_stops():
        handlers.append(signal.getsignal(signal.SIGINT))
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            handlers.append(signal.getsignal(signal.SIGINT))

    before, during, after = handlers
    assert before == after == signal.getsignal(signal.SIGINT)
    assert during != before
    assert STOPPING in capsys.readouterr().err


def test_combinations_of_values() -> None:
    assert combinations(["learning_rate=1e-4,3e-4", "seed=0"]) == [
        {"learning_rate": "1e-4", "seed": "0"}, {"learning_rate": "3e-4", "seed": "0"},
    ]  # fmt: skip
    assert [one["a"] for one in combinations(['a=[1,2],{"b":3,"c":4},5'])] == [
        "[1,2]",
        '{"b":3,"c":4}',
        "5",
    ]
    for wrong in (
        ["a"],
        ["a="],
        ["a=1,,2"],
        ["a=1", "a=2"],
        ["=1"],
        ["a=" + ",".join(map(str, range(300)))],
    ):
        with pytest.raises(VideotuneError):
            combinations(wrong)


def test_a_sweep_trains_each_value_and_compares_them(
    overrides: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options_of(
        overrides(
            "steps=2",
            "validation_fraction=0.3",
            "validate_every=1",
            "validation_windows=3",
        )
    )
    out = tmp_path / "sweep"
    assert run("sweep", **words, vary=["learning_rate=0.001,0.1"], out=out) == DONE
    runs = [out / "runs" / f"learning_rate={rate}" for rate in ("0.001", "0.1")]
    printed = capsys.readouterr()
    table = printed.out.partition(str(out / "sweep.html"))[0]
    for text in ("learning_rate=0.001", "learning_rate=0.1", "steps done", "minutes"):
        assert text in table
    assert "no figure shows which run copies less" in " ".join(table.split())
    losses = [steps_of(one)[-1]["loss"] for one in runs]
    assert losses[0] != losses[1]
    page = (out / "sweep.html").read_text()
    assert all(f"{one.name}/report.html" in page.replace("%3D", "=") for one in runs)
    assert run("sweep", **words, vary=["learning_rate=0.001,0.1"], out=out) == DONE
    assert len(jobs.all_jobs(out)) == 2, "given again, nothing is left to do"


def test_a_step_of_the_clock_frees_no_card(
    filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that runs counts as running whatever the clock says, also for another
    process, and is not started a second time.
    """
    home = filled(a=0, b=0)
    job = jobs.start(home, "train", ["wait", str(tmp_path), "--timeout", "120"], "a")
    wait_until(lambda: (job.folder / "pid.json").is_file())
    jobs._runners.clear()  # as another process sees it
    now, booted = time.time, psutil_linux.boot_time
    try:
        for hours in (0, 1, -1, 24 * 365):
            shift = hours * 3600
            monkeypatch.setattr(time, "time", lambda shift=shift: now() + shift)
            monkeypatch.setattr(
                psutil_linux, "boot_time", lambda shift=shift: booted() + shift
            )
            assert states(home) == {"a": "running", "b": "waiting"}
            requeue(home, "b")
        with pytest.raises(VideotuneError):
            requeue(home, "a")
    finally:
        jobs.stop(job)
    wait_until(lambda: states(home)["a"] != "running")


def test_what_was_queued_again_before_the_clock_was_set_back_runs_once(
    filled: Queue,
) -> None:
    home = filled(a=0)
    ended(home, "a", 1)
    ended(home, "a", 1)
    requeue(home, "a")
    assert states(home) == {"a": "waiting"}
    ended(home, "a", None, turn=1, is_starting=True)
    assert states(home) == {"a": "running"}


@pytest.mark.parametrize("act", ["interrupt", "remove"])
def test_a_running_training_is_asked_once_to_save_and_end(
    filled: Queue, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A second signal would end it at once. One that has no process yet is asked again."""
    home = filled(a=0)
    ended(home, "a", None, is_starting=True)
    answers = [False, True]
    asked: list[str] = []

    def stop(job: jobs.QueuedJob) -> bool:
        asked.append(job.about)
        return answers.pop(0) if answers else True

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 5:
            rc = {"code": INTERRUPTED, "ended": 1.0}
            write_json(home / "jobs" / "000001-train" / "rc.json", rc)

    polls: list[float] = []
    monkeypatch.setattr(jobs, "stop", stop)
    monkeypatch.setattr(worker.time, "sleep", sleep)
    if act == "remove":
        remove(home, "a")
    else:
        reporter = worker.StateReporter(lambda _: None)
        assert worker._stop_all(home, reporter) == INTERRUPTED
    assert asked == ["a", "a"]
    assert len(polls) == 5
