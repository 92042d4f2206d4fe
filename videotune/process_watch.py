"""Notice that a process of the run has died, froze or lost its network, in seconds.

A message to a process that is gone fails at once if its connection was closed. If its
host vanished, nothing closes the connection, and the message waits for as long as the
main process may work by itself. So each process counts in the launcher's store, where
the others read whether it still counts.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed.rendezvous import rendezvous

from videotune.errors import FAILED, VideotuneError
from videotune.text import some

LOST_AFTER = 45.0
"""Seconds without a sign of life after which a process is lost.

VIDEOTUNE_LOST_AFTER replaces it.
"""

STUCK_AFTER = 1800.0
"""Seconds in which no process finishes a step, after which they are stuck.

VIDEOTUNE_STUCK_AFTER replaces it. A run whose steps take long waits for ten of them.
"""

JOIN_WITHIN = timedelta(minutes=10)
"""Time that the processes have to begin; their imports come from slow disks."""

GRACE = 5.0
"""Seconds that a process has to end by itself once another one is lost."""

STEPS_UNTIL_STUCK = 10

LEFT = "left"
"""What a process that has ended as it should leaves in the store."""

ActivityFn = Callable[[], tuple[str, int]]
"""Returns what this process does, a state of the heartbeat, and its last step."""


class ProcessLost(VideotuneError):
    """A process of the run is gone or no longer answers, so this one cannot go on."""


def seconds_from(variable: str, otherwise: float) -> float:
    """Return the seconds that an environment variable sets.

    Raises:
        VideotuneError: It is not a positive number.
    """
    text = os.environ.get(variable)
    if text is None:
        return otherwise
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise VideotuneError(
            f"{variable}: {text!r} is not a positive number of seconds. Correct it"
        )
    return seconds


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error says that a message between processes has failed."""
    if isinstance(error, ProcessLost | torch_dist.DistError):
        return True
    # gloo raises a plain RuntimeError that names its source file
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def lost_message(error: BaseException) -> str:
    """Return the sentence for a message between processes that has failed."""
    if isinstance(error, ProcessLost):
        return str(error)
    reason = str(error).partition(". This is typically")[0]
    return f"another process of the run is gone; its output says why ({reason})"


class ProcessWatch:
    """Counts in the store for this process, and reads what the others count.

    A thread talks to the store, which may not answer. A second one judges by the clock.
    """

    def __init__(self, rank: int, size: int, store: torch_dist.Store) -> None:
        self.activity: ActivityFn = lambda: ("starting", 0)
        self.details: Callable[[], str] = lambda: ""
        """Returns what this process tells the others besides, in a line."""
        self.details_of_others: tuple[str, ...] = ()
        """What the others have told so, in the order of their ranks."""
        self._store = store
        self._own_key = _key(rank)
        self._others = [other for other in range(size) if other != rank]
        self._lost_after = seconds_from("VIDEOTUNE_LOST_AFTER", LOST_AFTER)
        self._every = min(5.0, self._lost_after / 10)
        self._stuck = StuckSteps(seconds_from("VIDEOTUNE_STUCK_AFTER", STUCK_AFTER))

        now = time.monotonic()
        self._begun = now
        self._answered = now
        self._values: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, now)
        self._has_left = False
        self._has_ended = threading.Event()
        self._exchange = _daemon(self._exchange_until_ended)
        self._judge = _daemon(self._judge_until_ended)

    def start(self) -> None:
        """Begin to count and to watch the others."""
        self._exchange.start()
        self._judge.start()

    def stop(self, *, has_left: bool) -> None:
        """End the watch.

        Args:
            has_left: this process ends as it should, so the others need not miss it.
        """
        self._has_left = has_left
        self._has_ended.set()
        self._exchange.join(GRACE)

    def _exchange_until_ended(self) -> None:
        """Count, and note when the others have counted."""
        count = 0
        while not self._has_ended.is_set():
            count += 1
            state, step = self.activity()
            value = f"{count} {state} {step} {self.details()}"
            with suppress(RuntimeError):  # _verdict counts the seconds without answer
                self._store.set(self._own_key, value)
                self._read_others(value.encode())
            self._has_ended.wait(self._every)
        if self._has_left:
            with suppress(RuntimeError):  # the others, and the store, may have left
                self._store.set(self._own_key, LEFT)

    def _read_others(self, own_value: bytes) -> None:
        """Note when the value of each other process has changed."""
        keys = [_key(other) for other in self._others]
        if not self._values:
            self._store.wait(keys, JOIN_WITHIN)
        values = dict(zip(self._others, self._store.multi_get(keys), strict=True))

        now = time.monotonic()
        for other, value in values.items():
            if value != self._values.get(other):
                self._heard[other] = now
        self._answered = now
        self._values = values
        self.details_of_others = tuple(
            value.decode().split(" ", 3)[3]
            for value in values.values()
            if value != LEFT.encode()
        )
        self._stuck.note(now, [own_value, *values.values()])

    def _judge_until_ended(self) -> None:
        """End this process when another one is lost."""
        judged = time.monotonic()
        while not self._has_ended.wait(self._every):
            now = time.monotonic()
            if now - judged > self._lost_after / 2:
                # This process itself was frozen, so the times are not the others' fault.
                self._heard = dict.fromkeys(self._others, now)
                self._answered = now
            judged = now

            verdict = self._verdict(now)
            if verdict is None:
                continue
            _print_now(
                f"videotune: {verdict}. This process ends; a resume continues the run"
            )
            # A message that fails by now ends the process with its traceback closed.
            if not self._has_ended.wait(GRACE):
                os._exit(FAILED)

    def _verdict(self, now: float) -> str | None:
        """Return why the run cannot go on; None: it can."""
        if not self._values:
            if now - self._begun < JOIN_WITHIN.total_seconds():
                return None
            return f"not all processes have begun within {JOIN_WITHIN}"

        if now - self._answered > self._lost_after:
            return (
                f"the launcher's store has not answered for {self._lost_after:g} s: this "
                "host or that of the store has lost its network, or the launcher is dead"
            )
        lost = []
        for other, heard in self._heard.items():
            has_left = self._values[other] == LEFT.encode()
            if not has_left and now - heard > self._lost_after:
                lost.append(str(other))
        if lost:
            return (
                f"no sign of life from {some(lost)} of the run's processes "
                f"(by rank) for {self._lost_after:g} s"
            )
        return self._stuck.verdict(now)


