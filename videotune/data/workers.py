"""A pool of child processes for everything that opens a clip, so that a decoder's crash or hang costs that clip alone.

FFmpeg is C code that reads other people's files; a segmentation fault in it would end a training run. Each child has a
thread here that sends it one task at a time and reads the answer; frames are read straight into their array. Children
are plain programs (``worker``), neither forked (CUDA and threads do not survive that) nor spawned by multiprocessing
(which runs the caller's script again).
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
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread, Timer, current_thread
from types import TracebackType
from typing import Any

import numpy as np

from videotune.errors import VideotuneError

from .facts import ClipProblem, Facts

START_LIMIT = 120.0
"""Seconds within which a child must have started; a cold network disk is slow to give a Python its libraries."""

PIPE_BYTES = 1 << 20
"""What a pipe shall hold: the most that Linux gives to everybody. Frames then take 16 times fewer turns."""

# a child finds its modules where this process does, whatever the folder in which it starts
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from videotune.data.worker import main; main()"


Task = tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], float]
"""What ``Workers.ask`` is told: the task's name, its words, and a time limit in seconds."""


class Lost(ClipProblem):
    """The process that worked on a clip crashed or hung: no fact of the clip's content, it may go well next time."""


@dataclass(frozen=True)
class _Job:
    """A task, its words, its time limit in seconds, and where its answer goes."""

    future: Future[Any]
    task: str
    words: Mapping[str, Any]
    limit: float


