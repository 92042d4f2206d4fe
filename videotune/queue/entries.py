"""The queue: a folder of configs, each a training that waits, runs or has ended.

``queue.json`` holds what was asked of each beside its config, ``jobs/`` what became of it: a worker that is killed leaves
nothing that the next one does not read there.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from videotune.errors import DONE, FAILED, INTERRUPTED, VideotuneError
from videotune.files import checked, read_json, write_json
from videotune.queue import jobs
from videotune.queue.jobs import QueuedJob

EntryState = Literal["waiting", "running", "paused", "done", "failed", "stopped"]

CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
LIST_FILE = "queue.json"
MAX_TRIES = 2
"""Times in a row that a training may fail before the queue leaves it."""

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
NAME_PATTERN = re.compile(r"[\w][\w.,=+-]{0,149}")


class EntryRecord(TypedDict, total=False):
    """What ``queue.json`` says of an entry beside its config."""

    run: str | None
    priority: int
    added: float
    skips: str | None
    words: list[str]
    since: float
    held: bool


@dataclass(frozen=True)
class QueueEntry:
    """A training, or another command, of the queue: its config file, its run folder, and how it stands.

    The highest ``priority`` runs first, then the one that was added first. ``tries``: how often it failed in a row;
    ``job``: its last process, None where it has not begun; ``words``: the command, empty for a plain training; ``fresh``:
    no process has begun since it was queued last; ``held``: a person has stopped it.
    """

    name: str
    config: Path
    run: Path
    priority: int
    added: float
    skips: str | None
    state: EntryState
    tries: int
    job: QueuedJob | None
    arguments: tuple[str, ...] = ()
    is_fresh: bool = True
    is_held: bool = False

    @property
    def kind(self) -> str:
        """The command that it runs."""
        return self.arguments[0] if self.arguments else "train"

    def to_json(self) -> dict[str, Any]:
        """What ``queue ls --json`` prints of it."""
        ended = self.state in ("failed", "stopped") or (
            self.state == "waiting" and self.tries > 0
        )
        why = jobs.describe_outcome(self.job) if self.job is not None and ended else None
        card = None if self.job is None else self.job.env.get(GPU_VARIABLE)
        facts = {
            "name": self.name,
            "state": self.state,
            "priority": self.priority,
            "run": str(self.run),
        }
        return facts | {
            "config": str(self.config),
            "tries": self.tries,
            "card": card,
            "why": why,
        }


def entries(queue: Path) -> list[QueueEntry]:
    """The trainings of a queue in the order in which they run; none where there is no such folder.

    Raises VideotuneError for a config whose name another config has as well, or that cannot be printed.
    """
    rows = _rows(queue)
    ran = jobs.all_jobs(queue)
    files = [
        one
        for one in queue.glob("[!.]*")
        if one.suffix in CONFIG_SUFFIXES and one.name != LIST_FILE and one.is_file()
    ]
    names = [path.stem for path in files]
    if wrong := [
        path for path in files if not path.stem.isprintable() or names.count(path.stem) > 1
    ]:
        raise VideotuneError(
            f"{wrong[0]}: rename it: each config of a queue needs a name of its own, in letters"
        )
    found = [
        _entry(queue, path, rows.get(path.stem, {}), [j for j in ran if j.about == path.stem])
        for path in files
    ]
    return sorted(found, key=lambda one: (-one.priority, one.added, one.name))


def _entry(
    queue: Path, path: Path, row: Mapping[str, Any], ran: Sequence[QueuedJob]
) -> QueueEntry:
    run = Path(row.get("run") or queue / "runs" / path.stem).absolute()
    words = tuple(row.get("words") or ())
    since = row.get("since") or 0.0
    now = [job for job in ran if job.started >= since]
    tries = next(
        (
            i
            for i, job in enumerate(now)
            if job.code is None or job.state in ("done", "stopped")
        ),
        len(now),
    )
    again = not words or (
        "--resume" not in words and (run / "config.json").is_file()
    )  # it got as far as to begin
    state = cast(EntryState, "waiting" if tries < (MAX_TRIES if again else 1) else "failed")
    if now and now[0].state in ("running", "paused", "done", "stopped"):
        state = now[0].state
    if row.get("held") and state == "waiting":
        state = "stopped"
    added = float(row.get("added") or path.stat().st_mtime)
    last = ran[0] if ran else None
    asked = run, row.get("priority") or 0, added, row.get("skips")
    return QueueEntry(
        path.stem, path, *asked, state, tries, last, words, not now, bool(row.get("held"))
    )


def _rows(queue: Path) -> dict[str, Any]:
    """What ``queue.json`` says of each; VideotuneError where it is damaged."""
    listed = queue / LIST_FILE
    try:
        return dict(
            checked(dict[str, EntryRecord], read_json(listed) if listed.is_file() else {})
        )
    except ValueError as error:
        raise VideotuneError(
            f"{listed} is damaged ({error}): mend it, or delete it to queue all anew"
        ) from error


def add(
    queue: Path,
    name: str,
    config: Mapping[str, Any],
    run: Path | None = None,
    priority: int = 0,
    skips: str | None = None,
    words: Sequence[str] = (),
) -> Path:
    """Put a config into the queue; returns its file. ``skips``: as ``train --allow-skips`` takes it.

    ``words``: the command to run for it, where that is not ``train --config``; several may be about one run.

    Raises VideotuneError where the name is taken, or is none for a file, and where the run folder is that of another run,
    which would be resumed in its place.
    """
    if not NAME_PATTERN.fullmatch(name) or name == Path(LIST_FILE).stem:
        raise VideotuneError(
            f"--name {name!r}: letters, digits and . , = + - _, at most 150, and not queue"
        )
    queue.mkdir(parents=True, exist_ok=True)
    with FileLock(queue / ".list-lock"):
        if any((queue / f"{name}{ending}").exists() for ending in CONFIG_SUFFIXES):
            raise VideotuneError(
                f"{queue} has an entry {name} already: another --name, or `videotune queue rm {name}`"
            )
        own = (run or queue / "runs" / name).absolute()
        if not words and (
            (own / "config.json").is_file() or any(one.run == own for one in entries(queue))
        ):
            raise VideotuneError(
                f"{own} is the folder of another run: give another --out, or delete that run"
            )
        row: EntryRecord = {
            "run": str(run.absolute()) if run else None,
            "priority": priority,
            "added": time.time(),
            "skips": skips,
        }
        row |= {"words": list(words)} if words else {}
        write_json(queue / LIST_FILE, _rows(queue) | {name: row})
        write_json(queue / f"{name}.json", config)
    return queue / f"{name}.json"


def find_entry(queue: Path, name: str) -> QueueEntry:
    """An entry by its name; VideotuneError that lists them where there is none."""
    found = {entry.name: entry for entry in entries(queue)}
    if name not in found:
        raise VideotuneError(
            f"{queue} has no entry {name}; it holds {', '.join(found) or 'nothing'}"
        )
    return found[name]


def remove(queue: Path, name: str) -> Path:
    """Stop an entry if it runs, wait until it has saved, and take its config out; returns its run folder, which stays."""
    while (entry := find_entry(queue, name)).job is not None and entry.job.is_running:
        jobs.stop(entry.job)
        time.sleep(0.5)
    with FileLock(queue / ".list-lock"):
        write_json(
            queue / LIST_FILE, {key: row for key, row in _rows(queue).items() if key != name}
        )
        entry.config.unlink(missing_ok=True)
    for job in jobs.all_jobs(queue):
        if job.about == name:
            shutil.rmtree(job.folder)
    return entry.run


def _change(queue: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change what ``queue.json`` says of some entries."""
    with FileLock(queue / ".list-lock"):
        rows = _rows(queue)
        write_json(
            queue / LIST_FILE,
            rows | {name: {**rows.get(name, {}), **row} for name, row in changes.items()},
        )


