"""What a run says of itself while it goes on: its journal read on from where the last look ended."""

import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import life
from videotune.reporter.read import FILES, Run
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.step_sums import Curve, Steps, regularization

MOST_OPEN = 8
"""Runs whose journals are kept in memory."""


@dataclass
class Followed:
    """A journal as far as it was read: its events, its steps, curves that the steps' sums leave out (``rate NAME`` and
    ``seconds``), the byte to go on at, and which file that is."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    curves: dict[str, Curve] = field(default_factory=dict)
    offset: int = 0
    inode: int = 0
    lock: Lock = field(default_factory=Lock)

    def begin(self, inode: int, check: Mapping[str, Any] | None) -> None:
        """Read the file anew from its beginning."""
        self.events = []
        self.steps = Steps(regularization(check))
        self.offset = 0
        self.inode = inode
        self.curves = {}

    def add(self, step: Mapping[str, Any]) -> None:
        """Take in a step: into the sums of all steps, and the learning rates and the seconds of this one."""
        self.steps.add(step)
        rates = {f"rate {name}": rate for name, rate in step["lr"].items()}
        for name, value in {**rates, "seconds": sum(step["seconds"].values())}.items():
            steps, values = self.curves.setdefault(name, (array("I"), array("d")))
            steps.append(step["step"])
            values.append(value)


@lru_cache(maxsize=MOST_OPEN)
def _followed(run: Path) -> Followed:
    """What was read of a run's journal."""
    return Followed()


def follow(
    run: Path, check: Mapping[str, Any] | None = None
) -> tuple[tuple[Mapping[str, Any], ...], Steps]:
    """The journal's events and steps so far. Only what was added since the last look is read; a journal written anew, as a
    resume does, is read from its beginning, and a last line that is not whole waits for the next look."""
    known = _followed(run)
    path = run / "journal.jsonl"
    with known.lock:
        try:
            about = path.stat()
        except OSError:
            known.begin(0, check)
            return (), known.steps
        if about.st_ino != known.inode or about.st_size < known.offset:
            known.begin(about.st_ino, check)
        with path.open("rb") as file:
            file.seek(known.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                known.offset += len(line)
                with suppress(ValueError):  # the report says which lines are damaged
                    record = parse_line(line)
                    known.add(record) if record["kind"] == "step" else known.events.append(
                        record
                    )
        return tuple(known.events), deepcopy(
            known.steps
        )  # a page is drawn while another look reads on


def curves(run: Path) -> dict[str, Curve]:
    """The learning rates and the seconds of each step, as far as ``follow`` has read."""
    known = _followed(run)
    with known.lock:
        return deepcopy(known.curves)


def remembered(path: Path) -> Any:
    """A run's file, read again only where it has changed; None where there is none, or it is damaged."""
    try:
        about = path.stat()
        return _record(path, about.st_mtime_ns, about.st_size)
    except (OSError, VideotuneError):
        return None


@lru_cache(maxsize=64)
def _record(path: Path, changed: int, size: int) -> Any:
    """A run's file as it is since ``changed``."""
    return read_record(path, partial=True)


def read_live(folder: Path) -> Run:
    """The run as the report's sections take it, from what is in memory."""
    path = folder / "journal.jsonl"
    found = {field: remembered(folder / name) for field, name in FILES.items()}
    events, steps = follow(folder, found["check"])
    found |= {"written": path.stat().st_mtime if path.is_file() else None, "life": life(folder)}
    return Run(folder=folder, journal=events, steps=steps, notes=(), read=time.time(), **found)


@dataclass(frozen=True)
class RunProgress:
    """How far a run is: steps done of all, seconds left at the pace of the last steps (None: not known), the last error."""

    done: int
    total: int | None
    left: float | None
    throughput: float | None
    loss: float | None


def progress(run: Run) -> RunProgress:
    """How far the run is and how long it will take on."""
    last = run.steps.recent
    total = (run.config or {}).get("steps") or (run.plan or {}).get("steps")
    if not last:
        return RunProgress(0, total, None, None, None)
    done = run.steps.last
    spent = [sum(one["seconds"].values()) for one in last]
    throughput = sum(spent) / len(spent) if any(spent) else None
    left = throughput * (total - done) if throughput and total else None
    losses = [one["mse"] for one in last if one["mse"] is not None]
    return RunProgress(
        done, total, left, throughput, sum(losses) / len(losses) if losses else None
    )
