"""The queue: a folder of configs, each a training that waits, runs or has ended.

``queue.json`` holds the settings of each entry, ``jobs/`` the processes that ran it.
All state is on disk, so a worker that is killed can be replaced by another.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from filelock import FileLock
from typing_extensions import TypedDict

from videotune.errors import VideotuneError
from videotune.files import Count, Moment, PathText, read_typed, write_json
from videotune.queue import jobs
from videotune.queue.jobs import QueuedJob

EntryState = Literal["waiting", "running", "paused", "done", "failed", "stopped"]

CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
LIST_FILE = "queue.json"
LIST_LOCK = ".list-lock"

MAX_TRIES = 2
"""Failures in a row after which the queue gives up on a training."""

MAX_LIST_BYTES = 32_000_000
"""Size limit of ``queue.json``."""

POLL_SECONDS = 0.5

MAX_CARDS = 1024
"""Largest number of GPUs of a training."""

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
NAME_PATTERN = re.compile(r"[\w][\w.,=+-]{0,149}")


class EntryRecord(TypedDict, total=False):
    """The settings of an entry in ``queue.json``."""

    run: PathText | None
    priority: Annotated[int, Interval(ge=-(2**53), le=2**53)]
    added: Moment
    """Its place in the order; another order and another command change it."""

    first_added: Moment
    """When it was added, whatever its place is now."""

    skips: str | None
    words: list[str]

    turn: Count
    """How often it was queued again; a process belongs to the turn that started it."""

    held: bool

    cards: Annotated[int, Interval(ge=1, le=MAX_CARDS)]

    overtaken: Count
    """How often a later entry has started while this one waited for several GPUs."""

    refused: str
    """Why a worker could not start it; empty if it can."""


@dataclass(frozen=True)
class QueueEntry:
    """An entry of the queue: a training or another command, and its state."""

    name: str
    config: Path
    run: Path

    priority: int
    """The highest priority runs first."""

    added: float
    """Among equal priorities, the entry that was added first runs first."""

    first_added: float
    """When it was added, in seconds since 1970, whatever its place is now."""

    skips: str | None
    """The value of ``train --allow-skips``."""

    state: EntryState

    tries: int
    """Failures in a row."""

    job: QueuedJob | None
    """Its last process; None if it never started."""

    arguments: tuple[str, ...] = ()
    """The command; empty for a plain training."""

    is_fresh: bool = True
    """Whether no process has started since the entry was last queued."""

    is_held: bool = False
    """Whether the user has stopped it."""

    turn: int = 0
    """How often it was queued again."""

    cards: int = 1
    """How many GPUs it asks for, each with a process of its own."""

    overtaken: int = 0
    """How often a later entry has started while this one waited for its GPUs."""

    refused: str = ""
    """Why the last worker could not start it; empty if it could."""

    @property
    def kind(self) -> str:
        """The command that it runs."""
        return self.arguments[0] if self.arguments else "train"

    def to_json(self) -> dict[str, Any]:
        """Return the entry as ``queue ls --json`` prints it."""
        has_failed = self.state == "waiting" and self.tries > 0
        has_ended = self.state in ("failed", "stopped") or has_failed
        reason = self.refused or None
        if reason is None and self.job is not None and has_ended:
            reason = jobs.describe_outcome(self.job)

        return {
            "name": self.name,
            "state": self.state,
            "priority": self.priority,
            "run": str(self.run),
            "config": str(self.config),
            "tries": self.tries,
            "cards": self.cards,
            "card": None if self.job is None else self.job.env.get(GPU_VARIABLE),
            "why": reason,
        }


def entries(queue: Path) -> list[QueueEntry]:
    """Return the entries in the order in which they run; empty if there is no such
    folder.

    Raises:
        VideotuneError: if two configs have the same name, or a name is not printable.
    """
    records = _read_records(queue)
    all_jobs = jobs.all_jobs(queue)
    files = _config_files(queue)
    _check_names(files)

    found_entries = []
    for path in files:
        entry_jobs = [job for job in all_jobs if job.about == path.stem]
        found_entries.append(
            _entry(queue, path, records.get(path.stem, {}), entry_jobs)
        )
    return sorted(
        found_entries, key=lambda entry: (-entry.priority, entry.added, entry.name)
    )


def _config_files(queue: Path) -> list[Path]:
    return [
        path
        for path in queue.glob("[!.]*")
        if path.suffix in CONFIG_SUFFIXES and path.name != LIST_FILE and path.is_file()
    ]


def _check_names(files: Sequence[Path]) -> None:
    names = [path.stem for path in files]
    for path in files:
        if not path.stem.isprintable() or names.count(path.stem) > 1:
            raise VideotuneError(
                f"{path}: each config of a queue needs a unique, printable name. Rename it."
            )


def _entry(
    queue: Path, path: Path, record: Mapping[str, Any], entry_jobs: Sequence[QueuedJob]
) -> QueueEntry:
    """Build an entry.

    Args:
        queue: folder of the queue.
        path: config of the entry.
        record: its settings in ``queue.json``.
        entry_jobs: its jobs, newest first.
    """
    run = Path(record.get("run") or queue / "runs" / path.stem).absolute()
    arguments = tuple(record.get("words") or ())
    is_held = bool(record.get("held"))
    turn = record.get("turn", 0)
    refused = record.get("refused", "")
    # A process that still runs decides, whenever it was started.
    entry_jobs = sorted(entry_jobs, key=lambda job: not job.is_running)
    turn_jobs = [job for job in entry_jobs if job.turn == turn or job.is_running]
    tries = _failures_in_a_row(turn_jobs)
    state = _state(turn_jobs, tries, is_held, _max_tries(arguments, run))
    if refused and (state == "waiting" or (state == "stopped" and not is_held)):
        state = "failed"

    added = float(record.get("added") or path.stat().st_mtime)
    return QueueEntry(
        name=path.stem,
        config=path,
        run=run,
        priority=record.get("priority") or 0,
        added=added,
        first_added=float(record.get("first_added") or added),
        skips=record.get("skips"),
        state=state,
        tries=tries,
        job=entry_jobs[0] if entry_jobs else None,
        arguments=arguments,
        is_fresh=not turn_jobs,
        is_held=is_held,
        turn=turn,
        cards=record.get("cards", 1),
        overtaken=record.get("overtaken", 0),
        refused=refused,
    )


def _failures_in_a_row(entry_jobs: Sequence[QueuedJob]) -> int:
    """Return how many of the newest jobs have failed with an exit code."""
    failures = 0
    for job in entry_jobs:
        if job.code is None or job.state in ("done", "stopped"):
            break
        failures += 1
    return failures


def _max_tries(arguments: Sequence[str], run: Path) -> int:
    """Return how often an entry is tried: a command other than a started training only
    once.
    """
    has_started_run = "--resume" not in arguments and (run / "config.json").is_file()
    return MAX_TRIES if not arguments or has_started_run else 1


def _state(
    turn_jobs: Sequence[QueuedJob], tries: int, is_held: bool, max_tries: int
) -> EntryState:
    if turn_jobs:
        job_state = turn_jobs[0].state
        # A dead or failed job is tried again.
        if job_state != "dead" and job_state != "failed":
            return job_state

    if tries >= max_tries:
        return "failed"
    return "stopped" if is_held else "waiting"


def _read_records(queue: Path) -> dict[str, Any]:
    """Return the settings of all entries; VideotuneError if the file is damaged."""
    path = queue / LIST_FILE
    if not path.is_file():
        return {}
    try:
        return dict(read_typed(path, dict[str, EntryRecord], MAX_LIST_BYTES))
    except ValueError as error:
        raise VideotuneError(
            f"{path} is damaged ({error}). Fix it, or delete it to queue everything again."
        ) from error


def add(
    queue: Path,
    name: str,
    config: Mapping[str, Any],
    run: Path | None = None,
    priority: int = 0,
    skips: str | None = None,
    arguments: Sequence[str] = (),
    cards: int = 1,
) -> Path:
    """Add a config to the queue and return its file.

    Args:
        queue: folder of the queue; created if needed.
        name: name of the entry.
        config: the config.
        run: run folder; by default ``runs/NAME`` of the queue.
        priority: the highest runs first.
        skips: value of ``train --allow-skips``.
        arguments: the command to run, if it is not ``train --config``. More than one
            such command may be about the same run.
        cards: how many GPUs it asks for.

    Raises:
        VideotuneError: if the name is taken or not a valid file name, or if the run
            folder is that of another run, which would then be resumed.
    """
    if not NAME_PATTERN.fullmatch(name) or name == Path(LIST_FILE).stem:
        raise VideotuneError(
            f"--name {name!r}: use letters, digits and . , = + - _, at most 150 characters, "
            "and not queue"
        )

    queue.mkdir(parents=True, exist_ok=True)
    config_path = queue / f"{name}.json"
    with FileLock(queue / LIST_LOCK):
        if any((queue / f"{name}{suffix}").exists() for suffix in CONFIG_SUFFIXES):
            raise VideotuneError(
                f"{queue} already has an entry {name}. Use another --name, "
                f"or `videotune queue rm {name}`."
            )
        if not arguments:
            _refuse_used_folder(queue, (run or queue / "runs" / name).absolute())

        now = time.time()
        record: EntryRecord = {
            "run": str(run.absolute()) if run else None,
            "priority": priority,
            "added": now,
            "first_added": now,
            "skips": skips,
        }
        if arguments:
            record["words"] = list(arguments)
        if cards > 1:
            record["cards"] = cards
        write_json(queue / LIST_FILE, _read_records(queue) | {name: record})
        write_json(config_path, config)
    return config_path


def _refuse_used_folder(queue: Path, run: Path) -> None:
    is_used = (run / "config.json").is_file() or any(
        entry.run == run for entry in entries(queue)
    )
    if is_used:
        raise VideotuneError(
            f"{run} is the folder of another run. Use another --out, or delete that run."
        )


def find_entry(queue: Path, name: str) -> QueueEntry:
    """Return an entry by its name.

    Raises:
        VideotuneError: if there is none; the message lists the entries.
    """
    entry_by_name = {entry.name: entry for entry in entries(queue)}
    if name not in entry_by_name:
        names = ", ".join(entry_by_name) or "nothing"
        raise VideotuneError(f"{queue} has no entry {name}; it holds {names}")
    return entry_by_name[name]


def remove(queue: Path, name: str) -> Path:
    """Remove an entry and return its run folder, which stays.

    A running entry is stopped first; this waits until it has saved.
    """
    entry = find_entry(queue, name)
    is_asked = False  # a second signal would end it before it has saved
    while entry.job is not None and entry.job.is_running:
        is_asked = is_asked or jobs.stop(entry.job)
        time.sleep(POLL_SECONDS)
        entry = find_entry(queue, name)

    with FileLock(queue / LIST_LOCK):
        records = _read_records(queue)
        records.pop(name, None)
        write_json(queue / LIST_FILE, records)
        entry.config.unlink(missing_ok=True)

    for job in jobs.all_jobs(queue):
        if job.about == name:
            shutil.rmtree(job.folder)
    return entry.run


def change_records(queue: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change settings of some entries in ``queue.json``."""
    with FileLock(queue / LIST_LOCK):
        records = _read_records(queue)
        for name, change in changes.items():
            records[name] = {**records.get(name, {}), **change}
        write_json(queue / LIST_FILE, records)


