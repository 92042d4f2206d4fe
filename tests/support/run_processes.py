"""What the tests of runs share: a place to work in, resumes, and real processes.

A process (``tests/support/fork_server.py``) is the command line as a user starts it:
``videotune.cli.main.main`` with its arguments, signals and exit code.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fork_server
from tests.support.command_line import train
from tests.support.run_results import listing, steps_of
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides
from videotune.trainer.resume import Resume

Make = Callable[..., Overrides]
Finished = Callable[..., Path]
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Work:
    """Settings of a run that takes a second, finished runs of them, and a place of the
    test's own.
    """

    overrides: Make
    finished: Finished
    tmp: Path

    @property
    def run(self) -> Path:
        """The folder of the run that the test is about."""
        return self.tmp / "run"

    def train(self, *sets: str, **more: Any) -> Path:
        """Train a run of these settings to its end."""
        assert train(self.overrides(*sets, **more), self.run) == DONE
        return self.run

    def copy(self, *sets: str, **more: Any) -> Path:
        """A copy of the finished run of these settings."""
        return shutil.copytree(self.finished(*sets, **more), self.run)


PATIENCE = 60.0
"""Seconds after which a process that should have ended or said something is taken for
hung.
"""


@dataclass
class Running:
    """A run in a process of its own."""

    process: BaseProcess
    run: Path
    parts: list[bytes]
    reader: threading.Thread

    @property
    def stderr(self) -> str:
        """What it has printed so far."""
        return b"".join(self.parts).decode()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self, seconds: float = PATIENCE) -> int | None:
        """Its exit code; None where it has not ended within so many seconds."""
        self.process.join(seconds)
        if self.process.exitcode is not None:
            self.reader.join(PATIENCE)
        return self.process.exitcode

    def until(self, met: Callable[[], Any], what: str) -> None:
        """Wait until something is so; an error where the process ends before."""
        begun = time.monotonic()
        while not met():
            assert self.process.is_alive() or met(), (
                f"ended with {self.process.exitcode} before {what}: {self.stderr}"
            )
            assert time.monotonic() - begun < PATIENCE, (
                f"waited too long for {what}: {self.stderr}"
            )
            time.sleep(0.005)

    def until_step(self, step: int) -> None:
        self.until(
            lambda: any(line["step"] >= step for line in steps_of(self.run)),
            f"step {step}",
        )

    def until_printed(self, text: str) -> None:
        self.until(lambda: text in self.stderr, repr(text))


def _run(
    arguments: Sequence[str],
    writer: Connection,
    first: Callable[..., None] | None,
    given: tuple[Any, ...],
) -> None:
    """What the process does: the command line, its words into a pipe; ``first`` may set
    up what shall happen to it.
    """
    os.dup2(writer.fileno(), 1)
    os.dup2(writer.fileno(), 2)
    writer.close()
    torch.set_num_threads(1)
    sys.argv = ["videotune", *arguments]
    from videotune.cli.main import main

    if first is not None:
        first(*given)
    main()


def start(
    settings: Overrides,
    run: Path,
    *more: str,
    first: Callable[..., None] | None = None,
    given: tuple[Any, ...] = (),
) -> Running:
    """``videotune train`` in a process of its own.

    ``first(*given)`` is called in it before the command.
    """
    reader, writer = fork_server.CONTEXT.Pipe(duplex=False)
    parts: list[bytes] = []

    def listen() -> None:
        while part := os.read(reader.fileno(), 1 << 16):
            parts.append(part)
        reader.close()

    thread = threading.Thread(target=listen, daemon=True)
    data = ["--data", str(settings.data)] if settings.data else []
    sets = [part for text in settings.sets for part in ("--set", text)]
    arguments = ["train", "--out", str(run), *data, *sets, *more]
    process = fork_server.start(_run, arguments, writer, first, given)
    writer.close()
    thread.start()
    return Running(process, run, parts, thread)


def resume(run: Path, *sets: str, **how: Any) -> int:
    """``train --resume``, with ``Resume``'s flags."""
    return train(Overrides(sets=sets), run, resume=Resume(**how))


def refusal(run: Path, *sets: str, **how: Any) -> str:
    """What a refused resume says; it changes nothing."""
    before = listing(run)
    with pytest.raises(VideotuneError) as caught:
        resume(run, *sets, **how)
    assert listing(run) == before
    return str(caught.value)
