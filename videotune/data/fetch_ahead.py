"""Fetch the objects of queued tasks before their turn, in the order of the tasks.

Decoding and fetching overlap then. What is fetched and not used yet has at most half of
the bound on all objects. Room is reserved in the order of the tasks, so that no later one
can hold what an earlier one waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Thread

from videotune.data.object_blobs import Pin
from videotune.data.object_files import bound_bytes, pin_object, read_pointer
from videotune.data.object_store import StoredObject

FETCHERS = 8
"""Objects that are fetched at a time."""

QUEUED = 64
"""Files of a list that are queued before their turn."""


class FetchRequest:
    """One object that a task will open."""

    def __init__(self, fetcher: FetchAhead, stored: StoredObject) -> None:
        self.stored = stored
        self.is_wanted = False
        """Whether the task has begun, and waits."""
        self.is_ahead = False
        """Whether its bytes count as fetched ahead."""
        self.is_released = False
        self.pin: Pin | None = None
        self.error: BaseException | None = None
        self._fetcher = fetcher

    def wait(self) -> Path:
        """Wait until the object is here, and return its file.

        Raises:
            VideotuneError: if it cannot be fetched.
            CancelledError: if the fetcher was closed.
        """
        return self._fetcher.wait_for(self)

    def release(self) -> None:
        """Give the object up; nobody reads it any more."""
        self._fetcher.release(self)


class FetchAhead:
    """Threads that fetch objects, started when the first one is asked for."""

    def __init__(self) -> None:
        self._condition = Condition()  # guards everything below
        self._queue: deque[FetchRequest] = deque()
        self._threads: list[Thread] = []
        self._ahead: Counter[StoredObject] = Counter()
        self._fetching: dict[StoredObject, list[FetchRequest]] = {}
        """Further requests for an object that is being fetched; they need no thread."""
        self._is_reserving = False
        self._is_closed = False

    def request(self, path: str | Path) -> FetchRequest | None:
        """Queue the object of a file; None if the file has its own bytes."""
        stored = read_pointer(path)
        if stored is None:
            return None
        request = FetchRequest(self, stored)
        with self._condition:
            self._queue.append(request)
            if len(self._threads) < FETCHERS:
                name = f"fetch {len(self._threads)}"
                thread = Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()
        return request

    def wait_for(self, request: FetchRequest) -> Path:
        """Do what ``FetchRequest.wait`` does."""
        with self._condition:
            request.is_wanted = True
            self._set_ahead(request, is_ahead=False)
            self._condition.notify_all()
            while request.pin is None and request.error is None:
                if self._is_closed:
                    raise CancelledError
                self._condition.wait()
        if request.error is not None:
            raise request.error
        assert request.pin is not None
        return request.pin.path

    def release(self, request: FetchRequest) -> None:
        """Do what ``FetchRequest.release`` does."""
        with self._condition:
            request.is_released = True
            self._set_ahead(request, is_ahead=False)
            pin = request.pin
            request.pin = None
            self._condition.notify_all()
        if pin is not None:
            pin.release()

    def close(self) -> None:
        """Give everything up that is queued, and refuse what still waits."""
        with self._condition:
            self._is_closed = True
            requests = list(self._queue)
            self._queue.clear()
            self._condition.notify_all()
        for request in requests:
            self.release(request)

    def _set_ahead(self, request: FetchRequest, *, is_ahead: bool) -> None:
        """Count a request as fetched ahead, or no more. The caller has the condition."""
        if request.is_ahead == is_ahead:
            return
        request.is_ahead = is_ahead
        self._ahead[request.stored] += 1 if is_ahead else -1
        if not self._ahead[request.stored]:
            del self._ahead[request.stored]

    def _may_fetch(self) -> bool:
        """Return whether the next request may be fetched now. The caller has the
        condition.
        """
        if not self._queue or self._is_reserving:
            return False
        request = self._queue[0]
        needs_no_room = (
            request.stored in self._ahead or request.stored in self._fetching
        )
        if request.is_wanted or request.is_released or needs_no_room:
            return True
        bytes_ahead = sum(stored.size for stored in self._ahead)
        return bytes_ahead + request.stored.size <= bound_bytes() // 2

    def _serve(self) -> None:
        """Fetch what is asked for; a thread runs this."""
        while True:
            with self._condition:
                while not self._may_fetch():
                    if self._is_closed:
                        return
                    self._condition.wait()
                request = self._queue.popleft()
                if request.is_released:
                    continue
                if not request.is_wanted:
                    self._set_ahead(request, is_ahead=True)
                if request.stored in self._fetching:
                    self._fetching[request.stored].append(request)
                    continue
                self._fetching[request.stored] = []
                self._is_reserving = True
            self._fetch(request)
            # Free what it refers to when its task does, not when the next one comes.
            del request

    def _fetch(self, request: FetchRequest) -> None:
        """Fetch an object, for this request and those that came meanwhile."""
        stored = request.stored
        with self._turn() as turn:
            pin, error = _try_to_pin(stored, turn.end)
        with self._condition:
            followers = self._fetching.pop(stored)
        # The first pin keeps the object until each has its own.
        for follower in followers:
            if error is None:
                self._deliver(follower, *_try_to_pin(stored))
            else:
                self._deliver(follower, None, error)
        self._deliver(request, pin, error)

    def _deliver(
        self, request: FetchRequest, pin: Pin | None, error: BaseException | None
    ) -> None:
        """Hand a pin or an error over to a request, if it still wants it."""
        with self._condition:
            request.error = error
            if not request.is_released:
                request.pin = pin
                pin = None
            self._condition.notify_all()
        if pin is not None:
            pin.release()

    @contextmanager
    def _turn(self) -> Iterator[_Turn]:
        turn = _Turn(self)
        try:
            yield turn
        finally:
            turn.end()

    def end_turn(self) -> None:
        """Let the next request reserve its room."""
        with self._condition:
            self._is_reserving = False
            self._condition.notify_all()


def _try_to_pin(
    stored: StoredObject, reserved: Callable[[], None] = lambda: None
) -> tuple[Pin | None, BaseException | None]:
    """Return a pinned object, or the error, which is raised where it is waited for."""
    try:
        return pin_object(stored, reserved), None
    except BaseException as error:
        return None, error


class _Turn:
    """The right to reserve room, which ends once."""

    def __init__(self, fetcher: FetchAhead) -> None:
        self._fetcher = fetcher
        self._is_over = False

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._fetcher.end_turn()


def local_copies(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield a file that can be opened for each path, in order; fetch those of the next
    paths meanwhile. Each stays until the next is asked for.

    Raises:
        VideotuneError: if an object cannot be fetched.
    """
    fetcher = FetchAhead()
    queued: deque[tuple[Path, FetchRequest | None]] = deque()
    remaining = iter(paths)

    try:
        while True:
            while len(queued) < QUEUED:
                path = next(remaining, None)
                if path is None:
                    break
                queued.append((path, fetcher.request(path)))
            if not queued:
                return

            path, request = queued.popleft()
            if request is None:
                yield path
                continue
            try:
                yield request.wait()
            finally:
                request.release()
    finally:
        fetcher.close()
        for _, request in queued:
            if request is not None:
                request.release()
