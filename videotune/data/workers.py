"""A pool of child processes that open clips, so that a decoder's crash or hang costs
one clip.

FFmpeg is C code that parses untrusted files; a segmentation fault in it would end a
training run. Each child has a thread here that sends it one task at a time and reads
the answer; frames are read directly into their array. Children are plain programs
(``worker_process.main``, which defines the protocol). They are not forked, since CUDA
and threads do not survive that, and not spawned by multiprocessing, which runs the
caller's script again.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread, Timer, current_thread
from typing import Any, NamedTuple

import numpy as np

from videotune.cpu_threads import available_cores
from videotune.data.fetch_ahead import FetchAhead, FetchRequest
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.errors import VideotuneError

START_LIMIT = 120.0
"""Seconds within which a child must start.

Python's libraries load slowly from a network disk.
"""

MOST_CHILDREN = 64
"""Children of the default pool, at most. Each takes some 100 MB of memory."""

PIPE_BYTES = 1 << 20
"""Capacity of an answer pipe: the most that Linux gives to every user.

Frames then need 16 times fewer switches between the processes.
"""

ARRAY_TYPES: Mapping[str, Any] = {"frames": np.uint8, "sound": np.float32}
"""Type of the numbers of the arrays that follow an answer, by its kind."""

# A child gets this process's module path, in whatever folder it starts.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from videotune.data.worker_process import main
main()
"""

Call = tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], float]
"""Arguments of ``Workers.submit``: task name, task arguments, and a time limit in
seconds.
"""


class DecoderCrash(ClipProblem):
    """Raised if the process that worked on a clip crashed or hung; the clip may be
    sound.
    """


class _Task(NamedTuple):
    future: Future[Any]
    name: str
    arguments: Mapping[str, Any]
    limit: float
    """Seconds from when a child starts the task."""
    fetch: FetchRequest | None
    """The clip's object, if it is on an object store."""


