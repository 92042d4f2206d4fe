"""Entries that ask for several GPUs: which they get, and the processes that train there."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import options_of, run
from tests.support.run_processes import Make
from tests.support.run_results import complete, of_kind, steps_of
from tests.support.waiting import wait_until
from videotune.errors import DONE, FAILED, INTERRUPTED, SKIPPED, VideotuneError
from videotune.queue import jobs
from videotune.queue.cards import Cards, assign_cards
from videotune.queue.entries import (
    GPU_VARIABLE,
    QueueEntry,
    add,
    entries,
    find_entry,
    remove,
    requeue,
)
from videotune.queue.jobs import QueuedJob
from videotune.queue.worker import run_queue

FOUR: Cards = ("0", "1", "2", "3")


def waiting(name: str, cards: int, overtaken: int = 0) -> QueueEntry:
    """Return an entry that waits for this number of GPUs."""
    return QueueEntry(
        name=name,
        config=Path(f"{name}.json"),
        run=Path(name),
        priority=0,
        added=0.0,
        first_added=0.0,
        skips=None,
        state="waiting",
        tries=0,
        job=None,
        cards=cards,
        overtaken=overtaken,
    )


def working(
    name: str, cards: str, state: Any = "running", processes: int = 1
) -> QueueEntry:
    """An entry whose job has these GPUs."""
    job = QueuedJob(
        folder=Path(name),
        kind="train",
        about=name,
        arguments=(),
        state=state,
        code=None,
        started=0.0,
        ended=None,
        env={GPU_VARIABLE: cards} if cards else {},
        processes=processes,
    )
    return replace(waiting(name, processes), state=state, job=job)


def starts(
    cards: Cards,
    running: Sequence[QueueEntry],
    ready: Sequence[QueueEntry],
    count: Callable[[], int] = lambda: 0,
) -> dict[str, str]:
    """The GPUs of each entry that starts."""
    assignment = assign_cards(cards, running, ready, count)
    return {entry.name: ",".join(names) for entry, names in assignment.starts}


def test_an_entry_gets_as_many_free_gpus_as_it_asks_for() -> None:
    ready = [waiting("two", 2), waiting("one", 1), waiting("last", 1)]
    assert starts(FOUR, [], ready) == {"two": "0,1", "one": "2", "last": "3"}
    assert starts(FOUR, [working("a", "0,2")], ready) == {"two": "1,3"}
    assert starts(FOUR, [working("a", "1")], ready) == {"two": "0,2", "one": "3"}


def test_a_job_without_a_choice_takes_as_many_places_as_it_has_processes() -> None:
    ready = [waiting("one", 1), waiting("last", 1)]
    assert starts(FOUR, [working("a", "", processes=3)], ready) == {"one": "0"}
    assert starts(FOUR, [working("a", "")], ready) == {"one": "0", "last": "1"}
    assert starts([None], [working("a", "", processes=2)], ready) == {}
    assert starts([None], [], [waiting("two", 2)], lambda: 2) == {"two": ""}


def test_an_entry_is_overtaken_as_often_as_it_needs_gpus_and_then_they_are_kept() -> (
    None
):
    running = [working("a", "0"), working("b", "1"), working("c", "2")]
    wide = waiting("wide", 2)
    later = [waiting("d", 1), waiting("e", 1)]
    assignment = assign_cards(FOUR, running, [wide, *later])
    assert [entry.name for entry, _ in assignment.starts] == ["d"]
    assert assignment.overtaken == {"wide": 1}

    kept = [waiting("wide", 2, overtaken=2), *later]
    assert starts(FOUR, running, kept) == {}
    assert starts(FOUR, running[:2], kept) == {"wide": "2,3"}


def test_no_gpus_are_kept_for_an_entry_that_paused_trainings_keep_from_starting() -> (
    None
):
    wide = waiting("wide", 3, overtaken=3)
    paused = [working("a", "0", "paused"), working("b", "1", "paused")]
    assert starts(FOUR, paused, [wide, waiting("c", 1)]) == {"c": "2"}
    assert starts(FOUR, paused[:1], [wide]) == {"wide": "1,2,3"}


@pytest.mark.parametrize("seed", range(20))
def test_no_entry_waits_for_ever_however_many_single_ones_come(seed: int) -> None:
    """New entries with one GPU keep coming. One with several starts after it was
    overtaken as often as it needs GPUs.
    """
    random_of = random.Random(seed)
    wide = waiting("wide", random_of.randint(2, 4))
    running = [working(str(number), str(number)) for number in range(4)]
    left = {entry.name: random_of.randint(1, 9) for entry in running}
    overtaken = 0
    for turn in range(200):
        left = {name: rest - 1 for name, rest in left.items()}
        running = [entry for entry in running if left[entry.name] > 0]
        ready = [
            replace(wide, overtaken=overtaken),
            *(waiting(f"{turn}-{number}", 1) for number in range(4)),
        ]
        assignment = assign_cards(FOUR, running, ready)
        overtaken = assignment.overtaken.get("wide", overtaken)
        started = {entry.name: names for entry, names in assignment.starts}
        if "wide" in started:
            break
        for name, names in started.items():
            running.append(working(name, ",".join(names)))
            left[name] = random_of.randint(1, 9)
    assert "wide" in started
    assert overtaken <= wide.cards
    assert len(started["wide"]) == wide.cards


@pytest.mark.parametrize(("cards", "there"), [(("0", "1"), 8), ((None,), 2)])
def test_more_gpus_than_there_are_are_refused_and_block_nobody(
    cards: Cards, there: int
) -> None:
    ready = [waiting("wide", 3), waiting("narrow", 1)]
    assignment = assign_cards(cards, [], ready, lambda: there)
    assert "asks for 3 GPUs" in assignment.refused["wide"]
    assert "has 2" in assignment.refused["wide"]
    assert [entry.name for entry, _ in assignment.starts] == ["narrow"]


def test_a_refused_entry_has_failed_until_a_worker_has_more(tmp_path: Path) -> None:
    home = tmp_path / "queue"
    words = ["wait", str(tmp_path), "--timeout", "0"]
    add(home, "wide", {}, tmp_path / "run", arguments=words, cards=3)
    assert run_queue(home, ["0", "1"], report=lambda _: None) == FAILED
    entry = find_entry(home, "wide")
    assert (entry.state, entry.job) == ("failed", None)
    assert "asks for 3 GPUs" in entry.to_json()["why"]

    requeue(home, "wide")
    assert find_entry(home, "wide").state == "waiting"
    assert run_queue(home, ["0", "1"], report=lambda _: None) == FAILED
    run_queue(home, ["0", "1", "2"], report=lambda _: None)
    entry = find_entry(home, "wide")
    assert entry.job is not None
    assert entry.job.env[GPU_VARIABLE] == "0,1,2"
    assert entry.refused == ""


def test_gpus_that_the_groups_of_a_sample_do_not_divide_are_refused_at_once(
    overrides: Make, tmp_path: Path
) -> None:
    words = options_of(overrides("context_parallel=2"))
    home = tmp_path / "queue"
    with pytest.raises(VideotuneError):
        run("queue", "add", **words, name="a", queue=home, gpus=3)
    assert entries(home) == []


PATIENCE = 240.0
"""Seconds until a test gives up: two processes begin slowly where others compute."""


@dataclass(frozen=True)
class Started:
    """Run a command in another process and keep what it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a module with its arguments; whatever still runs after the test is killed."""
    begun: list[subprocess.Popen[bytes]] = []

    def start_module(*words: object) -> Started:
        log = tmp_path / f"printed-{len(begun)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        begun.append(process)
        return Started(process, log)

    yield start_module
    for process in begun:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def words_of(
    overrides: Make, out: Path, *sets: str, data: Path | None = None
) -> list[str]:
    """The words of ``train`` with these settings."""
    words = ["train", "--out", str(out)]
    for option, value in options_of(overrides(*sets, data=data)).items():
        for text in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{option}", str(text)]
    return words


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The processes that a launcher has started, in the order of their ranks."""
    children = psutil.Process(launcher).children()
    ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return sorted(ranks, key=lambda child: child.pid)


