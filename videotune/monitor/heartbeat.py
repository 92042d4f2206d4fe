"""The heartbeat: a small file that a living run touches every few seconds, so that nobody calls a dead one running."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from videotune.files import LATE, write_json

EVERY = LATE / 6
"""Seconds between two beats."""


class Heartbeat:
    """What this process is doing; a thread of its own writes it into ``heartbeat.json``."""

    def __init__(self, run: Path) -> None:
        self.path = run / "heartbeat.json"
        now = round(time.time(), 3)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "started": now}
        self._facts: dict[str, Any] = {**who, "step": 0, "state": "starting", "since": now}
        self._lock, self._over = threading.Lock(), threading.Event()

    @property
    def state(self) -> str:
        """What the process was last said to do."""
        return str(self._facts["state"])

    def tell(self, state: str, step: int | None = None) -> None:
        """What the process does now: starting, encoding, training, saving, measuring, sampling, paused, exporting, ended."""
        new = {} if state == self.state else {"state": state, "since": round(time.time(), 3)}
        self._facts = self._facts | new | ({} if step is None else {"step": step})

    def beat(self) -> None:
        """Write the file. On a full disk the old one stays and is touched, which takes no room: the process lives."""
        with self._lock:
            try:
                write_json(self.path, self._facts | {"time": round(time.time(), 3)}, durable=False)
            except OSError:  # the training says so itself, where it meets the same disk
                with suppress(OSError):
                    os.utime(self.path)

    def _keep(self) -> None:
        while not self._over.wait(EVERY):
            self.beat()


@contextmanager
def heartbeat(run: Path) -> Iterator[Heartbeat]:
    """Beats for the length of a block; at its end the file says that the process has ended."""
    pulse = Heartbeat(run)
    pulse.beat()
    thread = threading.Thread(target=pulse._keep, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield pulse
    finally:
        pulse._over.set()
        thread.join()
        pulse.tell("ended")
        pulse.beat()
