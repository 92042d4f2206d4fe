"""Whether a run is alive, by the heartbeat that it leaves in its folder."""

import socket
import time
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from videotune.files import LATEST_TIME, Count, Moment, Number, ProcessId, read_typed
from videotune.lazy import psutil

LATE = 30.0
"""Age in seconds from which a heartbeat is that of a dead process.

A living process writes it six times as often.
"""


class HeartbeatFile(TypedDict):
    """``heartbeat.json`` of a run."""

    pid: ProcessId
    host: str
    step: Count
    state: str
    time: Moment
    started: NotRequired[Moment]
    since: NotRequired[Moment]
    progress: NotRequired[dict[str, str | Count] | None]
    seconds: NotRequired[dict[str, Number]]
    ranks: NotRequired[Any]  # runs/rank_figures.py checks each


def life(run: Path, now: float | None = None) -> dict[str, Any] | None:
    """Return a run's last heartbeat, with whether its process is alive.

    On the machine that wrote it, a process with its number must exist. On another
    machine, or if the number was reused, its age decides.

    Args:
        run: The run folder.
        now: The time. None: the present.

    Returns:
        The heartbeat with "alive", "heard" (its time) and "age"; None without a valid
        one.
    """
    path = run / "heartbeat.json"
    try:
        facts: HeartbeatFile = read_typed(path, HeartbeatFile)
        heard = max(facts["time"], path.stat().st_mtime)
    except (OSError, ValueError):
        return None  # no heartbeat, or a damaged one
    if heard > LATEST_TIME:
        return None

    age = (time.time() if now is None else now) - heard
    is_local = facts["host"] == socket.gethostname()
    is_recent = facts["state"] != "ended" and age < LATE
    is_alive = is_recent and (not is_local or psutil.pid_exists(facts["pid"]))
    return {
        **facts,
        "heard": heard,
        "age": round(max(0.0, age), 1),
        "alive": is_alive,
    }
