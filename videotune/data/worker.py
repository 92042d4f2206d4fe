"""The process that opens other people's files: requests come on stdin, answers leave on stdout.

A request is a JSON line {"task", "words"}; an answer is a JSON line, followed by raw bytes where it names a "shape":
{"ok": value} | {"shape": [T, H, W, 3]} | {"problem": [reason, detail]} (the clip's own) | {"lost": [reason, detail]} (may
differ next time) | {"refused": text} (for the person to mend) | {"error": traceback}. The first line, {"ok": "ready"},
says that it started. ``workers`` is the other end.

It ends when stdin does, also in the midst of a task: a parent that was killed leaves no process behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO

from videotune import files
from videotune.errors import VideotuneError

from .facts import ClipProblem, Facts
from .probe import probe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def perform(task: str, words: Mapping[str, Any]) -> Any:
    """The answer to one request, JSON-like, or for "decode" uint8 (T, H, W, 3); raises ClipProblem.

    "examine" {path, unless}; "decode" {facts, times, height, width, resize, place}; "look" {facts, until};
    "scenes" {facts, until, threshold}.
    """
    match task:
        case "examine":
            return _examine(words["path"], words.get("unless", ()))
        case "decode":
            return _decode(words)
        case "look":
            from .look import look

            return look(Facts.from_json(words["facts"]), words["until"]).to_json()
        case "scenes":
            from .scenes import scenes

            return list(scenes(Facts.from_json(words["facts"]), words["until"], words.get("threshold")))
    raise ValueError(f'there is no task "{task}"')


def _examine(path: str, unless: Iterable[str]) -> dict[str, Any]:
    """The hash of a file's bytes, and its facts or problem, but for contents that are known already (``unless``)."""
    try:
        clip_id = files.hash_file(Path(path))
    except OSError as error:  # rights, or a disk that went away: no fact of the content
        return {"id": "", "problem": ["unreadable", error.strerror or str(error)]}
    if clip_id in unless:
        return {"id": clip_id}
    try:
        return {"id": clip_id, "facts": probe(path).to_json()}
    except ClipProblem as problem:
        return {"id": clip_id if _reads_whole(path) else "", "problem": [problem.reason, problem.detail]}


def _reads_whole(path: str) -> bool:
    """Whether the disk still gives the file: if not, a problem says nothing about its content."""
    try:
        files.hash_file(Path(path))
    except OSError:
        return False
    return True


def _decode(words: Mapping[str, Any]) -> NDArray[np.uint8]:
    from .decode import decode

    place = words.get("place", (0.5, 0.5))
    return decode(
        Facts.from_json(words["facts"]),
        words["times"],
        words["height"],
        words["width"],
        resize=words.get("resize", "center"),
        place=(place[0], place[1]),
        threads=1,  # the pool has a process for each CPU
    )


def _answer(request: Mapping[str, Any], out: BinaryIO) -> None:
    """Perform a request and write what came of it, whatever that is."""
    body = None
    try:
        result = perform(request["task"], request["words"])
        if request["task"] == "decode":
            body = result
        head = json.dumps({"ok": result} if body is None else {"shape": body.shape})
    except ClipProblem as problem:
        kind = "problem" if _reads_whole(request["words"]["facts"]["path"]) else "lost"
        head = json.dumps({kind: [problem.reason, problem.detail]})
    except VideotuneError as error:
        head = json.dumps({"refused": str(error)})
    except MemoryError:
        head = json.dumps({"lost": ["decode_error", "there is not enough memory for it"]})
    except Exception:  # a bug: raised again at the other end
        head = json.dumps({"error": traceback.format_exc()})
    out.write(head.encode() + b"\n")
    if body is not None:
        out.write(body)
    out.flush()


def _read_requests(lines: Iterable[bytes], requests: SimpleQueue[dict[str, Any]]) -> None:
    """Pass requests on, and end the process when there can be no more: nobody waits for the answer then."""
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not disturb the answers
    import av  # noqa: F401  # here, so that no task's time limit counts it, and its absence is an error at the start
    import numpy  # noqa: F401

    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    out.write(b'{"ok": "ready"}\n')
    out.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        while True:
            _answer(requests.get(), out)
    except BrokenPipeError:  # the parent is gone
        os._exit(0)


if __name__ == "__main__":
    main()