class StuckSteps:
    """Finds that all processes are in a step and none gets on."""

    def __init__(self, stuck_after: float) -> None:
        self._stuck_after = stuck_after
        self._steps: tuple[str, ...] = ()
        self._moved = time.monotonic()
        self._longest = 0.0
        self._all_train = False

    def note(self, now: float, values: Sequence[bytes]) -> None:
        """Note what all processes do now."""
        activities = [
            value.decode().split(" ", 3)[:3]
            for value in values
            if value != LEFT.encode()
        ]
        was_training = self._all_train
        self._all_train = all(state == "training" for _, state, _ in activities)
        steps = tuple(step for _, _, step in activities)
        if steps != self._steps or not self._all_train or not was_training:
            if self._all_train and was_training:
                self._longest = max(self._longest, now - self._moved)
            self._steps = steps
            self._moved = now

    def verdict(self, now: float) -> str | None:
        """Return that the processes are stuck, or None."""
        limit = max(self._stuck_after, STEPS_UNTIL_STUCK * self._longest)
        if not self._all_train or now - self._moved < limit:
            return None
        return (
            f"no process has finished a step for {limit:.0f} s. If steps take that long, "
            "set VIDEOTUNE_STUCK_AFTER to more seconds"
        )


@contextmanager
def watched_store(
    rank: int, size: int
) -> Iterator[tuple[torch_dist.Store, ProcessWatch]]:
    """Yield the launcher's store, and watch the other processes for the length of a
    block.

    Raises:
        ProcessLost: for an error of the block that says that a message between
            processes has failed.
    """
    try:
        launcher_store, _, _ = next(rendezvous("env://", timeout=JOIN_WITHIN))
        name = _name_of_this_start(launcher_store, rank, size)
        store = torch_dist.PrefixStore(name, launcher_store)
        watch = ProcessWatch(
            rank, size, torch_dist.PrefixStore(name, _second_connection())
        )
        watch.start()
        has_left = False
        try:
            yield store, watch
            has_left = True
        finally:
            watch.stop(has_left=has_left)
    except (RuntimeError, ProcessLost) as error:
        if not is_lost_connection(error):
            raise
        # The launcher's signal finds a process that is ending already.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if isinstance(error, ProcessLost):
            raise
        raise ProcessLost(lost_message(error)) from error


def _name_of_this_start(store: torch_dist.Store, rank: int, size: int) -> str:
    """Return a name on which the processes of this start agree.

    torchrun keeps its store when it starts the processes again, with the addresses of
    those before. Below a new name nobody reads them. The first process chooses it and
    tells it to each greeting, of which old ones wait for no answer.

    Raises:
        ProcessLost: if not all processes begin within JOIN_WITHIN.
    """
    name = uuid.uuid4().hex
    greeting = uuid.uuid4().hex
    if rank > 0:
        store.set(f"videotune/greeting/{rank}", greeting)

    missing = set(range(1, size)) if rank == 0 else {0}
    until = time.monotonic() + JOIN_WITHIN.total_seconds()
    while missing:
        if rank == 0:
            missing = {
                other for other in missing if not _has_arrived(store, name, other)
            }
        elif store.check([f"videotune/answer/{greeting}"]):
            name = store.get(f"videotune/answer/{greeting}").decode()
            store.set(f"videotune/arrived/{name}/{rank}", "")
            missing = set()
        if time.monotonic() > until:
            raise ProcessLost(
                f"not all {size} processes have begun within {JOIN_WITHIN}. Look at the "
                "output of the others"
            )
        # Not one long call to the store: no signal would interrupt it.
        time.sleep(0.02)
    return name


def _has_arrived(store: torch_dist.Store, name: str, rank: int) -> bool:
    """Answer the greeting of a process, and return whether it has read the answer."""
    if store.check([f"videotune/arrived/{name}/{rank}"]):
        return True
    if store.check([f"videotune/greeting/{rank}"]):
        greeting = store.get(f"videotune/greeting/{rank}").decode()
        store.set(f"videotune/answer/{greeting}", name)
    return False


def _second_connection() -> torch_dist.Store:
    """Return another connection to the launcher's store, for a thread of its own."""
    return torch_dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=JOIN_WITHIN,
    )


def _key(rank: int) -> str:
    return f"videotune/watch/{rank}"


def _daemon(work: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=work, name="process watch", daemon=True)


def _print_now(text: str) -> None:
    """Write a line to standard error, also while the main thread prints."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
