"""What the tests of crash safety share: finished runs, what to compare of two runs, and real processes.

A process (``tests/forked.py``) is the command line as a user starts it: ``videotune.cli.main.main`` with its arguments,
signals and exit code.
"""

import os
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
from safetensors.torch import load_file

from tests import forked
from tests.shell import train
from videotune.errors import VideotuneError
from videotune.trainer.checkpoint import Checkpoint, complete_checkpoints, read_checkpoint
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume

Make = Callable[..., Overrides]
Finished = Callable[..., Path]
KILLED = -signal.SIGKILL

PATIENCE = 60.0
"""Seconds after which a process that should have ended or said something is taken for hung."""


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
            assert self.process.is_alive() or met(), f"ended with {self.process.exitcode} before {what}: {self.stderr}"
            assert time.monotonic() - begun < PATIENCE, f"waited too long for {what}: {self.stderr}"
            time.sleep(0.005)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(line["step"] >= step for line in steps_of(self.run)), f"step {step}")

    def until_printed(self, text: str) -> None:
        self.until(lambda: text in self.stderr, repr(text))


def _run(
    arguments: Sequence[str], writer: Connection, first: Callable[..., None] | None, given: tuple[Any, ...]
) -> None:
    """What the process does: the command line, its words into a pipe; ``first`` may set up what shall happen to it."""
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
    """``videotune train`` in a process of its own. ``first(*given)`` is called in it before the command."""
    reader, writer = forked.CONTEXT.Pipe(duplex=False)
    parts: list[bytes] = []

    def listen() -> None:
        while part := os.read(reader.fileno(), 1 << 16):
            parts.append(part)
        reader.close()

    thread = threading.Thread(target=listen, daemon=True)
    data = ["--data", str(settings.data)] if settings.data else []
    sets = [part for text in settings.sets for part in ("--set", text)]
    arguments = ["train", "--out", str(run), *data, *sets, *more]
    process = forked.start(_run, arguments, writer, first, given)
    writer.close()
    thread.start()
    return Running(process, run, parts, thread)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == "step"]


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == kind]


def warnings_of(run: Path) -> list[str]:
    return [line["text"] for line in of_kind(run, "warning")]


def facts_of(run: Path, until: int | None = None) -> list[Any]:
    """What must be equal in two runs that are the same, step by step: all but times."""
    names = ("step", "loss", "mse", "by_t", "lr", "grad_norm", "window_ids", "captions")
    return [[line[name] for name in names] for line in steps_of(run) if until is None or line["step"] <= until]


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by part and name."""
    folder = run / "checkpoints" / f"step-{step}"
    found = read_checkpoint(folder)
    assert isinstance(found, Checkpoint), found
    return {
        f"{path.stem}/{name}": value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names, and the same bits."""
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_run(run: Path, other: Path, *steps: int) -> None:
    """Two runs measured the same in each step, and saved the same bits at these."""
    assert facts_of(run) == facts_of(other)
    for step in steps:
        assert equal(state(run, step), state(other, step)), f"step {step}"


def resume(run: Path, *sets: str, **how: Any) -> int:
    """``train --resume``, with ``Resume``'s flags."""
    return train(Overrides(sets=sets), run, resume=Resume(**how))


def listing(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but for a run's lock and heartbeat."""
    names = (".lock", "heartbeat.json")
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in names}


def refusal(run: Path, *sets: str, **how: Any) -> str:
    """What a refused resume says; it changes nothing."""
    before = listing(run)
    with pytest.raises(VideotuneError) as caught:
        resume(run, *sets, **how)
    assert listing(run) == before
    return str(caught.value)


def complete(run: Path) -> list[int]:
    """The steps of complete checkpoints."""
    return [one.step for one in complete_checkpoints(run)]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of weights, relative to the largest weight."""
    names = [name for name in a if name.startswith("weights/")]
    assert names
    assert set(a) == set(b)
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-12)) for n in names)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of ΔW, relative to each module's largest entry; modules that only ours has are zero."""
    assert set(ours) >= set(theirs)
    assert any(bool(value.any()) for value in theirs.values())
    assert not any(bool(ours[name].any()) for name in set(ours) - set(theirs))
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)