def requeue(queue: Path, name: str, words: Sequence[str] | None = None) -> None:
    """Let an entry that has ended wait again, by another command where ``words`` are given; its tries count anew.

    Raises VideotuneError while it runs.
    """
    if (entry := find_entry(queue, name)).state in ("running", "paused"):
        raise VideotuneError(f"{name} is running: stop it first")
    own = entry.arguments if words is None else words
    _change(
        queue,
        {name: {"since": round(time.time() - 1e-3, 3), "held": False, "words": list(own)}},
    )


def hold(queue: Path, name: str) -> None:
    """Let an entry stand as stopped until it is queued again, also for later workers; one that runs is asked to end."""
    entry = find_entry(queue, name)
    _change(queue, {name: {"held": True}})
    if entry.job is not None and entry.job.is_running:
        jobs.stop(entry.job)


def reorder(queue: Path, names: Sequence[str]) -> None:
    """Let these entries run in this order: they share their priorities and times anew."""
    found = {entry.name: entry for entry in entries(queue)}
    own = [found[name] for name in dict.fromkeys(names) if name in found]
    places = enumerate(sorted((-entry.priority, entry.added) for entry in own))
    rows = [
        {"priority": -first, "added": added + place / 1e5} for place, (first, added) in places
    ]
    _change(queue, dict(zip([entry.name for entry in own], rows, strict=True)))


