"""Answers to the questions of the page Setup, computed in forks of a warm process.

The process has imported all libraries, so a fork starts at once.
"""

import json
import multiprocessing
import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import psutil

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.studio.records import Answer, read_record
from videotune.studio.web import content_tag

WORKER_MODULE = "videotune.studio.plan_worker"
"""The module that computes answers; this process does not import it, since it loads
torch.
"""

TIMEOUT = 120.0
"""Seconds of computing that an answer may take, unless the question sets ``longest``."""

PATIENCE = 10
"""How much longer it may take by the clock, on a machine that others use."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([WORKER_MODULE, "videotune.cli.main", __name__])

_STUDIO_START = uuid.uuid4().hex
"""Stands for this start of the studio. That a calculation died, as all do when the
studio ends, says nothing about its question, so the next start computes it again.
"""

_lock = Lock()
_current_key: dict[Path, str] = {}
"""The key of the last question for each answer file."""

_asked_at: dict[Path, float] = {}
"""When that question was sent, in seconds since 1970."""

_workers: dict[Path, Thread] = {}


MAX_ANSWER_BYTES = 16_000_000
"""Size limit of an answer."""


def read_answer(out: Path) -> dict[str, Any]:
    """Return an answer as it is now; empty if there is none yet, or a damaged one, which
    the next question replaces.
    """
    try:
        return dict(read_record(out, Answer, "it is computed again", MAX_ANSWER_BYTES))
    except VideotuneError:
        return {}


def key_of(question: Mapping[str, Any]) -> str:
    """Return the key that the answers to a question have."""
    return content_tag(json.dumps(question, sort_keys=True))


def request_answer(out: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer so far, and send the question if it has changed.

    A newer question replaces an older one for the same file.

    Args:
        out: file of the answer.
        question: the question, as ``plan_worker.write_answer`` takes it.

    Returns:
        The answer, as ``answer_so_far`` gives it.
    """
    answer = answer_so_far(out, question)
    key = key_of(question)
    if not answer.get("key"):
        _forget(out)  # its file was removed or damaged since it was written

    with _lock:
        if not answer["current"] and _current_key.get(out) != key:
            _current_key[out] = key
            _asked_at[out] = time.time()
            full_question = {**question, "key": key, "out": str(out)}
            previous_worker = _workers.get(out)
            _workers[out] = Thread(
                target=_compute, args=(full_question, previous_worker), daemon=True
            )
            _workers[out].start()

    is_computing_now = not answer["current"]
    asked_at = _asked_at.get(out) if is_computing_now else None
    return answer | {"computing": is_computing_now, "asked": asked_at}


def answer_so_far(out: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer so far, without sending the question.

    Args:
        out: file of the answer.
        question: the question that it should answer.

    Returns:
        The answer. ``current``: it answers this question completely. ``measuring``: a
        part of it is there. ``computing``: this process works on it. ``asked``: when
        the question was sent, while it is computed.
    """
    is_computing_it = is_computing(out, key_of(question))
    answer = read_answer(out)
    is_same_question = answer.get("key") == key_of(question)
    is_of_earlier_start = answer.get("died_in", _STUDIO_START) != _STUDIO_START
    is_full = answer.get("part") == "full" and not is_of_earlier_start
    is_current = is_same_question and is_full
    return {
        **answer,
        "current": is_current,
        "measuring": is_same_question and not is_full,
        "computing": is_computing_it and not is_current,
        "asked": _asked_at.get(out) if is_computing_it else None,
    }


def is_computing(out: Path, key: str = "") -> bool:
    """Return whether an answer is being computed.

    Args:
        out: file of the answer.
        key: of the question that it should be for; empty for any.
    """
    with _lock:
        worker = _workers.get(out)
        current_key = _current_key.get(out)
        if worker is None or not worker.is_alive() or not current_key:
            return False
        return key in ("", current_key)


def stop(out: Path) -> None:
    """Stop computing an answer; what is there of it stays."""
    with _lock:
        _current_key[out] = ""


def _forget(out: Path) -> None:
    """Forget the last question for a file, unless its answer is being computed."""
    with _lock:
        worker = _workers.get(out)
        if worker is None or not worker.is_alive():
            _current_key.pop(out, None)


def _compute(question: dict[str, Any], previous_worker: Thread | None) -> None:
    """Compute an answer in a fork; stop it after a timeout or at a newer question."""
    if previous_worker is not None:
        previous_worker.join()

    out = Path(question["out"])
    key = question["key"]
    if _current_key.get(out) != key:
        return

    out.parent.mkdir(exist_ok=True)
    process = _forks.Process(target=_run_worker, args=(question,), daemon=True)
    try:
        failure = _run_process(process, out, question)
    except (OSError, EOFError) as error:
        failure = f"could not start: {error}"

    if _current_key.get(out) == key and process.exitcode != 0:
        answer = {
            "key": key,
            "code": 1,
            "words": f"the calculation {failure}",
            "part": "full",
            "died_in": _STUDIO_START,
        }
        write_json(out, read_answer(out) | answer, durable=False)


def _run_process(process: Any, out: Path, question: Mapping[str, Any]) -> str:
    """Run a process to its end; return why it ended, in case it has failed."""
    timeout = question.get("longest", TIMEOUT)
    process.start()  # waits until the libraries are imported

    deadline = time.monotonic() + PATIENCE * timeout
    while (
        process.is_alive()
        and _current_key.get(out) == question["key"]
        and time.monotonic() < deadline
        and _seconds_computed(process.pid) <= timeout
    ):
        process.join(0.1)

    is_late = process.is_alive()
    process.kill()
    process.join()
    if is_late:
        return f"took more than {timeout:g} s"
    return f"was killed (status {process.exitcode})"


def _seconds_computed(pid: int) -> float:
    """Return the CPU seconds that a process has taken so far; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _run_worker(question: dict[str, Any]) -> None:
    """Compute an answer; runs in the fork."""
    import_module(WORKER_MODULE).write_answer(question)
