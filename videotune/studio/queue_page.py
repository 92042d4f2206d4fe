"""The page Queue, and the one queue of all projects, into which other pages put what needs the card."""

import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

from fastapi import APIRouter, Response
from filelock import FileLock, Timeout

from videotune.errors import VideotuneError
from videotune.files import life, read_json, write_json
from videotune.queue import entries as queued
from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.queue.sweep import combinations
from videotune.reporter.read import points
from videotune.studio import form, gpu, header, projects
from videotune.studio.projects import Project, inside
from videotune.studio.status import progress, read_live
from videotune.studio.web import In, PageContext, PostedForm, Regions, html, page, say
from videotune.text import duration

routes = APIRouter()
QUEUE = ".queue"
"""The folder of the queue, below that of the projects; hidden, so it is no project."""

TWICE = 3.0
"""Seconds within which a second click on Start means the run of the first."""

PAUSE = 5.0
"""Seconds from the start of a worker to that of the next, so that one that cannot work is not started all the time."""

_one_at_a_time = RLock()


def home(root: Path) -> Path:
    """The queue's folder."""
    (root / QUEUE).mkdir(exist_ok=True)
    return root / QUEUE


def entry_name(project: Project, run: str) -> str:
    """What the queue calls the training of a run; other commands about the run have its name and ``--KIND-NUMBER``."""
    return f"{project.name}--{run}"


def of(root: Path, project: Project, run: str = "") -> list[QueueEntry]:
    """What the queue holds of a project, or of one run of it: the training and all else."""
    stem = entry_name(project, run)
    found = queued.entries(home(root))
    return [
        one
        for one in found
        if one.name == stem or one.name.startswith(f"{stem}--" if run else stem)
    ]


def entry_of(root: Path, project: Project, run: str) -> QueueEntry | None:
    """The entry that trains a run; None where it was never queued."""
    return next(
        (one for one in of(root, project, run) if one.name == entry_name(project, run)), None
    )


def run_job(root: Path, project: Project, run: str) -> QueuedJob | None:
    """The last training process of a run: the queue's, or one that an earlier version started in the project."""
    entry = entry_of(root, project, run)
    return entry.job if entry and entry.job else jobs.latest(project.folder, "train", run)


def jobs_about(root: Path, project: Project, run: str, kind: str) -> list[QueuedJob]:
    """The processes of a kind (sample, export …) about a run, the last one first."""
    stem = f"{entry_name(project, run)}--{kind}-"
    return [job for job in jobs.all_jobs(home(root), kind) if job.about.startswith(stem)]


def run_folder(project: Project, run: str) -> Path:
    """The folder of a project's run; VideotuneError for a name that is none."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", run):
        raise VideotuneError(f"{run!r} is not a name for a run: use letters, digits, - and _")
    return inside(project.folder, f"runs/{run}")


def submit(
    root: Path,
    project: Project,
    run: str,
    words: Sequence[str],
    kind: str = "",
    config: Mapping[str, Any] | None = None,
) -> str:
    """Queue a command about a run, and see to it that a worker is there; returns the entry's name.

    ``kind``: of a command other than the run's training, which is numbered. ``config``: of a new training; its file takes
    the place of "{config}" in ``words``. Without either the run's training waits again, by these words.
    """
    queue = home(root)
    name = entry_name(project, run)
    folder = run_folder(project, run)
    with _one_at_a_time:
        known = {one.name: one for one in of(root, project, run)}
        if kind:
            name = next(new for n in count(1) if (new := f"{name}--{kind}-{n}") not in known)
        if name in known and known[name].state in ("waiting", "running", "paused"):
            raise VideotuneError(f"{run} is {known[name].state} already")
        if name in known and config is None:
            queued.requeue(queue, name, words)
        else:
            if name in known:
                queued.remove(queue, name)
            words = [
                str(queue / f"{name}.json") if word == "{config}" else word for word in words
            ]
            queued.add(queue, name, config or {}, folder, words=words)
        ensure_worker(root)
    return name


def begin(
    root: Path, project: Project, title: str = "", keys: Mapping[str, Any] | None = None
) -> str:
    """Queue a new run of the project's settings, or of ``keys``; returns its name: ``title`` in plain letters, or run-N."""
    with _one_at_a_time:
        own = of(root, project)
        rows = projects.datasets(project)
        if not title and (
            late := [
                one for one in own if one.added > time.time() - TWICE and one.state == "waiting"
            ]
        ):
            return late[-1].run.name
        if not rows:
            raise VideotuneError("there are no clips yet: add some on the page Data")
        taken = {one.run.name for one in own} | {
            path.name for path in (project.folder / "runs").glob("*")
        }
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        run = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.")[:60]
        run = run or next(new for n in count(1) if (new := f"run-{n}") not in taken)
        if (run_folder(project, run) / "config.json").exists():
            raise VideotuneError(
                f"there is a run {run} already: give another name, or resume that one"
            )
        config = {**(projects.draft(project) if keys is None else keys), "datasets": rows}
        words = [
            "train",
            "--preset",
            project.preset,
            "--config",
            "{config}",
            "--out",
            str(run_folder(project, run)),
        ]
        submit(root, project, run, words + projects.skips(project), config=config)
        return run


