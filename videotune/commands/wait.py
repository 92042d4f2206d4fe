"""``wait``: block until a run has reached a step, or has ended."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videotune.errors import DONE, FAILED, SKIPPED
from videotune.files import life
from videotune.reporter.outcome import status

LOOK = 0.5
"""Seconds between two looks at a run's heartbeat."""

StepFn = Callable[[int], object]
"""What hears of a step."""


def wait(
    run: Path | str,
    step: int | None = None,
    timeout: float | None = None,
    tell: StepFn = lambda _: None,
) -> tuple[int, dict[str, Any]]:
    """Block until ``step`` is done, or without one until the run has ended; (exit code, status).

    The code is 0 where that came, 1 where the run ended otherwise, 2 after ``timeout`` seconds. A folder without a run is
    waited for as well. ``tell`` hears of each new step.
    """
    run = Path(run)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        beat = life(run)
        done = int(beat["step"]) if beat else 0
        tell(done)
        reached = step is not None and done >= step
        if reached or (beat and not beat["alive"]):
            found = status(run)
            ended = found["state"] in ("done", "early")
            if reached or found["state"] != "running":
                return DONE if reached or (step is None and ended) else FAILED, found
        if end is not None and time.monotonic() >= end:
            return SKIPPED, status(run)
        time.sleep(LOOK)