def start(queue: Path, entry: QueueEntry, card: str | None) -> None:
    """Run an entry in a process of its own, on the card of this number; a training that began before is resumed."""
    begun = (entry.run / "config.json").is_file()
    how = ["--resume"] if begun else ["--config", str(entry.config.absolute())]
    skips = ["--allow-skips", entry.skips] if entry.skips and not begun else []
    words = ["train", "--out", str(entry.run), *how, *skips]
    if entry.arguments and (entry.is_fresh or entry.kind != "train" or not begun):
        words = list(entry.arguments)
    jobs.start(queue, entry.kind, words, entry.name, env={} if card is None else {GPU_VARIABLE: card})


def run_queue(
    queue: Path,
    cards: Sequence[str | None] = (None,),
    watch: bool = False,
    tell: Callable[[QueueEntry], Any] = print,
) -> int:
    """Train what waits, one training a card, until nothing waits (``watch``: and then wait for more); the exit code.

    What was stopped before this worker began is resumed. ``tell`` hears of each entry whose state changes. Ctrl-C asks the
    trainings to save and end, and waits for that; a worker that is killed leaves them at work, and the next one waits for
    them. Raises VideotuneError where another worker has the queue.
    """
    if not queue.is_dir():
        raise VideotuneError(f"{queue} is no queue: `videotune queue add` makes one")
    begun = time.time()
    told = dict[str, EntryState]()

    def news(entry: QueueEntry) -> None:
        if told.get(entry.name) != entry.state:
            told[entry.name] = entry.state
            tell(entry)

    with ExitStack() as held:
        try:
            held.enter_context(FileLock(queue / ".lock").acquire(timeout=0))
        except Timeout as error:
            raise VideotuneError(f"another `videotune queue run` works on {queue}") from error
        try:
            while _turn(queue, cards, begun, news) or watch:
                time.sleep(0.5)
        except KeyboardInterrupt:
            return _stop_all(queue)
    return FAILED if any(entry.state == "failed" for entry in entries(queue)) else DONE


def _turn(
    queue: Path, cards: Sequence[str | None], begun: float, tell: Callable[[QueueEntry], None]
) -> bool:
    """Start what there is a free card for; whether anything runs or waits."""
    found = entries(queue)
    for entry in found:
        tell(entry)
    running = [entry for entry in found if entry.state in ("running", "paused")]
    ready = [one for one in found if one.state == "waiting" or _ended_before(one, begun)]
    busy = [entry.job.env.get(GPU_VARIABLE) for entry in running if entry.job]
    free = [card for card in cards if card not in busy][: max(0, len(cards) - len(busy))]
    for entry, card in zip(ready, free, strict=False):
        start(queue, entry, card)
    return bool(running or ready)


def _ended_before(entry: QueueEntry, begun: float) -> bool:
    """Whether it was stopped before the worker began, and not by a person who wants it to stay so."""
    job = entry.job
    return (
        entry.state == "stopped"
        and not entry.is_held
        and job is not None
        and (job.ended or job.started) < begun
    )


def _stop_all(queue: Path) -> int:
    """Ask all trainings to save and end, and wait until they have."""
    while running := [
        entry.job for entry in entries(queue) if entry.job is not None and entry.job.is_running
    ]:
        for job in running:
            jobs.stop(job)
        time.sleep(0.5)
    return INTERRUPTED
