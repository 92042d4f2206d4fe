"""The same command again and again: torchrun starts it after a failure, and a run goes on
where it was, or is left alone.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.conftest import Undisturbed, WorkOf
from tests.support.elastic import (
    LOST_AFTER,
    SOON_LOST,
    TORCHRUN,
    Work,
    assert_same_losses,
    end_all,
    ended,
    printed,
    start,
    torchrun,
    wait_until,
    workers,
)
from tests.support.run_results import listing
from videotune.errors import DONE, FAILED, INTERRUPTED
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal

Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "printed.log"


@pytest.fixture
def launch(log: Path) -> Iterator[Launch]:
    """Start a run under torchrun; it is killed if the test fails before its end."""
    launchers = []

    def begin(work: Work, *more: str, **how: Any) -> subprocess.Popen[bytes]:
        launchers.append(torchrun(work, log, *more, **how))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        end_all(launcher)


def test_a_killed_process_costs_the_steps_since_the_last_save(
    launch: Launch, log: Path, work_of: WorkOf, undisturbed: Undisturbed
) -> None:
    """No option says that the run goes on: torchrun was told to restart."""
    reference = undisturbed(60, 2)
    work = work_of(60)
    launcher = launch(work)
    wait_until(lambda: work.step >= 12, "some steps", [log])
    workers(launcher)[1].send_signal(signal.SIGKILL)

    assert ended(launcher, [log]) == DONE, printed([log])
    assert_same_losses(work.run, reference)
    (line,) = work.resumes()
    assert line["restarted"]
    assert line["processes"] == 2
    assert "processes_before" not in line
    assert line["from_step"] >= 10
    assert "restarted once by its launcher" in _status(work)


def test_a_frozen_process_is_lost(launch: Launch, log: Path, work_of: WorkOf) -> None:
    """It closes no connection, and neither can it be told to end."""
    work = work_of(60)
    launcher = launch(work, variables=SOON_LOST)
    wait_until(lambda: work.step >= 6, "some steps", [log])
    frozen = workers(launcher)[1]
    frozen.suspend()

    begun = time.monotonic()
    sentence = "no sign of life from 1 of the run's processes"
    wait_until(lambda: sentence in printed([log]), "the other to notice", [log])
    assert time.monotonic() - begun < LOST_AFTER + 20
    frozen.kill()  # torchrun would do so after 30 seconds
    assert ended(launcher, [log]) == DONE, printed([log])
    assert len(work.resumes()) == 1


def test_processes_that_do_not_get_on_are_stuck(
    log: Path, work_of: WorkOf, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    """A main process that is stopped in a step, while its threads say that it lives."""
    monkeypatch.setenv("VIDEOTUNE_STUCK_AFTER", "3")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'stuck'}:{os.getcwd()}")
    work = work_of(60)
    launcher = launch(work, restarts=0)
    assert ended(launcher, [log]) == FAILED
    assert "no process has finished a step for" in printed([log])
    assert work.step == 5


def test_more_processes_than_samples(
    launch: Launch, log: Path, work_of: WorkOf, undisturbed: Undisturbed
) -> None:
    """Begun by one process, the run goes on with three."""
    reference = undisturbed(60, 1)
    work = work_of(60)
    single = launch(work, "--auto-resume", processes=1, restarts=0)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    single.send_signal(signal.SIGUSR1)
    assert ended(single, [log]) == FAILED, "torchrun's code after a signal"

    several = launch(work, "--auto-resume", processes=3, restarts=0)
    assert ended(several, [log]) == DONE, printed([log])
    (line,) = work.resumes()
    assert (line["processes_before"], line["processes"]) == (1, 3)
    assert_same_losses(work.run, reference)


def test_processes_that_share_samples_are_killed_and_go_on(
    launch: Launch, log: Path, work_of: WorkOf, undisturbed: Undisturbed
) -> None:
    """Two groups of two processes; one is killed, and all restart with the last save."""
    reference = undisturbed(24, 2)
    work = work_of(24, context=2)
    launcher = launch(work, processes=4)
    wait_until(lambda: work.step >= 7, "some steps", [log])
    workers(launcher)[3].send_signal(signal.SIGKILL)

    assert ended(launcher, [log]) == DONE, printed([log])
    assert_same_losses(work.run, reference)
    (line,) = work.resumes()
    assert line["restarted"]
    assert line["processes"] == 4


def test_a_group_of_processes_fewer_continues(
    launch: Launch, log: Path, work_of: WorkOf, undisturbed: Undisturbed
) -> None:
    """Two groups of two processes begin the run, and one group ends it."""
    reference = undisturbed(24, 2)
    work = work_of(24, context=2)
    several = launch(work, "--auto-resume", processes=4, restarts=0)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    several.send_signal(signal.SIGUSR1)
    assert ended(several, [log]) == FAILED, "torchrun's code after a signal"

    fewer = launch(work, "--auto-resume", processes=2, restarts=0)
    assert ended(fewer, [log]) == DONE, printed([log])
    (line,) = work.resumes()
    assert (line["processes_before"], line["processes"]) == (4, 2)
    assert_same_losses(work.run, reference)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("to", ["launcher", "everybody"])
def test_torchrun_hands_on_what_slurm_sends(
    number: signal.Signals, to: str, launch: Launch, log: Path, work_of: WorkOf
) -> None:
    """Slurm signals every process of a step, so each worker hears it twice."""
    work = work_of(5000)
    launcher = launch(work)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    heard = workers(launcher) if to == "everybody" else []
    launcher.send_signal(number)
    for worker in heard:
        worker.send_signal(number)

    assert ended(launcher, [log]) == FAILED
    last = work.step
    assert [saved.step for saved in complete_checkpoints(work.run)][-1] == last
    assert read_journal(work.run)[-1]["why"] == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_alone_it_saves_and_ends_with_130(
    number: signal.Signals, log: Path, work_of: WorkOf
) -> None:
    """And a TERM after USR1, as at the end of a job, does not cut the saving short."""
    work = work_of(5000)
    process = start([TORCHRUN[0], *work.arguments()], log)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    process.send_signal(number)
    if number == signal.SIGUSR1:
        process.send_signal(signal.SIGTERM)
    assert ended(process, [log]) == INTERRUPTED
    assert complete_checkpoints(work.run)[-1].step == work.step
    assert "stopped at once" not in printed([log])


def test_a_request_to_stop_is_an_end(
    launch: Launch, log: Path, work_of: WorkOf
) -> None:
    """With another exit code torchrun would begin again."""
    work = work_of(5000)
    launcher = launch(work)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    request = work.run / "request"
    request.write_text(json.dumps({"stop": True}))
    request.replace(work.run / "control.json")
    assert ended(launcher, [log]) == DONE
    assert read_journal(work.run)[-1]["why"] == "stopped"
    assert not work.resumes()


def test_a_finished_run_and_one_of_another_command_are_left_alone(
    launch: Launch, log: Path, work_of: WorkOf
) -> None:
    work = work_of(10)
    assert ended(launch(work), [log]) == DONE
    before = listing(work.run)

    assert ended(launch(work), [log]) == DONE
    assert "is finished" in printed([log])
    assert listing(work.run) == before

    foreign = launch(work, "--set", "learning_rate=0.002", restarts=1)
    assert ended(foreign, [log]) == FAILED
    assert "holds a run that another command began" in printed([log])
    assert listing(work.run) == before

    back = launch(work, "--resume", "--from", "5")
    assert ended(back, [log]) == FAILED
    assert "--from would go back to its step at each restart" in printed([log])
    assert listing(work.run) == before


def _status(work: Work) -> str:
    command = [TORCHRUN[0], "-m", "videotune", "status", str(work.run)]
    return subprocess.run(command, capture_output=True, text=True).stdout
