"""A run on several hosts, of which one is late, dies, is cut off or is slow."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.conftest import Undisturbed, WorkOf
from tests.support.elastic import (
    LOST_AFTER,
    SOON_LOST,
    assert_same_losses,
    ended,
    printed,
    torchrun_on,
    wait_until,
)
from tests.support.hosts import Host, network
from videotune.errors import DONE

EXPECTED_STOP = LOST_AFTER + 20
"""Seconds within which the processes of other hosts end: those without a sign of life,
five of grace, and some on a machine that others use.
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network() as made:
        hosts = [made.add_host(number) for number in (1, 2, 3)]
        yield hosts
        for host in hosts:
            host.kill()


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"host{number}.log" for number in (1, 2, 3)]


def test_a_late_host_joins(
    hosts: list[Host],
    logs: list[Path],
    work_of: WorkOf,
    undisturbed: Undisturbed,
) -> None:
    """The two others finish their step and save, so no step is lost; the third process
    has no sample. A slow cable lets the run last until it comes.
    """
    reference = undisturbed(60, 2)
    work = work_of(60, save_every=60)
    hosts[1].slow_down("4mbit")
    launchers = [
        torchrun_on(host, work, log)
        for host, log in zip(hosts[:2], logs[:2], strict=True)
    ]
    wait_until(lambda: work.step >= 3, "some steps", logs)
    launchers.append(torchrun_on(hosts[2], work, logs[2]))

    assert [ended(launcher, logs) for launcher in launchers] == [DONE] * 3, printed(
        logs
    )
    (line,) = work.resumes()
    assert (line["processes_before"], line["processes"], line["restarted"]) == (
        2,
        3,
        True,
    )
    assert 0 < line["from_step"] < 60, "saved when asked to stop, not on schedule"
    assert_same_losses(work.run, reference)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_two_hosts_go_on_without_the_third(
    how: str,
    hosts: list[Host],
    logs: list[Path],
    work_of: WorkOf,
    undisturbed: Undisturbed,
) -> None:
    """A killed host closes its connections; one that is cut off is only silent."""
    reference = undisturbed(60, 3)
    work = work_of(60)
    launchers = [
        torchrun_on(host, work, log, SOON_LOST)
        for host, log in zip(hosts, logs, strict=True)
    ]
    wait_until(lambda: work.step >= 12, "some steps", logs)
    lost_at = time.monotonic()
    if how == "killed":
        hosts[2].kill()
    else:
        hosts[2].cut()

    sentence = "another process of the run is gone"
    if how == "cut off":
        sentence = "no sign of life from 2 of the run's processes"
    # The first launcher to see its process fail stops the other's, which may say nothing.
    wait_until(lambda: sentence in printed(logs[:2]), "the stop", logs)
    assert time.monotonic() - lost_at < EXPECTED_STOP

    assert [ended(launcher, logs) for launcher in launchers[:2]] == [DONE] * 2
    (line,) = work.resumes()
    assert (line["processes_before"], line["processes"]) == (3, 2)
    assert line["from_step"] >= 10
    assert_same_losses(work.run, reference)
    if how == "cut off":
        assert "the launcher's store has not answered" in printed(logs[2:])


def test_a_slow_host_is_waited_for(
    hosts: list[Host],
    logs: list[Path],
    work_of: WorkOf,
    undisturbed: Undisturbed,
) -> None:
    reference = undisturbed(60, 3)
    work = work_of(60)
    launchers = [
        torchrun_on(host, work, log) for host, log in zip(hosts, logs, strict=True)
    ]
    wait_until(lambda: work.step >= 3, "some steps", logs)
    hosts[2].slow_down("2mbit")

    assert [ended(launcher, logs) for launcher in launchers] == [DONE] * 3
    assert not work.resumes()
    assert_same_losses(work.run, reference)
    seconds = [line["seconds"] for line in _steps(work.run)]
    assert min(seconds[20:]) > 3 * sorted(seconds[1:4])[0], "the cable was slower"


def _steps(run: Path) -> list[dict[str, float]]:
    from tests.support.run_results import steps_of

    return [{"seconds": sum(line["seconds"].values())} for line in steps_of(run)]
