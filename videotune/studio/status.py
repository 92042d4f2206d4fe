"""The state of a run while it trains, from its journal; only new lines are read."""

import re
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from threading import Lock
from typing import Any

from videotune.errors import VideotuneError
from videotune.queue.jobs import QueuedJob
from videotune.reporter.progress import RunProgress, progress
from videotune.reporter.ranking import doubt_on_found_clips
from videotune.reporter.read import FILES, Run
from videotune.runs.run_life import life
from videotune.runs.schemas import parse_line, read_record
from videotune.runs.step_sums import Curve, Steps, regularization

MAX_RECORD_BYTES = 64_000_000
"""Size limit of a JSON file of a run; a check of many clips has some MB."""

MAX_LINE_BYTES = 4_000_000
"""Size limit of a line of a journal."""

LARGEST_STEP = 2**32 - 1

MAX_OPEN_RUNS = 8
"""Runs whose journals are kept in memory."""


@dataclass
class JournalReader:
    """A journal as far as it was read."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    """All records but the steps."""

    steps: Steps = field(default_factory=Steps)

    curves: dict[str, Curve] = field(default_factory=dict)
    """Per-step curves that ``steps`` does not keep: ``rate NAME`` and ``seconds``."""

    offset: int = 0
    """The byte at which the next reading starts."""

    inode: int = 0
    """Identifies the file, since a resumed run replaces its journal."""

    lock: Lock = field(default_factory=Lock)

    def begin(self, inode: int, check: Mapping[str, Any] | None) -> None:
        """Start over at the beginning of the file."""
        self.events = []
        self.steps = Steps(regularization(check))
        self.offset = 0
        self.inode = inode
        self.curves = {}

    def read_on(self, path: Path) -> None:
        """Read the added lines; an incomplete last line waits for the next reading."""
        with path.open("rb") as file:
            file.seek(self.offset)
            while line := file.readline(MAX_LINE_BYTES):
                is_cut = len(line) == MAX_LINE_BYTES
                if not line.endswith(b"\n") and not is_cut:
                    break

                self.offset += len(line)
                with suppress(ValueError):  # the report lists damaged lines
                    self.add(parse_line(line))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record: a step to the sums and curves, any other to the events."""
        if record["kind"] != "step":
            self.events.append(record)
            return

        self.steps.add(record)
        values = {f"rate {name}": rate for name, rate in record["lr"].items()}
        values["seconds"] = sum(record["seconds"].values())
        for name, value in values.items():
            curve_steps, curve_values = self.curves.setdefault(
                name, (array("I"), array("d"))
            )
            curve_steps.append(record["step"])
            curve_values.append(value)


@lru_cache(maxsize=MAX_OPEN_RUNS)
def _reader(run: Path) -> JournalReader:
    """Return the reader of a run's journal, kept between calls."""
    return JournalReader()


def read_journal(
    run: Path, check: Mapping[str, Any] | None = None
) -> tuple[tuple[Mapping[str, Any], ...], Steps]:
    """Return the events and steps so far, reading only what was added since the last
    call.

    A journal that was replaced, as a resume does, is read from its beginning.
    """
    reader = _reader(run)
    path = run / "journal.jsonl"

    with reader.lock:
        try:
            file_stat = path.stat()
        except OSError:
            reader.begin(0, check)
            return (), reader.steps
        if not S_ISREG(file_stat.st_mode):  # a pipe would be waited for
            reader.begin(0, check)
            return (), reader.steps

        is_replaced = (
            file_stat.st_ino != reader.inode or file_stat.st_size < reader.offset
        )
        if is_replaced:
            reader.begin(file_stat.st_ino, check)
        reader.read_on(path)

        # A copy, since a page may render it while another request reads on.
        return tuple(reader.events), deepcopy(reader.steps)


def curves(run: Path) -> dict[str, Curve]:
    """Return learning rates and seconds per step, as far as ``read_journal`` has read."""
    reader = _reader(run)
    with reader.lock:
        return deepcopy(reader.curves)


def read_cached(path: Path) -> Any:
    """Return a file of a run, read again only after a change; None if missing, damaged
    or too large.
    """
    try:
        file_stat = path.stat()
        if file_stat.st_size > MAX_RECORD_BYTES:
            return None
        return _record(path, file_stat.st_mtime_ns, file_stat.st_size)
    except (OSError, VideotuneError):
        return None


@lru_cache(maxsize=64)
def _record(path: Path, changed: int, size: int) -> Any:
    """Return a run's file as of ``changed``."""
    return read_record(path, partial=True)


def read_live(folder: Path) -> Run:
    """Return the run in the form that the report's sections take, from what is in
    memory.
    """
    journal_path = folder / "journal.jsonl"
    records = {
        field_name: read_cached(folder / file) for field_name, file in FILES.items()
    }
    events, steps = read_journal(folder, records["check"])

    return Run(
        folder=folder,
        journal=events,
        steps=steps,
        notes=(),
        read=time.time(),
        written=journal_path.stat().st_mtime if journal_path.is_file() else None,
        life=life(folder),
        **records,
    )


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints of a run with their steps, in order."""
    steps = []
    for marker in run.glob("checkpoints/step-*/COMPLETE"):
        step = marker.parent.name.partition("-")[2]
        if re.fullmatch(r"[0-9]{1,10}", step) and int(step) <= LARGEST_STEP:
            steps.append((int(step), marker.parent))
    return sorted(steps)


def process_progress(run: Run, job: QueuedJob | None) -> RunProgress:
    """Return how far the present process of a run is.

    A resumed run begins at its newest checkpoint, or at the one that it is to go back to.
    Until it has removed the later steps from the journal, they are those of the process
    before it.
    """
    journal_progress = progress(run)
    if job is None or not job.is_running or (run.written or 0) >= job.started:
        return journal_progress

    saved_step = max((step for step, _ in checkpoints(run.folder)), default=0)
    first_step = _number_in(job.arguments, r"--from", r"(\d+)")
    steps = _number_in(job.arguments, r"--set", r"steps=(\d+)")
    return RunProgress(
        done=min(saved_step, journal_progress.done)
        if first_step is None
        else first_step,
        total=journal_progress.total if steps is None else steps,
        left=None,
        throughput=None,
        loss=None,
    )


def _number_in(arguments: Sequence[str], option: str, pattern: str) -> int | None:
    """Return the number in a value of an option, by a pattern with one group; None if no
    value matches.
    """
    for name, value in pairwise(arguments):
        match = re.fullmatch(pattern, value)
        if name == option and match is not None:
            return int(match[1])
    return None


def best_validation_loss(run: Path) -> float | None:
    """Return the lowest validation loss after step 0, relative to the first one."""
    journal = run / "journal.jsonl"
    if not journal.is_file():
        return None
    return _best_validation_loss(run, journal.stat().st_size)


@lru_cache(maxsize=1024)
def _best_validation_loss(run: Path, journal_size: int) -> float | None:
    curve = read_live(run).held_out_losses
    return min((loss for step, loss in curve if step), default=None)


def doubt_on_sweep(runs: Sequence[Path]) -> str:
    """Return why the runs of a sweep do not differ by their settings alone; empty if they
    do.
    """
    begun = []
    for run in runs:
        check = run / "check.json"
        if check.is_file():
            begun.append((run, check.stat().st_mtime_ns))
    return _doubt_on_sweep(tuple(begun))


@lru_cache(maxsize=64)
def _doubt_on_sweep(checks: tuple[tuple[Path, int], ...]) -> str:
    return doubt_on_found_clips([read_live(run) for run, _ in checks])
