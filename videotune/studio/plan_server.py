"""Answers to the Setup pages' questions, from forks of a process that has imported all libraries and stays warm."""

import json
import multiprocessing
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from videotune.files import read_json, write_json
from videotune.studio.web import content_tag

WORKER_MODULE = "videotune.studio.plan_worker"
"""The module that answers; this process does not import it, since it brings torch."""

TIMEOUT = 120.0
"""Seconds of an answer, unless the question allows more."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([WORKER_MODULE, "videotune.cli.main", __name__])
_lock = Lock()
_asked: dict[Path, str] = {}
"""The key of the last question about each answer, of this process."""

_workers: dict[Path, Thread] = {}


def read_answer(out: Path) -> dict[str, Any]:
    """An answer as it is now; empty where there is none yet."""
    try:
        return dict(read_json(out))
    except (OSError, ValueError):
        return {}


def request_answer(out: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the file ``out`` answers so far; its question is sent where it is another than that of the answer.

    ``current`` in the answer: it answers this question, wholly; ``measuring``: a part of it is there. A newer question takes
    the place of an older one about the same file.
    """
    found = read_answer(out)
    key = content_tag(json.dumps(question, sort_keys=True))
    current = found.get("key") == key
    full = found.get("part") == "full"
    with _lock:
        if not (current and full) and _asked.get(out) != key:
            _asked[out] = key
            given = ({**question, "key": key, "out": str(out)}, _workers.get(out))
            _workers[out] = Thread(target=_work, args=given, daemon=True)
            _workers[out].start()
    return {**found, "current": current and full, "measuring": current and not full}


def _work(question: dict[str, Any], before: Thread | None) -> None:
    """See to an answer: its process ends where it takes too long, or where a newer question has come."""
    if before is not None:
        before.join()
    out = Path(question["out"])
    key = question["key"]
    longest = question.get("longest", TIMEOUT)
    if _asked[out] != key:
        return
    out.parent.mkdir(exist_ok=True)
    process = _forks.Process(target=_answer, args=(question,), daemon=True)
    try:
        process.start()  # waits until the libraries are imported
        end = time.monotonic() + longest
        while process.is_alive() and _asked[out] == key and time.monotonic() < end:
            process.join(0.1)
        late = process.is_alive()
        process.kill()
        process.join()
        why = (
            f"took more than {longest:g} s"
            if late
            else f"was killed (status {process.exitcode})"
        )
    except (OSError, EOFError) as error:
        why = f"could not begin: {error}"
    if _asked[out] == key and process.exitcode != 0:
        failed = {"key": key, "code": 1, "words": f"the calculation {why}", "part": "full"}
        write_json(out, read_answer(out) | failed, durable=False)


def _answer(question: dict[str, Any]) -> None:
    """What runs in the fork."""
    import_module(WORKER_MODULE).answer(question)
