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

from videotune.files import read_json, write_json

EVERY = 5.0
"""Seconds between two beats."""

LATE = 6 * EVERY
"""A heartbeat that is older than this, seen from another machine, is that of a dead process."""


class Heartbeat:
    """What this process is doing; a thread of its own writes it into ``heartbeat.json``."""

    def __init__(self, run: Path) -> None:
        self.path = run / "heartbeat.json"
        self._facts: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "step": 0, "state": "starting"}
        self._lock, self._over = threading.Lock(), threading.Event()

    @property
    def state(self) -> str:
        """What the process was last said to do."""
        return str(self._facts["state"])

    def tell(self, state: str, step: int | None = None) -> None:
        """What the process does now: starting, encoding, training, saving, measuring, sampling, paused, exporting, ended."""
        self._facts = self._facts | {"state": state} | ({} if step is None else {"step": step})

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


def life(run: Path, now: float | None = None) -> dict[str, Any] | None:
    """The last heartbeat with ``alive`` added; None where there never was one.

    On the machine that wrote it a process of that number must still be there; elsewhere its age decides, or where the number
    was given to another process since.
    """
    try:
        path = run / "heartbeat.json"
        facts = read_json(path)
        age = (time.time() if now is None else now) - max(facts["time"], path.stat().st_mtime)
        here = facts["host"] == socket.gethostname()
        alive = facts["state"] != "ended" and age < LATE and (not here or _there(facts["pid"]))
        return {**facts, "age": round(max(0.0, age), 1), "alive": alive}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _there(pid: int) -> bool:
    """Whether a process of that number is there."""
    if os.name == "nt":
        return True  # signal 0 would end the process there; its heartbeat's age decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
