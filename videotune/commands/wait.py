"""``wait``: block until a run reaches a step or ends."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videotune.bounds import Deadline
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.reporter.outcome import status
from videotune.runs.run_life import LATE, life

LOOK = 0.5
"""Seconds between two looks at a run's heartbeat."""

StepFn = Callable[[int, int], object]
"""Called with the step that is done and that which is waited for."""


def wait(
    run: Path | str,
    step: int | None = None,
    timeout: float | None = None,
    tell: StepFn = lambda done, total: None,
) -> tuple[int, dict[str, Any]]:
    """Block until a step is done, or until the run has ended.

    A folder without a run is waited for, too.

    Args:
        run: the run folder.
        step: the step to wait for. None: the end.
        timeout: seconds after which to give up.
        tell: called with each new step, as soon as the run says how many it has.

    Returns:
        (exit code, status). The code is 0 if that was reached, 1 if the run ended
        otherwise, 2 after the timeout.
    """
    run = Path(run)
    deadline = None if timeout is None else time.monotonic() + timeout
    total = step or 0
    silence = Deadline(LATE)
    while True:
        heartbeat = life(run)
        if heartbeat is None:
            done, has_stopped = _read_silent_run(run, is_late=silence.is_over)
        else:
            silence = Deadline(LATE)
            done = int(heartbeat["step"])
            has_stopped = not heartbeat["alive"]
            total = total or int(status(run)["steps"] or 0)
            if total:
                tell(done, total)

        is_reached = step is not None and done >= step
        if is_reached or has_stopped:
            now = status(run)
            has_ended_well = step is None and now["state"] in ("done", "early")
            if is_reached or now["state"] != "running":
                return DONE if is_reached or has_ended_well else FAILED, now

        if deadline is not None and time.monotonic() >= deadline:
            return SKIPPED, status(run)
        time.sleep(LOOK)


def _read_silent_run(run: Path, *, is_late: bool) -> tuple[int, bool]:
    """Return the step of a run without a valid heartbeat, and whether it has ended.

    A run that was copied or imported has none. A living process writes it before
    anything else, and writes a damaged one again within seconds.

    Args:
        run: the run folder.
        is_late: whether there has been no heartbeat for longer than that.
    """
    now = status(run)
    if now["state"] == "absent":
        return 0, False
    return int(now["step"]), is_late or now["state"] != "no end"
