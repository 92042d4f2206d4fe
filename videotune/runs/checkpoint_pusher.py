"""Upload each checkpoint beside the training, in a process of its own.

No step waits for it, and an upload that fails ends nothing: it is tried again, later or
with the next checkpoint.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from videotune.config.schema import Config
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.lazy import huggingface_hub as hub
from videotune.runs import hub_push

TRY_AGAIN = 60.0
"""Seconds between an upload that failed and the next try; each further one takes twice
as long.
"""

LONGEST_PAUSE = 1800.0

LAST_SECONDS = 900.0
"""Seconds that the end of a run waits for its last checkpoint."""

_GRACE = 10.0

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from videotune.runs.hub_push import main
main()
"""


class CheckpointPusher:
    """Uploads the newest checkpoint of a run whenever there is a new one.

    It follows the journal: a line "save" is a new checkpoint, and every line a look at
    the upload that is on its way.
    """

    def __init__(self, run: Path, repo: str | None, keep: int) -> None:
        """Prepare uploads.

        Args:
            run: the run folder.
            repo: id of the repository; None: nothing is uploaded.
            keep: how many checkpoints stay there.
        """
        self._run = run
        self._repo = repo
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._answer: dict[str, Any] = {}
        self._is_wanted = False
        self._failures = 0
        self._next_try = 0.0
        self.warn: Callable[[str], None] = lambda text: echo(f"warning: {text}")
        """Called in the caller's thread with a sentence on an upload that failed."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Follow the journal."""
        if self._repo is None:
            return
        if line["kind"] == "save":
            self._is_wanted = True
        self._collect()
        if self._is_wanted and time.monotonic() >= self._next_try:
            self._start()

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._is_wanted = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        request = {
            "run": str(self._run.resolve()),
            "repo": self._repo,
            "keep": self._keep,
            "seconds": hub_push.SECONDS,
        }
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "HF_XET_HIGH_PERFORMANCE": "0"},
                # The terminal's Ctrl-C stops the training; its state is still uploaded.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
            output, _ = self._child.communicate(
                json.dumps(request).encode(), hub_push.SECONDS + _GRACE
            )
            self._answer = json.loads(output)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            if self._child is not None:
                self._child.kill()
            reason = f"its process failed ({type(error).__name__})"
            self._answer = {"problem": reason}

    def _collect(self) -> None:
        """Take the result of an upload that has ended."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        problem = self._answer.get("problem")
        if not problem:
            if self._failures:
                echo(f"step {self._answer['step']} is uploaded to {self._repo}")
            self._failures = 0
            self._next_try = 0.0
            return

        self._is_wanted = True
        pause = min(TRY_AGAIN * 2**self._failures, LONGEST_PAUSE)
        self._next_try = time.monotonic() + pause
        self._failures += 1
        if self._failures == 1:
            self.warn(
                f"push_checkpoints_to: {problem.rstrip('.')}. It is tried again; the "
                "checkpoints are saved here"
            )

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Upload the last checkpoint, and wait for it for at most ``seconds``."""
        if self._repo is None:
            return
        self.warn = lambda text: echo(f"warning: {text}")
        self._collect()
        has_failed = self._failures > 0
        if self._thread is not None or self._is_wanted:
            echo(f"uploading the last checkpoint to {self._repo}; Ctrl-C leaves it out")

        until = time.monotonic() + seconds
        while self._thread is not None or self._is_wanted:
            self._start()
            while self._thread is not None and time.monotonic() < until:
                self._thread.join(0.1)
                self._collect()
            if self._thread is not None or self._failures:
                break

        if self._thread is not None:
            self._give_up()
            self.warn(f"push_checkpoints_to: no end of the upload in {seconds:g} s")
        elif self._failures and has_failed:
            problem = self._answer["problem"]
            self.warn(
                f"push_checkpoints_to: the last checkpoint is only here: {problem}"
            )

    def _give_up(self) -> None:
        if self._child is not None:
            self._child.kill()


def open_pusher(run: Path, config: Config, *, goes_on: bool) -> CheckpointPusher:
    """Return what uploads a run's checkpoints.

    Args:
        run: the run folder.
        config: the run's config.
        goes_on: the run is resumed. A missing token is then a warning.

    Raises:
        VideotuneError: if a new run has no token of the Hub.
    """
    repo = config.push_checkpoints_to
    if repo is not None and hub.get_token() is None:
        text = (
            "push_checkpoints_to: there is no token. Create one with write access at "
            f"{hub.constants.ENDPOINT}/settings/tokens, and set HF_TOKEN to it"
        )
        if not goes_on:
            raise VideotuneError(text)
        echo(f"warning: {text}")
        repo = None
    return CheckpointPusher(run, repo, config.push_checkpoints_keep)