def ensure_worker(root: Path) -> None:
    """Start the worker where something waits and none is at work; it ends by itself, and outlives the server."""
    queue = home(root)
    if not any(one.state == "waiting" for one in queued.entries(queue)):
        return
    with _one_at_a_time:
        last = jobs.latest(queue, "queue")
        if last is not None and (last.running or time.time() - last.started < PAUSE):
            return
        try:
            with FileLock(queue / ".lock").acquire(timeout=0):
                numbers = ",".join(str(card.index) for card in gpu.cards())
        except Timeout:  # one that was started in a terminal
            return
        gpus = ["--gpus", numbers] if "," in numbers else []
        jobs.restart(queue, "queue", ["queue", "run", "--queue", str(queue), *gpus])


def sweep(root: Path, project: Project, vary: Mapping[str, str]) -> str:
    """Queue a run for every combination of values; ``vary``: of each key its values, with commas between them.

    Raises VideotuneError, before anything is queued, where a value cannot be.
    """
    combined = combinations([f"{key}={values}" for key, values in vary.items()])
    drafts = []
    for values in combined:
        drafts.append(projects.draft(project))
        for key, value in values.items():
            drafts[-1] = form.put(drafts[-1], key, value, project.preset)
    if len(combined) < 2:
        raise VideotuneError("give at least two values, with a comma between them")
    (folder := project.folder / ".studio" / "sweeps").mkdir(parents=True, exist_ok=True)
    name = next(
        new for n in count(1) if not (folder / f"{(new := f'sweep-{n}')}.json").exists()
    )
    runs = {
        begin(root, project, f"{name}.{n}", keys): combined[n - 1]
        for n, keys in enumerate(drafts, 1)
    }
    write_json(folder / f"{name}.json", {"runs": runs})
    return name


def board(asked: PageContext) -> str:
    """What runs, waits and has ended, in all projects; sweeps as tables of their runs."""
    ensure_worker(asked.root)
    titles = {one.name: one.title for one in projects.projects(asked.root)}
    sweeps = {
        path: read_json(path)["runs"] for path in asked.root.glob("[!.]*/.studio/sweeps/*.json")
    }
    tools = {
        "life": life,
        "best": best,
        "far": lambda run: progress(read_live(run)),
        "duration": duration,
    }
    found = queued.entries(home(asked.root))
    return html(
        "queue_board",
        entries=found,
        cards=gpu.cards(),
        sweeps=sweeps,
        titles=titles,
        card=queued.CARD,
        **tools,
    )


def best(run: Path) -> float | None:
    """The lowest validation loss of a run after step 0, relative to the base model's; None where none was measured."""
    journal = run / "journal.jsonl"
    return _best(run, journal.stat().st_size) if journal.is_file() else None


@lru_cache(maxsize=1024)
def _best(run: Path, size: int) -> float | None:
    curve = points(read_live(run).validations, "held_out", "normalised")
    return min((loss for step, loss in curve if step), default=None)


REGIONS: Regions = {"board": board}


@routes.get("/queue")
def show(asked: In) -> Response:
    """All that runs and waits."""
    return page(asked, "queue", {**header.REGIONS, **REGIONS}, "Queue")


def _job(act: Callable[[QueuedJob], bool]) -> Callable[[Path, str], object]:
    def of_entry(queue: Path, name: str) -> None:
        if (job := queued.named(queue, name).job) is None or not act(job):
            raise VideotuneError(f"{name} is not running")

    return of_entry


def _remove(queue: Path, name: str) -> None:
    if queued.named(queue, name).state in ("running", "paused"):
        raise VideotuneError(f"{name} is running: stop it first")
    queued.remove(queue, name)


ACTS: Mapping[str, tuple[Callable[[Path, str], object], str]] = {
    "stop": (queued.hold, "Stopping: it saves first"),
    "pause": (_job(jobs.pause), "Paused; it keeps its memory on the card"),
    "continue": (_job(jobs.unpause), "Continues"),
    "retry": (queued.requeue, "Queued again"),
    "remove": (_remove, "Removed from the queue"),
}


@routes.post("/queue/{act}")
def change(act: str, asked: In, words: PostedForm) -> Response:
    """Stop, pause, continue, retry or remove an entry; or put those that wait in the order of their names."""
    if act == "order":
        queued.reorder(home(asked.root), words.all("name"))
        return say()
    if act not in ACTS:
        raise VideotuneError(f"the queue cannot {act[:40]}")
    ACTS[act][0](home(asked.root), words["name"])
    ensure_worker(asked.root)
    return say(ACTS[act][1])


@routes.post("/p/{project}/sweep")
def start_sweep(asked: In, words: PostedForm) -> Response:
    """Queue a run for every combination of the values."""
    pairs = zip(words.all("key"), words.all("values"), strict=False)
    name = sweep(
        asked.root, asked.home, {key: values for key, values in pairs if key and values.strip()}
    )
    return say(f"{name} is queued", go="/queue")