class Workers:
    """A pool of child processes, started when first needed and restarted after a crash.

    Close it, as a context manager or by ``close``. If this process ends without that,
    its children end too, even after a kill.

    Args:
        count: most children at a time.
        limit: seconds for a task, unless ``submit`` names another limit.
    """

    def __init__(self, count: int, limit: float = 120.0) -> None:
        assert count >= 1
        self.count = count
        self.limit = limit
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._fetch_ahead = FetchAhead()
        self._lock = Lock()  # guards all fields below
        self._threads: list[Thread] = []
        self._children: set[subprocess.Popen[bytes]] = set()
        self._unfinished = 0
        self._closed = False

    def submit(
        self, task: str, arguments: Mapping[str, Any], limit: float | None = None
    ) -> Future[Any]:
        """Queue a task and return the future of its answer.

        The future raises ClipProblem; DecoderCrash, a ClipProblem, if the child crashed
        or exceeded the limit; RuntimeError with the child's traceback for a bug.

        Args:
            task: a name from ``worker_process.TASKS``.
            arguments: the task's arguments as JSON; "info" may be a MediaInfo.
            limit: seconds from when a child starts the task; default is the pool's
                limit.
        """
        future: Future[Any] = Future()
        seconds = self.limit if limit is None else limit

        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            fetch = self._fetch_ahead.request(_path_of(arguments))
            self._unfinished += 1
            self._tasks.put(_Task(future, task, arguments, seconds, fetch))
            if len(self._threads) < min(self._unfinished, self.count):
                name = f"worker {len(self._threads)}"
                thread = Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def map(
        self, calls: Iterable[Call], ahead: int | None = None
    ) -> Generator[Any, None, None]:
        """Yield the answers to the calls in order; a ClipProblem is yielded, not
        raised.

        Calls are pulled as needed, so memory stays flat for any number of them. Closing
        the generator cancels the calls without an answer.

        Args:
            calls: arguments of ``submit``.
            ahead: most calls that are submitted and not yet yielded; default 2 ×
                ``count``.
        """
        pending: deque[Future[Any]] = deque()
        remaining_calls = iter(calls)
        try:
            while True:
                while len(pending) < (ahead or 2 * self.count):
                    call = next(remaining_calls, None)
                    if call is None:
                        break
                    pending.append(self.submit(*call))
                if not pending:
                    return

                future = pending.popleft()
                problem = future.exception()
                yield problem if isinstance(problem, ClipProblem) else future.result()
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Kill all children and cancel the tasks without an answer; refuse new ones."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()

        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is None:
                    break
                task.future.cancel()
                if task.fetch is not None:
                    task.fetch.release()

        self._fetch_ahead.close()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not current_thread():
                # A child that waits for a dead network disk cannot even be killed.
                thread.join(timeout=10)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """Perform tasks from the queue with one child at a time; a thread runs this."""
        child: subprocess.Popen[bytes] | None = None
        while True:
            task = self._tasks.get()
            if task is None:
                break

            if task.future.set_running_or_notify_cancel():
                try:
                    if task.fetch is not None:
                        task.fetch.wait()
                    if child is None or child.poll() is not None:
                        self._end(child)
                        child = None
                        child = self._start()
                    task.future.set_result(_call(child, task))
                except BaseException as error:  # raised again by the future
                    task.future.set_exception(
                        CancelledError() if self._closed else error
                    )

            if task.fetch is not None:
                task.fetch.release()
            with self._lock:
                self._unfinished -= 1
            # Free the answer when its reader does, not when the next task arrives.
            del task
        self._end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child and wait until it is ready.

        Raises:
            RuntimeError: with the child's output, if it does not start.
        """
        # With the lock held, close() cannot miss a new child.
        with self._lock:
            if self._closed:
                raise CancelledError
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                # The terminal's Ctrl-C is for the parent, which then ends the children.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
            self._children.add(child)

        assert child.stdout
        assert child.stderr
        timer = _kill_after(child, START_LIMIT)
        ready = child.stdout.readline()
        timer.cancel()
        if not ready:
            child.kill()
            output = child.stderr.read().decode(errors="replace").strip()
            self._end(child)
            raise RuntimeError(
                f"A process that reads clips could not start:\n{output or '(no output)'}"
            )

        child.stderr.close()
        _enlarge_pipe(child.stdout.fileno())
        return child

    def _end(self, child: subprocess.Popen[bytes] | None) -> None:
        if child is not None:
            _kill(child)
            with self._lock:
                self._children.discard(child)


def _enlarge_pipe(descriptor: int) -> None:
    """Set the capacity of a pipe, if the system allows it; only the speed depends on
    it.
    """
    if sys.platform == "linux":
        import fcntl  # not on Windows

        # Fails if the user's pipe memory is used up.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _call(child: subprocess.Popen[bytes], task: _Task) -> Any:
    """Send a task to a child and return its answer.

    After a crash or a timeout the child has been killed.

    Raises:
        ClipProblem, DecoderCrash, RuntimeError: as ``Workers.submit`` documents.
    """
    arguments = dict(task.arguments)
    info = arguments.get("info")
    if isinstance(info, MediaInfo):
        arguments["info"] = info.to_json()

    started_at = time.monotonic()
    timer = _kill_after(child, task.limit)
    try:
        kind, value = _exchange(child, json.dumps([task.name, arguments]))
    except BaseException as error:
        # Whatever the child still writes must not be the answer to the next task.
        _kill(child)
        if not isinstance(error, OSError | EOFError | ValueError | MemoryError):
            raise

        if isinstance(error, MemoryError):
            detail = "there is not enough memory for it"
        elif time.monotonic() - started_at >= task.limit:
            detail = f"no answer within {task.limit:g} s"
        else:
            detail = _cause_of_death(child.returncode)
        reason = "unreadable" if task.name == "examine" else "decode_error"
        raise DecoderCrash(reason, detail) from error
    finally:
        timer.cancel()
        # The timer may fire right now, and the next task needs a child that lives.
        if time.monotonic() - started_at >= task.limit:
            _kill(child)

    if kind == "problem":
        raise ClipProblem(*value)
    if kind == "crash":
        raise DecoderCrash(*value)
    if kind == "refused":
        raise VideotuneError(value)
    if kind == "error":
        path = arguments.get("path") or arguments["info"]["path"]
        raise RuntimeError(f"A process that reads clips failed at {path}:\n{value}")
    return value


def _path_of(arguments: Mapping[str, Any]) -> str:
    """Return the path of the clip that a task opens."""
    info = arguments.get("info")
    if isinstance(info, MediaInfo):
        return info.path
    return str(info["path"] if info else arguments["path"])


def _exchange(child: subprocess.Popen[bytes], request: str) -> tuple[str, Any]:
    """Send a request line and read the answer; the value of "frames" and "sound" is the
    array itself.
    """
    assert child.stdin
    assert child.stdout
    child.stdin.write(request.encode() + b"\n")
    child.stdin.flush()
    kind, value = json.loads(child.stdout.readline())

    if kind in ARRAY_TYPES:
        array = np.empty(value, ARRAY_TYPES[kind])
        if child.stdout.readinto(array) < array.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        return kind, array
    return kind, value


def _kill_after(child: subprocess.Popen[bytes], seconds: float) -> Timer:
    timer = Timer(seconds, child.kill)
    timer.daemon = True
    timer.start()
    return timer


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, wait until it has ended, and close its pipes."""
    child.kill()
    # A child stuck in the kernel ends when its disk answers.
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):  # data that could not be sent any more
                pipe.close()


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is None or -exit_code not in set(signal.Signals):
        return f"the decoder crashed (exit code {exit_code})"

    name = signal.Signals(-exit_code).name
    hint = ": memory may have run out" if name == "SIGKILL" else ""
    return f"the decoder crashed ({name}{hint})"


_default_pools: dict[int, Workers] = {}
"""Pools by process id: a forked copy of this process has a pool's memory but not its
threads."""


def default_workers() -> Workers:
    """Return this process's pool, with a child per core up to ``MOST_CHILDREN``; closed
    at exit.
    """
    cores = available_cores()
    return _default_pools.setdefault(os.getpid(), Workers(min(MOST_CHILDREN, cores)))


@atexit.register
def close_default_workers() -> None:
    """Close this process's pool; ``default_workers`` starts another."""
    pool = _default_pools.pop(os.getpid(), None)
    if pool is not None:
        pool.close()
