"""What happens in a process at a moment that a test names; each is called in it before
its command.

A pause prints ``at: NAME`` and then lasts far longer than a test, so a test can act in
the middle of it.
"""

import importlib
import os
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


def before(
    where: str, act: Callable[[], None], met: Callable[..., bool] = lambda *_: True
) -> None:
    """Act before ``videotune.MODULE:FUNCTION`` runs, where its arguments meet a
    condition.
    """
    module_name, _, name = where.partition(":")
    module = importlib.import_module(f"videotune.{module_name}")
    work = getattr(module, name)

    def acting(*given: Any, **named: Any) -> Any:
        if met(*given):
            act()
        return work(*given, **named)

    setattr(module, name, acting)


def nth(number: int) -> Callable[..., bool]:
    """True at the number-th time that it is asked, from one on."""
    asked: list[int] = []

    def met(*_: Any) -> bool:
        asked.append(1)
        return len(asked) == number

    return met


def kill_at(where: str, call: int) -> None:
    """The process gets SIGKILL when the function is called for the n-th time."""
    before(where, lambda: os.kill(os.getpid(), signal.SIGKILL), nth(call))


def in_encoding() -> None:
    """While the cache is filled, before anything trains."""
    before("trainer.cache_filling:fill_cache", lambda: pause("encoding"))


def in_encoding_in_the_background() -> None:
    """The same of a command that a shell's script began with ``&``: those ignore a
    Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_encoding()


def in_validation(step: int) -> None:
    """While the validation loss of this step is measured."""
    _within("Validation", "run", step, "validation.validation_loss:loss_between")


def in_preview(step: int) -> None:
    """While a preview of this step is decoded."""
    _within("Previews", "run", step, "validation.decoding:render_samples")


def _within(callback: str, method: str, step: int, where: str) -> None:
    """Pause before a function that a method of a callback calls at this step."""
    from videotune.validation import callbacks

    kind = getattr(callbacks, callback)
    work, steps = getattr(kind, method), []

    def noted(self: Any, trainer: Any, step: int, *more: Any) -> None:
        steps.append(step)
        work(self, trainer, step, *more)

    setattr(kind, method, noted)
    before(where, lambda: pause(callback), lambda *_: steps[-1:] == [step])


def in_save(number: int) -> None:
    """In the middle of writing the checkpoint that comes as the number-th, between two
    of its files.
    """
    met, write = nth(number), "runs.checkpoint_writer:write_tensors"
    before(
        write,
        lambda: pause("saving"),
        lambda path, _: path.name == "optimizer.safetensors" and met(),
    )


def in_step(step: int) -> None:
    """In the middle of this step, after its gradients and before its update."""
    before("trainer.gradients:clip_grad_norm", lambda: pause("step"), nth(step))


def in_export() -> None:
    """While the result is exported, all steps being done."""
    before("commands.train:export_run", lambda: pause("export"))
