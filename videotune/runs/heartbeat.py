"""The heartbeat: a small file that a living run touches every few seconds, so that nobody calls a dead one running."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from videotune.files import LATE, life, write_json

EVERY = LATE / 6
"""Seconds between two beats."""


class Heartbeat:
    """What this process is doing; a thread of its own writes it into ``heartbeat.json``.

    It counts the seconds of each state too. ``begun``: the ``time.perf_counter()`` from which they count; ``earlier``:
    those of the run's processes before this one.
    """

    def __init__(
        self, run: Path, begun: float | None = None, earlier: Mapping[str, float] | None = None
    ) -> None:
        self.path = run / "heartbeat.json"
        # replaced as one, for the thread that beats reads it: what is counted, the state since, and since when
        self._spent = (
            dict(earlier or {}),
            "starting",
            time.perf_counter() if begun is None else begun,
        )
        now = round(time.time(), 3)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "started": now}
        self._facts: dict[str, Any] = {
            **who,
            "step": 0,
            "state": "starting",
            "since": now,
            "progress": None,
        }
        self._lock = threading.Lock()
        self._over = threading.Event()

    @property
    def state(self) -> str:
        """What the process was last said to do."""
        return str(self._facts["state"])

    @property
    def step(self) -> int:
        """The last step that was said to be done."""
        return int(self._facts["step"])

    def set(self, state: str, step: int | None = None) -> None:
        """What the process does now.

        One of starting, encoding, loading, training, saving, measuring, probing, sampling, paused, exporting, reporting,
        ended.
        """
        new: dict[str, Any] = {}
        if state != self.state:
            self._spent = self._until_now(), state, time.perf_counter()
            new = {"state": state, "since": round(time.time(), 3), "progress": None}
        self._facts = self._facts | new | ({} if step is None else {"step": step})

    def progress(self, what: str, done: int, total: int) -> None:
        """How far the state is: so many done of so many."""
        self._facts = self._facts | {"progress": {"what": what, "done": done, "total": total}}

    def _until_now(self) -> dict[str, float]:
        counted, state, since = self._spent
        if state == "ended":
            return counted
        return counted | {state: counted.get(state, 0.0) + time.perf_counter() - since}

    def seconds(self) -> dict[str, float]:
        """Seconds in each state until now, over all processes of the run; their sum is its wall time."""
        return {state: round(spent, 3) for state, spent in self._until_now().items()}

    def beat(self) -> None:
        """Write the file. On a full disk the old one stays and is touched, which takes no room: the process lives."""
        with self._lock:
            try:
                now = {"seconds": self.seconds(), "time": round(time.time(), 3)}
                write_json(self.path, self._facts | now, durable=False)
            except OSError:  # the training says so itself, where it meets the same disk
                with suppress(OSError):
                    os.utime(self.path)

    def _keep(self) -> None:
        while not self._over.wait(EVERY):
            self.beat()


@contextmanager
def keep_heartbeat(
    run: Path, begun: float | None = None, goes_on: bool = False
) -> Iterator[Heartbeat]:
    """Beats for the length of a block; at its end the file says that the process has ended.

    ``begun`` as in ``Heartbeat``; ``goes_on``: the run's earlier processes count, as far as their last beat said.
    """
    before = (life(run) or {}).get("seconds") if goes_on else None
    numbers = (
        before.items() if isinstance(before, dict) else ()
    )  # a damaged file counts for nothing
    heart = Heartbeat(
        run, begun, {state: spent for state, spent in numbers if isinstance(spent, float)}
    )
    heart.beat()
    thread = threading.Thread(target=heart._keep, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heart
    finally:
        heart._over.set()
        thread.join()
        heart.set("ended")
        heart.beat()
