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

WARNING = getattr(signal, "SIGUSR1", None)
"""What Slurm sends before a job's time is over. Windows has none."""

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
    was_warned: bool = False
    """Whether SIGUSR1 asked, and no other signal has come since."""
    _is_interruptible: bool = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise Interrupted anywhere in the block as soon as the user asks to stop.

        Also in a ``finally``, so what must be restored completely is restored outside
        of the block.
        """
        self._is_interruptible = True
        try:
            if self.stop:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False


def end_process_on_requests() -> None:
    """Let SIGUSR1 and a closed terminal do what SIGTERM does, until the first step.

    If the process was started to ignore the terminal's signal (nohup), it still does.
    """
    for number in (HANGUP, WARNING):
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.getsignal(signal.SIGTERM))


@contextmanager
def signals(is_distributed: bool = False) -> Iterator[Signals]:
    """Let SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask the run to finish its step and save.

    A second SIGINT or SIGTERM ends the process at once. The first one after SIGUSR1 does
    not: Slurm sends SIGUSR1 some time before the end, and SIGTERM at the end. If the
    process was started to ignore SIGHUP, it still does.
    """
    requests = Signals(is_distributed=is_distributed)

    def on_signal(number: int, frame: FrameType | None) -> None:
        is_press = number not in (HANGUP, WARNING)
        if requests.stop:
            is_same_press = (
                requests.is_distributed and time.monotonic() - requests.at < ONE_PRESS
            )
            if not is_press or is_same_press:
                return
            if requests.was_warned:
                requests.was_warned = False
                requests.at = time.monotonic()
                return
            _print_now("videotune: stopped at once; what was saved before is complete")
            os._exit(INTERRUPTED)  # waits for nothing, not even for threads

        requests.stop = True
        requests.was_warned = number == WARNING
        requests.at = time.monotonic()
        _print_now(
            "stopping after this step and saving; press once more to stop at once"
        )
        if requests._is_interruptible:
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if WARNING is not None:
        numbers.append(WARNING)
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
