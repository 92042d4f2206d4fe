"""The heartbeat: a small file that a living run touches every few seconds, so that a
dead one is not shown as running.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.files import write_json
from videotune.runs.run_life import LATE, life

EVERY = LATE / 6
"""Seconds between two beats while the state stays."""

CHANGE_INTERVAL = 0.5
"""Least seconds between two beats that a change of the state causes."""


@dataclass(frozen=True)
class _Clock:
    """Seconds of finished states, and the present state.

    Replaced as a whole, because the thread that beats reads it.
    """

    seconds: Mapping[str, float]
    state: str
    since: float

    def until_now(self) -> dict[str, float]:
        seconds = dict(self.seconds)
        if self.state != "ended":
            spent = time.perf_counter() - self.since
            seconds[self.state] = seconds.get(self.state, 0.0) + spent
        return seconds


class Heartbeat:
    """What this process is doing.

    A thread writes it into ``heartbeat.json``, with the seconds of each state.
    """

    def __init__(
        self,
        run: Path,
        begun: float | None = None,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        """Begin in the state "starting".

        Args:
            run: the run folder.
            begun: the ``time.perf_counter()`` from which seconds count. None: now.
            earlier: seconds of the run's processes before this one, by state.
        """
        self.path = run / "heartbeat.json"
        since = time.perf_counter() if begun is None else begun
        self._clock = _Clock(dict(earlier or {}), "starting", since)
        now = round(time.time(), 3)
        self._facts: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": now,
            "step": 0,
            "state": "starting",
            "since": now,
            "progress": None,
        }
        self.ranks: Callable[[], list[dict[str, Any]]] | None = None
        """Returns the figures of each process of a run that has several."""
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._has_changed = threading.Event()

    @property
    def state(self) -> str:
        """What the process does, as last set."""
        return str(self._facts["state"])

    @property
    def step(self) -> int:
        """The last step that is done, as last set."""
        return int(self._facts["step"])

    def set(self, state: str, step: int | None = None) -> None:
        """Set what the process does from now on.

        The thread writes another state at once, so that a page does not show the one
        before for seconds.

        Args:
            state: one of starting, encoding, loading, training, saving, measuring,
                probing, sampling, paused, exporting, reporting, ended.
            step: the last step that is done. None: as before.
        """
        changes: dict[str, Any] = {}
        if state != self.state:
            self._clock = _Clock(self._clock.until_now(), state, time.perf_counter())
            changes = {"state": state, "since": round(time.time(), 3), "progress": None}
        if step is not None:
            changes["step"] = step
        self._facts = self._facts | changes
        if "state" in changes:
            self._has_changed.set()

    def progress(self, subject: str, done: int, total: int) -> None:
        """Set how far the state is: ``done`` of ``total``."""
        self._facts = self._facts | {
            "progress": {"what": subject, "done": done, "total": total}
        }

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each state until now, over all processes of the run.

        Their sum is its wall time.
        """
        return {
            state: round(spent, 3) for state, spent in self._clock.until_now().items()
        }

    def beat(self) -> None:
        """Write the file.

        On a full disk the old one stays and is touched, which takes no room.
        """
        with self._lock:
            try:
                now: dict[str, Any] = {
                    "seconds": self.seconds(),
                    "time": round(time.time(), 3),
                }
                if self.ranks is not None:
                    now["ranks"] = self.ranks()
                write_json(self.path, self._facts | now, durable=False)
            except OSError:  # the training reports it where it meets the same disk
                with suppress(OSError):
                    os.utime(self.path)

    def _beat_until_ended(self) -> None:
        while not self._has_ended.is_set():
            if self._has_changed.wait(EVERY):
                # Callbacks set several states in a moment: the last of them is written.
                self._has_ended.wait(CHANGE_INTERVAL)
            self._has_changed.clear()
            if not self._has_ended.is_set():
                self.beat()


@contextmanager
def keep_heartbeat(
    run: Path, begun: float | None = None, goes_on: bool = False
) -> Iterator[Heartbeat]:
    """Beat for the length of a block.

    At its end the file says that the process has ended.

    Args:
        run: the run folder.
        begun: as in ``Heartbeat``.
        goes_on: count the run's earlier processes, as far as their last beat says.
    """
    earlier: dict[str, float] = {}
    seconds = (life(run) or {}).get("seconds") if goes_on else None
    if isinstance(seconds, dict):  # a damaged file counts for nothing
        earlier = {
            state: spent for state, spent in seconds.items() if isinstance(spent, float)
        }

    heartbeat = Heartbeat(run, begun, earlier)
    heartbeat.beat()
    thread = threading.Thread(
        target=heartbeat._beat_until_ended, name="heartbeat", daemon=True
    )
    thread.start()
    try:
        yield heartbeat
    finally:
        heartbeat._has_ended.set()
        heartbeat._has_changed.set()
        thread.join()
        heartbeat.set("ended")
        heartbeat.beat()
