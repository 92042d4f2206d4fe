"""The process that opens other people's files: requests come on stdin, answers leave on stdout.

A request is a JSON line [task, arguments]; an answer is a JSON line [kind, value], where a kind is "ok", "frames" (value:
their shape (T, H, W, 3); their bytes follow), "problem" (value: reason, detail; of the clip's content), "crash" (the same;
may differ next time) or "error" (value: a traceback). The first line, ["ok", "ready"], reports that the process started.
``workers`` is the other end.

The process ends when stdin does, also in the midst of a task: a parent that was killed leaves no process behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from videotune.files import hash_file

from .content_scan import scan_content
from .decode import decode
from .file_checks import ClipProblem
from .media_info import MediaInfo, probe


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
    "decode": lambda info, **how: decode(MediaInfo.from_json(info), **how, threads=1),  # the pool has a process per CPU
}


def _is_readable(path: str) -> bool:
    """Whether the disk still gives the file: if not, a problem says nothing about its content."""
    try:
        hash_file(Path(path))
    except OSError:
        return False
    return True


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
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        while True:
            task, arguments = requests.get()
            _answer(task, arguments, out)
    except BrokenPipeError:  # the parent is gone
        os._exit(0)
