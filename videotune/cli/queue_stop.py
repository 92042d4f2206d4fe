"""What Ctrl-C does to a queue in the foreground: its trainings save and end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from videotune.console import echo

STOPPING = "stopping: each training that runs saves and ends …"


@contextmanager
def interrupts_as_stops() -> Iterator[None]:
    """Answer the first Ctrl-C of this block with what it does, and raise
    KeyboardInterrupt; a second one is handled as before the block.

    A signal that the process ignores stays ignored. Outside of the main thread nothing
    changes, since only that one handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            handlers[number] = signal.getsignal(number)

    def put_back() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        put_back()
        echo(STOPPING)
        raise KeyboardInterrupt

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        put_back()