def requeue(queue: Path, name: str, arguments: Sequence[str] | None = None) -> None:
    """Queue an ended entry again; its failures are counted from zero.

    Args:
        queue: folder of the queue.
        name: name of the entry.
        arguments: the new command; None for the same one.

    Raises:
        VideotuneError: if it is running.
    """
    entry = find_entry(queue, name)
    if entry.state in ("running", "paused"):
        raise VideotuneError(f"{name} is running: stop it first")

    new_arguments = entry.arguments if arguments is None else arguments
    change = {
        "turn": entry.turn + 1,
        "held": False,
        "overtaken": 0,
        "refused": "",
        "words": list(new_arguments),
    }
    if arguments is not None:
        change["added"] = time.time()  # a new command goes after what waits
    change_records(queue, {name: change})


def hold(queue: Path, name: str) -> None:
    """Stop an entry, and keep it stopped for later workers too, until it is queued
    again.
    """
    entry = find_entry(queue, name)
    change_records(queue, {name: {"held": True}})
    if entry.job is not None and entry.job.is_running:
        jobs.stop(entry.job)


def reorder(queue: Path, names: Sequence[str]) -> None:
    """Run these entries in this order: exchange their priorities and times of adding."""
    entry_by_name = {entry.name: entry for entry in entries(queue)}
    ordered_names = [name for name in dict.fromkeys(names) if name in entry_by_name]
    ranks = sorted(
        (-entry_by_name[name].priority, entry_by_name[name].added)
        for name in ordered_names
    )

    changes = {}
    for position, name in enumerate(ordered_names):
        negative_priority, added = ranks[position]
        # The small offset keeps the order of entries that were added at the same time.
        changes[name] = {
            "priority": -negative_priority,
            "added": added + position / 1e5,
        }
    change_records(queue, changes)