class Workers:
    """Up to ``count`` child processes, started when first needed and anew after a crash; a task has ``limit`` seconds.

    To be closed, as a context manager or by ``close``; if the process ends without, its children end with it, whatever
    it died of.
    """

    def __init__(self, count: int, limit: float = 120.0) -> None:
        assert count >= 1
        self.count = count
        self.limit = limit
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = Lock()  # guards what follows
        self._threads: list[Thread] = []
        self._children: set[subprocess.Popen[bytes]] = set()
        self._unfinished = 0
        self._closed = False

    def ask(self, task: str, words: Mapping[str, Any], limit: float | None = None) -> Future[Any]:
        """The answer to come of one of ``worker.perform``'s tasks; "facts" among the words may be ``Facts``.

        The future raises ClipProblem; Lost, which is one, where the child crashed or did not answer within the limit
        (counted from when a child takes the task up); VideotuneError for what the person must mend; RuntimeError with the
        child's traceback for a bug.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            self._unfinished += 1
            self._jobs.put(_Job(future, task, words, self.limit if limit is None else limit))
            if len(self._threads) < min(self._unfinished, self.count):
                thread = Thread(target=self._serve, name=f"worker {len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def ordered(self, tasks: Iterable[Task], ahead: int | None = None) -> Generator[Any, None, None]:
        """The answers to (task, words) or (task, words, limit) in order; a ClipProblem is one too, other errors are raised.

        Tasks are pulled when needed, so that at most ``ahead`` (default: twice the count) are asked and not yet taken:
        memory stays flat for any number of them. Those asked ahead are given up when the generator is closed.
        """
        ahead = 2 * self.count if ahead is None else ahead
        assert ahead >= 1
        waiting: deque[Future[Any]] = deque()
        source = iter(tasks)
        try:
            while True:
                while len(waiting) < ahead and (asked := next(source, None)) is not None:
                    waiting.append(self.ask(*asked))
                if not waiting:
                    return
                yield _result(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End all children at once; tasks without an answer are cancelled. Nothing can be asked afterwards."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(10)  # not for ever: a child inside a dead network disk cannot even be killed

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """One thread's life: tasks from the queue, one child at a time."""
        child: subprocess.Popen[bytes] | None = None
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                child = self._work(job, child)
            with self._lock:
                self._unfinished -= 1
            del job  # its answer is freed when nobody else holds it, not when the next task comes
        self._drop(child)

    def _work(self, job: _Job, child: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
        """Settle one job's future; returns the child for the next job."""
        try:
            if child is None or child.poll() is not None:  # none yet, or it is dead
                self._drop(child)
                child = None
                child = self._start()
            job.future.set_result(_exchange(child, job))
        except BaseException as error:  # whatever it is, it is raised to whoever waits for the answer
            job.future.set_exception(CancelledError() if self._closed else error)
        return child

    def _start(self) -> subprocess.Popen[bytes]:
        """A child that says it is ready; RuntimeError with its last words where it does not."""
        with self._lock:  # so that ``close`` misses none
            if self._closed:
                raise CancelledError
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # the terminal's Ctrl-C is for the parent, which then ends the children
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
            self._children.add(child)
        assert child.stdout is not None
        assert child.stderr is not None
        timer = _kill_after(child, START_LIMIT)
        try:
            ready = child.stdout.readline()
        finally:
            timer.cancel()
        if not ready:
            child.kill()
            words = child.stderr.read().decode(errors="replace").strip()
            self._drop(child)
            raise RuntimeError(f"A process that reads clips could not start:\n{words or 'it said nothing'}")
        child.stderr.close()
        _widen(child.stdout.fileno())
        return child

    def _drop(self, child: subprocess.Popen[bytes] | None) -> None:
        """Make sure that a child is gone."""
        if child is None:
            return
        _end(child)
        with self._lock:
            self._children.discard(child)


def _result(future: Future[Any]) -> Any:
    """Wait for an answer; a ClipProblem is one."""
    try:
        return future.result()
    except ClipProblem as problem:
        return problem


def _exchange(child: subprocess.Popen[bytes], job: _Job) -> Any:
    """Send one task and read its answer; raises what ``Workers.ask`` says. A child that is Lost has been ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    facts = job.words.get("facts")
    words = {**job.words, "facts": facts.to_json()} if isinstance(facts, Facts) else dict(job.words)
    request = json.dumps({"task": job.task, "words": words}).encode() + b"\n"
    begun = time.monotonic()
    timer = _kill_after(child, job.limit)
    try:
        child.stdin.write(request)
        child.stdin.flush()
        head = json.loads(child.stdout.readline())
        if (shape := head.get("shape")) is not None:
            frames = np.empty(shape, np.uint8)
            if child.stdout.readinto(frames) < frames.nbytes:  # type: ignore[attr-defined]
                raise EOFError
            return frames
    except BaseException as error:
        _end(child)  # what it still has to say is no answer to the next task
        reason = "unreadable" if job.task == "examine" else "decode_error"
        if isinstance(error, MemoryError):
            raise Lost(reason, "there is not enough memory for it") from error
        if not isinstance(error, OSError | EOFError | ValueError):
            raise
        late = time.monotonic() - begun >= job.limit
        detail = f"no answer within {job.limit:g} s" if late else _death(child.returncode)
        raise Lost(reason, detail) from error
    finally:
        timer.cancel()
        if time.monotonic() - begun >= job.limit:
            _end(child)  # the timer may strike at this very moment, and the next task needs a sound child
    return _unwrap(head, words.get("path") or (words.get("facts") or {}).get("path"))


def _unwrap(head: Mapping[str, Any], path: str | None) -> Any:
    """An answer's value, or the error that it is; ``path`` is what the task was about."""
    match head:
        case {"ok": value}:
            return value
        case {"problem": [reason, detail]}:
            raise ClipProblem(reason, detail)
        case {"lost": [reason, detail]}:
            raise Lost(reason, detail)
        case {"refused": text}:
            raise VideotuneError(text)
    raise RuntimeError(f"A process that reads clips failed at {path}:\n{head.get('error', head)}")


def _kill_after(child: subprocess.Popen[bytes], seconds: float) -> Timer:
    timer = Timer(seconds, child.kill)
    timer.daemon = True
    timer.start()
    return timer


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, and wait until it is gone."""
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # stuck inside the kernel; it goes when the disk answers
        child.wait(10)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):  # what was not sent to it is lost with it
                pipe.close()


def _death(code: int | None) -> str:
    """What became of a child, for the person."""
    if code is None or -code not in set(signal.Signals):
        return f"the decoder crashed (exit code {code})"
    name = signal.Signals(-code).name
    return f"the decoder crashed ({name}{': memory ran out, perhaps' if name == 'SIGKILL' else ''})"


def _widen(pipe: int) -> None:
    """Let a pipe hold more, where the system can: only speed depends on it."""
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):  # the user's share of pipe memory is used up
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


_default: dict[int, Workers] = {}
_registered: list[int] = []
_default_lock = Lock()


def close_default_workers() -> None:
    """End the process's own pool; the next one who needs it starts it anew."""
    with _default_lock:
        pool = _default.pop(os.getpid(), None)
    if pool is not None:
        pool.close()


def default_workers() -> Workers:
    """The process's own pool, a child for each CPU and at most eight; closed when the process ends."""
    pid = os.getpid()  # a forked copy of this process has the pool's memory but not its threads
    with _default_lock:
        if pid not in _default:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            _default[pid] = Workers(min(8, cpus))
            if pid not in _registered:
                atexit.register(close_default_workers)
                _registered.append(pid)
        return _default[pid]
