"""What happens in a process at a moment that a test names; each is called in it before its command.

A pause says the word ``at: NAME`` and then lasts far longer than a test, so a test can act in the middle of it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

LONG = 40.0


def pause(name: str) -> None:
    """Be in the middle of something."""
    print(f"at: {name}", file=sys.stderr, flush=True)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        time.sleep(0.01)


def _before(room: Any, name: str, what: str, met: Callable[..., bool] = lambda *_: True) -> None:
    """Pause before a function of a room runs, where its arguments say so."""
    work = getattr(room, name)

    def paused(*given: Any, **named: Any) -> Any:
        if met(*given):
            pause(what)
        return work(*given, **named)

    setattr(room, name, paused)


def in_encoding() -> None:
    """While the cache is filled, before anything trains."""
    from videotune.trainer import cache_filling

    _before(cache_filling, "fill_cache", "encoding")


def in_encoding_in_the_background() -> None:
    """The same of a command that a shell's script began with ``&``: those ignore a Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_encoding()


def in_ruler(step: int) -> None:
    """While the ruler reads at this step; the network is in the middle of it."""
    from videotune.validation.callbacks import Validation

    steps: list[int] = []
    measure, denoise = Validation.run, _ruler().denoising_loss

    def noted(callback: Any, trainer: Any, step: int) -> None:
        steps.append(step)
        measure(callback, trainer, step)

    def paused(*given: Any) -> Any:
        out = denoise(*given)
        if steps[-1:] == [step]:
            pause("ruler")
        return out

    Validation.run = noted  # type: ignore[method-assign]
    _ruler().denoising_loss = paused  # type: ignore[attr-defined]


def _ruler() -> Any:
    import videotune.validation.validation_loss as validation

    return validation


def in_preview(step: int) -> None:
    """While a preview of this step is drawn."""
    from videotune.validation import decoding
    from videotune.validation.callbacks import Previews

    preview = Previews.sample

    def noted(callback: Any, trainer: Any, at: int, *more: Any) -> None:
        if at == step:
            _before(decoding, "decode", "preview")
        preview(callback, trainer, at, *more)

    Previews.sample = noted  # type: ignore[method-assign]


def in_save(number: int) -> None:
    """In the middle of writing the checkpoint that comes as the number-th, between two of its files."""
    from videotune.trainer import checkpoint as state

    names: list[str] = []

    def second_file(path: Any, _: Any) -> bool:
        names.append(path.name)
        return path.name == "optimizer.safetensors" and names.count(path.name) == number

    _before(state, "write_tensors", "saving", second_file)


def in_step(step: int) -> None:
    """In the middle of this step, after its gradients and before its update."""
    from videotune.trainer import step as room

    def is_it(_: Any, __: Any) -> bool:
        taken.append(1)
        return len(taken) == step

    taken: list[int] = []
    _before(room, "clip", "step", is_it)


def in_export() -> None:
    """While the result is exported, all steps being done."""
    from videotune.commands import train as loop

    _before(loop, "export_run", "export")