def start(queue: Path, entry: QueueEntry, cards: Sequence[str] = ()) -> None:
    """Run an entry in a separate process, or one for each GPU that it asks for; a
    training that started before is resumed.

    Args:
        queue: folder of the queue.
        entry: the entry.
        cards: numbers of the GPUs; empty for no choice.
    """
    has_started_run = (entry.run / "config.json").is_file()
    is_training_to_resume = (
        has_started_run and not entry.is_fresh and entry.kind == "train"
    )
    if entry.arguments and not is_training_to_resume:
        arguments = list(entry.arguments)
    else:
        arguments = _train_arguments(entry, resume=has_started_run)

    if entry.overtaken:
        change_records(queue, {entry.name: {"overtaken": 0}})
    jobs.start(
        queue,
        entry.kind,
        arguments,
        entry.name,
        env={GPU_VARIABLE: ",".join(cards)} if cards else {},
        turn=entry.turn,
        processes=entry.cards,
    )


def _train_arguments(entry: QueueEntry, *, resume: bool) -> list[str]:
    arguments = ["train", "--out", str(entry.run)]
    if resume:
        return [*arguments, "--resume"]

    arguments += ["--config", str(entry.config.absolute())]
    if entry.skips:
        arguments += ["--allow-skips", entry.skips]
    return arguments
