"""The processes of the tests start as ``forked.py`` says they do: nothing is left to import, and no signal is deaf."""

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tests import forked
from tests.clips import write_clip


def urgency() -> int:
    """0 as almost everything has it; systems that do not say so have no other."""
    return os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0


def tell(mouth: Connection) -> None:
    """What a process finds when it begins."""
    absent = [name for name in forked.IMPORTED if name not in sys.modules]
    mouth.send((absent, signal.getsignal(signal.SIGINT) == signal.SIG_IGN, urgency()))


def told() -> tuple[list[str], bool, int]:
    ear, mouth = forked.CONTEXT.Pipe(duplex=False)
    process = forked.start(tell, mouth)
    mouth.close()
    found: tuple[list[str], bool, int] = ear.recv()
    process.join()
    return found


def test_nothing_of_a_run_is_left_to_import() -> None:
    assert told()[0] == []


def test_a_ctrl_c_is_heard() -> None:
    assert not told()[1]


def test_an_encoder_leaves_no_process_more_urgent_than_others(tmp_path: Path) -> None:
    write_clip(tmp_path / "x.mp4", np.zeros((4, 64, 64, 3), np.uint8), 24, codec="libsvtav1")
    assert urgency() == 0
    assert told()[2] == 0