def has_steps(folder: Path, count: int) -> bool:
    return (folder / "journal.jsonl").is_file() and len(steps_of(folder)) >= count


def until(met: Callable[[], Any]) -> None:
    wait_until(met, PATIENCE)


def launch(start: Start, *words: str) -> Started:
    """``videotune`` in two processes."""
    return start("videotune.cli.launcher", 2, *words)


def work_on(start: Start, home: Path) -> Started:
    """A worker with two GPUs."""
    words = ("queue", "run", "--queue", home, "--gpus", "0,1")
    return start("videotune", *words)


@pytest.mark.slow
@pytest.mark.parametrize(("is_damaged", "code"), [(False, DONE), (True, SKIPPED)])
def test_the_exit_code_is_that_of_the_command(
    is_damaged: bool,
    code: int,
    overrides: Make,
    clips: Path,
    start: Start,
    tmp_path: Path,
) -> None:
    """torchrun would end with 1. A clip that cannot be read stops the run."""
    if is_damaged:
        (clips / "videos" / "damaged.mp4").write_bytes(b"no video")
        (clips / "captions" / "damaged.txt").write_text("a cat")
    words = words_of(overrides, tmp_path / "run", "steps=2", data=clips)
    launched = launch(start, *words)
    assert launched.ended() == code, launched.printed


