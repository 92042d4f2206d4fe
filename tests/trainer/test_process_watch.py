"""Processes that watch each other through a real store, and what is said of those lost
(``tests/elastic/`` kills, freezes and cuts off real ones).
"""

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from tests.support.launcher import free_port
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.process_watch import (
    LOST_AFTER,
    ProcessLost,
    StuckSteps,
    is_lost_connection,
    seconds_from,
)

WATCHING = """
import sys, time
from datetime import timedelta
import torch.distributed as torch_dist
from videotune.process_watch import ProcessWatch

rank, port, seconds, leaves = map(int, sys.argv[1:])
store = torch_dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
watch = ProcessWatch(rank, 2, store)
watch.start()
time.sleep(seconds)
watch.stop(has_left=bool(leaves))
"""
"""A process that watches one other for some seconds."""

Watcher = Callable[[int, int, bool], subprocess.Popen[str]]


@pytest.fixture
def watcher() -> Watcher:
    """Start a process of a given rank, seconds, and whether it takes leave; all in one
    store.
    """
    port = free_port()
    store = torch_dist.TCPStore(
        "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=20)
    )

    def start(rank: int, seconds: int, leaves: bool) -> subprocess.Popen[str]:
        assert store.port == port
        numbers = [str(int(number)) for number in (rank, port, seconds, leaves)]
        return subprocess.Popen(
            [sys.executable, "-c", WATCHING, *numbers],
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.parametrize(("leaves", "code"), [(True, DONE), (False, FAILED)])
def test_a_process_that_takes_leave_is_not_missed(
    leaves: bool, code: int, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it missed where a long upload keeps the other one."""
    monkeypatch.setenv("VIDEOTUNE_LOST_AFTER", "1")
    first = watcher(0, 6 if leaves else 60, True)
    second = watcher(1, 1, leaves)
    assert second.wait(100) == DONE
    _, told = first.communicate(timeout=100)
    assert first.returncode == code
    assert ("no sign of life from 1 of the run's processes" in told) != leaves


def test_steps_are_stuck_only_where_all_train_and_none_gets_on() -> None:
    stuck = StuckSteps(stuck_after=10.0)
    begun = time.monotonic()
    stuck.note(begun, [b"1 training 3", b"1 training 3"])
    assert stuck.verdict(begun + 9) is None
    assert stuck.verdict(begun + 11) is not None

    stuck.note(begun + 12, [b"2 training 4", b"2 training 3"])
    assert stuck.verdict(begun + 13) is None
    assert stuck.verdict(begun + 12 + 119) is None, "a step has taken 12 seconds"
    assert stuck.verdict(begun + 12 + 121) is not None

    stuck.note(begun + 200, [b"3 sampling 4", b"3 training 4"])
    assert stuck.verdict(begun + 9000) is None
    stuck.note(begun + 9000, [b"4 training 4", b"left"])
    assert stuck.verdict(begun + 9001) is None, "the preview was no step"


def test_what_is_an_error_of_the_network() -> None:
    assert is_lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc] closed"))
    assert is_lost_connection(torch_dist.DistBackendError("NCCL communicator aborted"))
    assert is_lost_connection(ProcessLost("gone"))
    assert not is_lost_connection(RuntimeError("shapes do not fit"))
    assert not is_lost_connection(None)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_seconds_of_a_variable_are_positive(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seconds_from("VIDEOTUNE_LOST_AFTER", LOST_AFTER) == LOST_AFTER
    monkeypatch.setenv("VIDEOTUNE_LOST_AFTER", text)
    with pytest.raises(VideotuneError, match="VIDEOTUNE_LOST_AFTER"):
        seconds_from("VIDEOTUNE_LOST_AFTER", LOST_AFTER)
