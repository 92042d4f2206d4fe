"""Real processes of a training, and real kills in the middle of things."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests import forked

KILLED = -signal.SIGKILL
WHEN = {
    "mid-accumulation": ("trainer.step", "denoising_loss"),
    "save": ("trainer.checkpoint_writer", "write_tensors"),
    "ruler": ("validation.validation_loss", "denoising_loss"),
    "preview": ("validation.decoding", "decode"),
}
"""For each moment the function at whose n-th call the process kills itself."""


def start(words: Any, run: Path, resume: Any = None, moment: str | None = None, call: int = 0) -> ForkServerProcess:
    """A training in a process of its own; with a ``moment`` it is killed there, at the n-th ``call``."""
    return forked.start(_train, words, run, resume, moment, call)


def end(process: ForkServerProcess) -> int:
    """Its exit code, when it has ended; negative: the signal that killed it."""
    process.join(120)
    assert process.exitcode is not None, "still going after two minutes"
    return process.exitcode


def _train(words: Any, run: Path, resume: Any, moment: str | None, call: int) -> None:
    import torch

    from tests.shell import train
    from videotune.errors import VideotuneError

    torch.set_num_threads(1)
    if moment is not None:
        kill_at(*WHEN[moment], call)
    try:
        code = train(words, run, resume=resume)
    except VideotuneError as error:
        print(f"videotune: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def kill_at(module: str, name: str, call: int) -> None:
    """The process gets SIGKILL when ``videotune.module.name`` is called for the n-th time."""
    import importlib

    room = importlib.import_module(f"videotune.{module}")
    real, calls = getattr(room, name), 0

    def counted(*words: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **named)

    setattr(room, name, counted)
