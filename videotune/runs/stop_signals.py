"""Signals by which the user stops a run: finish the step and save, or end at once."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from videotune.errors import INTERRUPTED

ONE_PRESS = 2.0
"""Seconds within which signals of a terminal and a launcher count as one request."""

HANGUP = getattr(signal, "SIGHUP", None)
"""What a closed terminal sends. Windows has none."""


class Interrupted(BaseException):
    """The user has asked to stop while something was made that can be made again."""


@dataclass
class Signals:
    """Whether the user has asked to stop."""

    stop: bool = False
    at: float = 0.0
    """When the user asked."""
    is_distributed: bool = False
    """Whether there are several processes, each of which the launcher signals once
    more.
    """
    _breaking: bool = False

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Raise Interrupted anywhere in the block as soon as the user asks to stop.

        Also in a ``finally``, so what must be restored completely is restored outside
        of the block.
        """
        self._breaking = True
        try:
            if self.stop:
                raise Interrupted
            yield
        finally:
            self._breaking = False


def hangup_is_termination() -> None:
    """Let a closed terminal do what SIGTERM does, unless the process was started to
    ignore it (nohup).
    """
    if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:
        signal.signal(HANGUP, signal.getsignal(signal.SIGTERM))


@contextmanager
def signals(is_distributed: bool = False) -> Iterator[Signals]:
    """Let SIGINT, SIGTERM and SIGHUP ask the run to finish its step and save.

    A second signal ends the process at once.

    Except for a second SIGHUP, which a closed terminal may send. If the process was
    started to ignore SIGHUP, it still does.
    """
    requests = Signals(is_distributed=is_distributed)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requests.stop:
            is_same_press = (
                requests.is_distributed and time.monotonic() - requests.at < ONE_PRESS
            )
            if number == HANGUP or is_same_press:
                return
            _print_now("videotune: stopped at once; the last checkpoint is complete")
            os._exit(INTERRUPTED)  # waits for nothing, not even for threads

        requests.stop = True
        requests.at = time.monotonic()
        _print_now(
            "stopping after this step and saving; press once more to stop at once"
        )
        if requests._breaking:
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    previous_handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _print_now(text: str) -> None:
    """Write a line to standard error.

    In a signal handler, print may interrupt another print.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
