"""A pool of child processes for everything that opens a clip, so that a decoder's crash or hang costs that clip alone.

FFmpeg is C code that reads other people's files; a segmentation fault in it would end a training run. Each child has a
thread here that sends it one task at a time and reads the answer; frames are read straight into their array. Children
are plain programs (``main``), neither forked (CUDA and threads do not survive that) nor spawned by multiprocessing
(which runs the caller's script again).

A request is a JSON line [task, arguments] on the child's stdin; an answer is a JSON line [kind, value] on its stdout. A kind
is "ok", "frames" (value: their shape (T, H, W, 3); their bytes follow), "problem" (value: reason, detail; of the clip's
content), "crash" (the same; may differ next time) or "error" (value: a traceback). The first line, ["ok", "ready"], reports
that the process started. It ends when stdin does, also in the midst of a task: a parent that was killed leaves none behind.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread, Timer, current_thread
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from videotune.data.content_scan import scan_content
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo, probe
from videotune.files import hash_file

START_LIMIT = 120.0
"""Seconds within which a child must have started; a cold network disk is slow to give a Python its libraries."""

PIPE_BYTES = 1 << 20
"""What a pipe shall hold: the most that Linux gives to everybody. Frames then take 16 times fewer turns."""

# a child finds its modules where this process does, whatever the folder in which it starts
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from videotune.data.workers import main; main()"

Call = tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], float]
"""What ``Workers.submit`` is given: the task's name, its arguments, and a time limit in seconds."""


class DecoderCrash(ClipProblem):
    """The process that worked on a clip crashed or hung: says nothing of the clip's content."""