@pytest.mark.slow
def test_a_wrong_setting_ends_with_1_and_its_sentence(
    overrides: Make, start: Start, tmp_path: Path
) -> None:
    launched = launch(start, *words_of(overrides, tmp_path / "run", "steps=many"))
    assert launched.ended() == FAILED
    assert launched.printed.splitlines()[-1].startswith("videotune: steps: ")


@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_along(
    overrides: Make, start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launched = launch(start, *words_of(overrides, folder, "steps=9000"))
    until(lambda: has_steps(folder, 2))
    ranks = ranks_of(launched.process.pid)
    assert len(ranks) == 2
    launched.process.kill()
    launched.ended()
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    assert (len(gone), alive) == (2, [])


def running_job(home: Path) -> QueuedJob:
    """The process of the only entry."""
    job = find_entry(home, "wide").job
    assert job is not None
    return job


def ranks_of_job(job: QueuedJob) -> list[psutil.Process]:
    record = jobs._read_processes(job.folder)
    assert record is not None
    return ranks_of(record["command"]["pid"])


@pytest.mark.slow
def test_a_training_on_two_gpus_is_paused_stopped_and_goes_on(
    overrides: Make, start: Start, tmp_path: Path
) -> None:
    home = tmp_path / "queue"
    words = options_of(overrides("steps=9000", "save_every=9000"))
    run("queue", "add", **words, name="wide", queue=home, gpus=2)
    worker = work_on(start, home)
    folder = home / "runs" / "wide"
    until(lambda: has_steps(folder, 3))
    job = running_job(home)
    assert (job.env[GPU_VARIABLE], job.processes) == ("0,1", 2)

    assert jobs.pause(job)
    until(lambda: jobs.read_job(job.folder).state == "paused")
    ranks = ranks_of_job(job)
    until(lambda: {rank.status() for rank in ranks} == {psutil.STATUS_STOPPED})
    steps_before = len(steps_of(folder))
    time.sleep(0.5)
    assert len(steps_of(folder)) == steps_before
    assert jobs.unpause(job)
    until(lambda: has_steps(folder, steps_before + 3))

    worker.process.send_signal(signal.SIGINT)
    assert worker.ended() == INTERRUPTED
    assert find_entry(home, "wide").state == "stopped"
    reached = len(steps_of(folder))
    assert complete(folder) == [reached], "saved when asked to stop, not on schedule"

    work_on(start, home)
    until(lambda: has_steps(folder, reached + 3))
    remove(home, "wide")
    (begun,) = of_kind(folder, "resume")
    assert (begun["from_step"], begun["processes"]) == (reached, 2)
    steps = [line["step"] for line in steps_of(folder)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_entry_is_tried_once_more(
    overrides: Make, start: Start, tmp_path: Path
) -> None:
    home = tmp_path / "queue"
    words = options_of(overrides("steps=9000", "save_every=2"))
    run("queue", "add", **words, name="wide", queue=home, gpus=2)
    worker = work_on(start, home)
    folder = home / "runs" / "wide"
    for tries in (1, 2):
        until(lambda tries=tries: has_begun(home, folder, tries))
        job = running_job(home)
        ranks_of_job(job)[1].kill()
        killed_at = time.monotonic()
        until(lambda job=job: not jobs.read_job(job.folder).is_running)
        assert time.monotonic() - killed_at < SOON
        ended = jobs.read_job(job.folder)
        assert ended.state == "failed"
        assert "process 1 of 2 was killed by signal 9" in jobs.describe_outcome(ended)
    assert worker.ended() == FAILED
    entry = find_entry(home, "wide")
    assert (entry.state, entry.tries) == ("failed", 2)
    assert "process 1 of 2" in entry.to_json()["why"]


SOON = 40.0
"""Seconds after which the others must have ended: less than the 45 of the watch."""


def has_begun(home: Path, folder: Path, tries: int) -> bool:
    """Whether the process of this number has trained some steps."""
    if len(jobs.all_jobs(home, "train")) < tries or not has_steps(folder, 3):
        return False
    resumes = of_kind(folder, "resume")
    if tries == 1:
        return True
    return bool(resumes) and has_steps(folder, resumes[-1]["from_step"] + 3)
