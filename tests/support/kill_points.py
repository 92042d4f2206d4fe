"""A real SIGKILL at every moment that leaves other files behind: the work runs in a
forked process that kills itself.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("latent_cache/store.py", "videotune/files.py")
RUNS = ("checkpoint", "checkpoint_writer", "rollback", "journal")
SAVING = (
    *(f"runs/{name}.py" for name in RUNS),
    "trainer/restoring.py",
    "videotune/files.py",
    "/shutil.py",
)
"""With shutil's own lines, since it takes a folder away file by file."""

Work = Callable[[Path], None]


def kill_points(work: Work, folder: Path, ours: tuple[str, ...] = OURS) -> list[int]:
    """After how many lines of ours ``work(folder)`` has changed the folder: one for
    each state that a kill can leave.

    Between two lines of ours stands at most one call that writes.
    """
    points: list[int] = []
    states: list[Any] = []

    def look(number: int) -> None:
        found = [
            (str(path), (stat := path.lstat()).st_size, stat.st_mtime_ns)
            for path in sorted(folder.rglob("*"))
        ]
        if not states or found != states[-1]:
            states.append(found)
            points.append(number)

    _traced(look, work, folder, ours)
    return points


def killed_at(
    point: int, work: Work, folder: Path, ours: tuple[str, ...] = OURS
) -> bool:
    """Run ``work(folder)`` in a process that is killed before its line number
    ``point``; whether it was.
    """

    def kill(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            _traced(kill, work, folder, ours)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, (
        "the work failed by itself"
    )
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _traced(
    at_line: Callable[[int], None], work: Work, folder: Path, ours: tuple[str, ...]
) -> None:
    """Run it, and call ``at_line`` with 1, 2, … before each line of ours."""
    number = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal number
        if not frame.f_code.co_filename.endswith(ours):
            return None
        if event == "line":
            number += 1
            at_line(number)
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        work(folder)
    finally:
        sys.settrace(old)