class _Task(NamedTuple):
    future: Future[Any]
    name: str
    arguments: Mapping[str, Any]
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
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = Lock()  # guards what follows
        self._threads: list[Thread] = []
        self._children: set[subprocess.Popen[bytes]] = set()
        self._unfinished = 0
        self._closed = False

    def submit(
        self, task: str, arguments: Mapping[str, Any], limit: float | None = None
    ) -> Future[Any]:
        """The future answer of one of ``TASKS``; "info" among the arguments may be a ``MediaInfo``.

        The future raises ClipProblem; DecoderCrash, which is one, where the child crashed or did not answer within the
        limit (counted from when a child starts the task); RuntimeError with the child's traceback for a bug.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            self._unfinished += 1
            self._tasks.put(
                _Task(future, task, arguments, self.limit if limit is None else limit)
            )
            if len(self._threads) < min(self._unfinished, self.count):
                self._threads.append(
                    Thread(target=self._serve, name=f"worker {len(self._threads)}", daemon=True)
                )
                self._threads[-1].start()
        return future

    def map(
        self, calls: Iterable[Call], ahead: int | None = None
    ) -> Generator[Any, None, None]:
        """The answers to the calls in order; a ClipProblem is one too, other errors are raised.

        Calls are pulled when needed, so that at most ``ahead`` (default: twice the count) are submitted and not yet
        yielded: memory stays flat for any number of them. Those are cancelled when the generator is closed.
        """
        waiting: deque[Future[Any]] = deque()
        source = iter(calls)
        try:
            while True:
                while (
                    len(waiting) < (ahead or 2 * self.count)
                    and (call := next(source, None)) is not None
                ):
                    waiting.append(self.submit(*call))
                if not waiting:
                    return
                future = waiting.popleft()
                problem = future.exception()
                yield problem if isinstance(problem, ClipProblem) else future.result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End all children at once; tasks without an answer are cancelled. Nothing can be submitted afterwards."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        with suppress(Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task.future.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(
                    10
                )  # not for ever: a child inside a dead network disk cannot even be killed

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """One thread's life: tasks from the queue, one child at a time."""
        child: subprocess.Popen[bytes] | None = None
        while (task := self._tasks.get()) is not None:
            if task.future.set_running_or_notify_cancel():
                try:
                    if child is None or child.poll() is not None:  # none yet, or it is dead
                        self._end(child)
                        child = None
                        child = self._start()
                    task.future.set_result(_call(child, task))
                except (
                    BaseException
                ) as error:  # whatever it is, it is raised to whoever waits for the answer
                    task.future.set_exception(CancelledError() if self._closed else error)
            with self._lock:
                self._unfinished -= 1
            del (
                task
            )  # its answer is freed when nobody else holds it, not when the next task comes
        self._end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        """A child that has reported that it is ready; RuntimeError with its last output where it does not."""
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
                f"A process that reads clips could not start:\n{output or 'it wrote nothing'}"
            )
        child.stderr.close()
        if sys.platform == "linux":
            import fcntl  # Windows has none

            with suppress(
                OSError
            ):  # the user's share of pipe memory is used up: only speed depends on it
                fcntl.fcntl(child.stdout.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return child

    def _end(self, child: subprocess.Popen[bytes] | None) -> None:
        if child is not None:
            _kill(child)
            with self._lock:
                self._children.discard(child)


def _call(child: subprocess.Popen[bytes], task: _Task) -> Any:
    """Send a task and read its answer; raises what ``Workers.submit`` says. A child that crashed or hung has been ended."""
    assert child.stdin
    assert child.stdout
    info = task.arguments.get("info")
    arguments = (
        {**task.arguments, "info": info.to_json()}
        if isinstance(info, MediaInfo)
        else dict(task.arguments)
    )
    begun = time.monotonic()
    timer = _kill_after(child, task.limit)
    try:
        child.stdin.write(json.dumps([task.name, arguments]).encode() + b"\n")
        child.stdin.flush()
        kind, value = json.loads(child.stdout.readline())
        if kind == "frames":
            frames = np.empty(value, np.uint8)
            if child.stdout.readinto(frames) < frames.nbytes:  # type: ignore[attr-defined]
                raise EOFError
            return frames
    except BaseException as error:
        _kill(child)  # what it still writes is no answer to the next task
        if not isinstance(error, OSError | EOFError | ValueError | MemoryError):
            raise
        late = time.monotonic() - begun >= task.limit
        detail = (
            f"no answer within {task.limit:g} s" if late else _cause_of_death(child.returncode)
        )
        detail = (
            "there is not enough memory for it" if isinstance(error, MemoryError) else detail
        )
        raise DecoderCrash(
            "unreadable" if task.name == "examine" else "decode_error", detail
        ) from error
    finally:
        timer.cancel()
        if time.monotonic() - begun >= task.limit:
            _kill(
                child
            )  # the timer may fire at this very moment, and the next task needs a sound child
    if kind in ("problem", "crash"):
        raise {"problem": ClipProblem, "crash": DecoderCrash}[kind](*value)
    if kind == "error":
        path = arguments.get("path") or arguments["info"]["path"]
        raise RuntimeError(f"A process that reads clips failed at {path}:\n{value}")
    return value


def _kill_after(child: subprocess.Popen[bytes], seconds: float) -> Timer:
    timer = Timer(seconds, child.kill)
    timer.daemon = True
    timer.start()
    return timer


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, and wait until it is gone."""
    child.kill()
    with suppress(
        subprocess.TimeoutExpired
    ):  # stuck inside the kernel; it goes when the disk answers
        child.wait(10)
    for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
        with suppress(OSError):  # what was not sent to it is lost with it
            pipe.close()


def _cause_of_death(code: int | None) -> str:
    if code is None or -code not in set(signal.Signals):
        return f"the decoder crashed (exit code {code})"
    name = signal.Signals(-code).name
    return f"the decoder crashed ({name}{': memory ran out, perhaps' if name == 'SIGKILL' else ''})"


_default: dict[int, Workers] = {}


def default_workers() -> Workers:
    """The process's own pool, a child for each CPU and at most eight; closed when the process ends."""
    cpus = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    # by process: a forked copy of this process has the pool's memory but not its threads
    return _default.setdefault(os.getpid(), Workers(min(8, cpus)))


@atexit.register
def close_default_workers() -> None:
    """End the process's own pool; the next one who needs it starts it anew."""
    pool = _default.pop(os.getpid(), None)
    if pool is not None:
        pool.close()


def examine(path: str, until: float, known: Iterable[str] = ()) -> dict[str, Any]:
    """The hash of a file's bytes; its media info and content scan, or problem, but for contents that are ``known``."""
    try:
        answer: dict[str, Any] = {"id": hash_file(Path(path))}
    except OSError as error:  # rights, or a disk that went away: says nothing about the content
        return {"id": "", "problem": ["unreadable", error.strerror or str(error)]}
    if answer["id"] in known:
        return answer
    try:
        info = probe(path)
        answer["info"] = info.to_json()
        answer["scan"] = scan_content(info, until).to_json()
    except ClipProblem as problem:
        answer["problem"] = [problem.reason, problem.detail]
        if not _is_readable(path):
            answer["id"] = ""
    return answer


TASKS: dict[str, Callable[..., Any]] = {
    "examine": examine,
    "decode": lambda info, **how: decode(
        MediaInfo.from_json(info), **how, threads=1
    ),  # the pool has a process per CPU
}


def _is_readable(path: str) -> bool:
    """Whether the disk still gives the file: if not, a problem says nothing about its content."""
    with suppress(OSError):
        hash_file(Path(path))
        return True
    return False


def _answer(task: str, arguments: dict[str, Any], out: BinaryIO) -> None:
    """Perform a request and write what came of it, whatever that is."""
    answer: list[Any]
    result: Any = None
    try:
        result = TASKS[task](**arguments)
        answer = ["frames", result.shape] if task == "decode" else ["ok", result]
    except ClipProblem as problem:
        kind = "problem" if _is_readable(arguments["info"]["path"]) else "crash"
        answer = [kind, [problem.reason, problem.detail]]
    except MemoryError:
        answer = ["crash", ["decode_error", "there is not enough memory for it"]]
    except Exception:  # a bug: raised again at the other end
        answer = ["error", traceback.format_exc()]
    out.write(json.dumps(answer).encode() + b"\n")
    if answer[0] == "frames":
        out.write(result)
    out.flush()


def _read_requests(lines: Iterable[bytes], requests: SimpleQueue[list[Any]]) -> None:
    """Pass requests on, and end the process when there can be no more: nobody waits for the answer then."""
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not disturb the answers
    requests: SimpleQueue[list[Any]] = SimpleQueue()
    out.write(b'["ok", "ready"]\n')
    out.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        while True:
            task, arguments = requests.get()
            _answer(task, arguments, out)
    except BrokenPipeError:  # the parent is gone
        os._exit(0)
