"""The process that answers plans for all Setup pages: it has imported what the command line imports, and stays warm."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from videotune.files import read_json, write_json
from videotune.studio.web import tag

AGAIN = 10.0
"""Seconds from one start of the process to the next, where it dies."""

_lock = Lock()
_begun = -AGAIN
_process: subprocess.Popen[bytes] | None = None
_asked: dict[Path, str] = {}
"""The last question about each answer, of this process."""


def read(out: Path) -> dict[str, Any]:
    """An answer as it is now; empty where there is none yet."""
    try:
        return dict(read_json(out))
    except (OSError, ValueError):
        return {}


def ask(out: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the file ``out`` answers so far; its question is sent where it is another than that of the answer.

    ``asked`` in the answer says whether it is up to date: its ``key`` is the question's, and its ``part`` is "full". A newer
    question takes the place of an older one. The process sees no card, so that it takes none of its memory.
    """
    global _begun, _process
    found = read(out)
    key = tag(json.dumps(question, sort_keys=True))
    if (current := found.get("key") == key) and found.get("part") == "full":
        return {**found, "current": True, "measuring": False}
    with _lock:
        if _process is None or _process.poll() is not None:
            if time.monotonic() - _begun < AGAIN:
                return {**found, "current": False, "measuring": False}
            _asked.clear()
            _begun = time.monotonic()
            hidden = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
            _process = subprocess.Popen(
                [sys.executable, "-m", "videotune.commands.answers"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **hidden},
            )  # fmt: skip
        if _asked.get(out) != key and _process.stdin:
            _asked[out] = key
            out.parent.mkdir(exist_ok=True)
            write_json(
                place := out.with_suffix(".asked.json"), {**question, "key": key, "out": str(out)}, durable=False
            )
            _process.stdin.write(f"{place}\n".encode())
            _process.stdin.flush()
    return {**found, "current": False, "measuring": current}
