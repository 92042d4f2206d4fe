"""The page Queue, and the queue of all projects, to which other pages submit GPU work."""

import re
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Response
from filelock import FileLock, Timeout

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import entries as queued
from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.queue.sweep import combinations
from videotune.runs.run_life import life
from videotune.studio import gpu, header, projects, run_cards
from videotune.studio.field_errors import FieldError
from videotune.studio.form import fields, set_key
from videotune.studio.header import QUEUE_FOLDER
from videotune.studio.licences import refuse_open_licence
from videotune.studio.projects import Project, inside
from videotune.studio.start_questions import ask_before_start
from videotune.studio.status import (
    best_validation_loss,
    doubt_on_sweep,
    process_progress,
    read_live,
)
from videotune.studio.sweep_records import read_sweeps
from videotune.studio.web import (
    CurrentPage,
    PageContext,
    PostedForm,
    Regions,
    page_response,
    render,
    reply,
)
from videotune.text import time_left

routes = APIRouter()

DOUBLE_CLICK_SECONDS = 3.0
"""A second click on Start within this time means the run of the first."""

WORKER_RESTART_SECONDS = 5.0
"""Time between two starts of the worker, so that one that fails at once is not
restarted all the time.
"""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")

queue_lock = RLock()
"""Held from a look at the queue to the change that follows from it."""


def queue_folder(root: Path) -> Path:
    """Return the folder of the queue; create it if needed."""
    folder = root / QUEUE_FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def entry_name(project: Project, run: str) -> str:
    """Return the name that the entry of a run's training gets if it is free.

    A name is only a name: an entry belongs to the run whose folder it has.
    """
    return f"{project.name}--{run}"


def project_entries(root: Path, project: Project, run: str = "") -> list[QueueEntry]:
    """Return the entries of a project, or of one run of it: the training and all
    others.
    """
    if not (root / QUEUE_FOLDER).is_dir():
        return []  # nothing was ever queued; reading creates no folder

    runs = (project.folder / "runs").absolute()
    return [
        entry
        for entry in queued.entries(root / QUEUE_FOLDER)
        if entry.run.parent == runs and run in ("", entry.run.name)
    ]


def shown_entries(root: Path, project: Project, run: str = "") -> list[QueueEntry]:
    """Return the entries for a page; none if the queue's list is damaged, which the bar
    at the top of the page reports.
    """
    try:
        return project_entries(root, project, run)
    except (VideotuneError, OSError):
        return []


def training_entry(root: Path, project: Project, run: str) -> QueueEntry | None:
    """Return the entry that trains a run; None if it was never queued."""
    return _training(shown_entries(root, project, run))


def _training(entries: Sequence[QueueEntry]) -> QueueEntry | None:
    return next((entry for entry in entries if entry.kind == "train"), None)


def run_job(root: Path, project: Project, run: str) -> QueuedJob | None:
    """Return the last training process of a run.

    It is the queue's, or one that an earlier version started in the project.
    """
    entry = training_entry(root, project, run)
    if entry and entry.job:
        return entry.job
    return jobs.latest(project.folder, "train", run)


def run_folder(project: Project, run: str) -> Path:
    """Return the folder of a project's run; VideotuneError if the name is invalid."""
    if not RUN_NAME.fullmatch(run):
        raise VideotuneError(
            f"{run!r} is not a name for a run: use letters, digits, - and _"
        )
    return inside(project.folder, f"runs/{run}")


def submit(
    root: Path,
    project: Project,
    run: str,
    arguments: Sequence[str],
    kind: str = "",
    config: Mapping[str, Any] | None = None,
    cards: int = 1,
) -> str:
    """Queue a command about a run and make sure that a worker runs.

    Without ``kind`` and ``config``, the run's training is queued again with these
    arguments.

    Args:
        root: folder of the projects.
        project: the project.
        run: name of the run.
        arguments: the command; "{config}" stands for the path of the config's file.
        kind: kind of a command other than the training; its entries are numbered.
        config: config of a new training.
        cards: how many GPUs a new entry asks for.

    Returns:
        The name of the entry.

    Raises:
        VideotuneError: if the entry waits or runs already.
    """
    queue = queue_folder(root)
    folder = run_folder(project, run)
    with queue_lock:
        all_entries = queued.entries(queue)
        taken_names = {entry.name for entry in all_entries}
        entry = None
        if not kind:
            entry = _training(project_entries(root, project, run))
        if entry is not None and entry.state in ("waiting", "running", "paused"):
            raise VideotuneError(f"{run} is {entry.state} already")

        if entry is not None and config is None:
            queued.requeue(queue, entry.name, arguments)
            name = entry.name
        else:
            if entry is not None:
                queued.remove(queue, entry.name)
                taken_names.remove(entry.name)
            name = _new_entry_name(project, run, kind, taken_names)
            config_path = str(queue / f"{name}.json")
            arguments = [
                config_path if argument == "{config}" else argument
                for argument in arguments
            ]
            queued.add(
                queue, name, config or {}, folder, arguments=arguments, cards=cards
            )
        ensure_worker(root)
    return name


def _new_entry_name(
    project: Project, run: str, kind: str, taken_names: Collection[str]
) -> str:
    """Return a free name for an entry, as short as it can be."""
    name = entry_name(project, run)
    if kind:
        return _free_name(f"{name}--{kind}-", taken_names)
    return name if name not in taken_names else _free_name(f"{name}--", taken_names)


def _free_name(stem: str, taken_names: Collection[str]) -> str:
    """Return the stem with the first number, from 1, that gives a free name."""
    for number in count(1):
        name = f"{stem}{number}"
        if name not in taken_names:
            return name
    raise AssertionError("unreachable")


def queue_run(
    root: Path,
    project: Project,
    title: str = "",
    keys: Mapping[str, Any] | None = None,
    cards: int = 1,
) -> str:
    """Queue a new run.

    Args:
        root: folder of the projects.
        project: the project.
        title: title of the run; its name is the title in plain letters. Empty for
            run-N.
        keys: settings; None for the settings of the project.
        cards: how many GPUs it asks for.

    Returns:
        The name of the run.

    Raises:
        VideotuneError: if there are no clips, the name is taken, or the base model's
            licence is not accepted.
    """
    refuse_open_licence(project)
    with queue_lock:
        entries = project_entries(root, project)
        if not title:
            run = _run_of_first_click(entries)
            if run is not None:
                return run

        if project.damage:
            raise VideotuneError(project.damage)
        settings = projects.draft(project) if keys is None else keys
        datasets = projects.datasets(project, settings)
        if not datasets:
            raise VideotuneError("there are no clips yet: add some on the page Data")

        run = _run_name(project, title, entries)
        folder = run_folder(project, run)
        if (folder / "config.json").exists():
            raise FieldError(
                f"the run {run} already exists: use another name, or resume that run",
                "title",
            )

        if not project.has_model:
            raise VideotuneError("no model is chosen yet: choose one on the page Setup")
        preset_arguments = projects.preset_arguments(project)
        arguments = ["train", *preset_arguments, "--config", "{config}"]
        arguments += ["--out", str(folder), *projects.skip_arguments(project)]
        config = {**settings, "datasets": datasets}
        submit(root, project, run, arguments, config=config, cards=cards)
        return run


def _run_of_first_click(entries: Sequence[QueueEntry]) -> str | None:
    """Return the run that was queued a moment ago and still waits."""
    now = time.time()
    recent = [
        entry
        for entry in entries
        if entry.state == "waiting" and abs(now - entry.added) < DOUBLE_CLICK_SECONDS
    ]
    return recent[-1].run.name if recent else None


def _run_name(project: Project, title: str, entries: Sequence[QueueEntry]) -> str:
    """Return the title in plain letters, or the next free run-N."""
    ascii_title = (
        unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_title).strip("-.")[:60]
    if name:
        return name

    queued_names = {entry.run.name for entry in entries}
    existing_names = {path.name for path in (project.folder / "runs").glob("*")}
    return _free_name("run-", queued_names | existing_names)


def ensure_worker(root: Path) -> None:
    """Start a worker if an entry waits and none runs.

    The worker ends by itself, and survives the server.
    """
    queue = queue_folder(root)
    if not any(entry.state == "waiting" for entry in queued.entries(queue)):
        return

    with queue_lock:
        worker = jobs.latest(queue, "queue")
        if worker is not None:
            age = abs(time.time() - worker.started)  # the clock may have been set back
            is_recent = age < WORKER_RESTART_SECONDS
            if worker.is_running or is_recent:
                return

        try:
            with FileLock(queue / ".lock").acquire(timeout=0):
                gpu_indices = ",".join(str(card.index) for card in gpu.list_gpus())
        except Timeout:  # a worker that was started in a terminal
            return

        arguments = ["queue", "run", "--queue", str(queue)]
        if "," in gpu_indices:
            arguments += ["--gpus", gpu_indices]
        jobs.restart(queue, "queue", arguments)


def queue_sweep(
    root: Path,
    project: Project,
    vary: Mapping[str, str],
    check: Callable[[Mapping[str, Any]], object] = lambda config: None,
    cards: int = 1,
) -> str:
    """Queue a run for every combination of values and return the name of the sweep.

    Args:
        root: folder of the projects.
        project: the project.
        vary: comma-separated values of each key.
        check: called with each config; may raise VideotuneError.
        cards: how many GPUs each run asks for.

    Raises:
        VideotuneError: if a value is invalid; then nothing is queued.
    """
    value_sets = combinations([f"{key}={values}" for key, values in vary.items()])
    configs = [_config_with(project, values) for values in value_sets]
    for config in configs:
        check(config)
    if len(value_sets) < 2:
        raise VideotuneError("give at least two values, with a comma between them")

    folder = project.folder / ".studio" / "sweeps"
    folder.mkdir(parents=True, exist_ok=True)
    used_names = {path.stem for path in folder.glob("*.json")}
    # An imported project has the runs of its sweeps without their records.
    for path in (project.folder / "runs").glob("sweep-*"):
        used_names.add(path.name.partition(".")[0])
    name = _free_name("sweep-", used_names)

    values_by_run = {}
    for number, (config, values) in enumerate(zip(configs, value_sets, strict=True), 1):
        run = queue_run(root, project, f"{name}.{number}", config, cards)
        values_by_run[run] = values
    write_json(folder / f"{name}.json", {"runs": values_by_run})
    return name


def _config_with(project: Project, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the project with some keys set."""
    keys = projects.draft(project)
    for key, value in values.items():
        keys = set_key(keys, key, value, project.preset)
    return keys


def board(page: PageContext) -> str:
    """Render the entries of all projects, and the sweeps as tables of their runs."""
    ensure_worker(page.root)
    entries = queued.entries(queue_folder(page.root))
    sweeps, damaged_sweeps = read_sweeps(page.root)
    cards = gpu.list_gpus()
    running = [entry for entry in entries if entry.state in ("running", "paused")]
    by_card, elsewhere = run_cards.jobs_by_card(running, cards)
    return render(
        "queue_board",
        entries=entries,
        states=_states_by_run(entries),
        cards=cards,
        by_card=by_card,
        elsewhere=elsewhere,
        sweeps=sweeps,
        damaged_sweeps=damaged_sweeps,
        titles={
            project.name: project.title for project in projects.list_projects(page.root)
        },
        life=life,
        best=best_validation_loss,
        doubt_on_sweep=doubt_on_sweep,
        setting_names={field.key: field.name for field in fields()},
        far=lambda entry: process_progress(read_live(entry.run), entry.job),
        time_left=time_left,
    )


def _states_by_run(entries: Sequence[QueueEntry]) -> dict[Path, str]:
    """Return the state of each run: of its training, or else of another command."""
    states: dict[Path, str] = {}
    for entry in entries:
        if entry.kind == "train" or entry.run not in states:
            states[entry.run] = entry.state
    return states


REGIONS: Regions = {"board": board}


@routes.get("/queue")
def show(page: CurrentPage) -> Response:
    """Show the queue."""
    return page_response(page, "queue", header.REGIONS | REGIONS, "Queue")


def _pause(queue: Path, name: str) -> None:
    _signal_job(queue, name, jobs.pause)


def _continue(queue: Path, name: str) -> None:
    _signal_job(queue, name, jobs.unpause)


def _signal_job(queue: Path, name: str, signal: Callable[[QueuedJob], bool]) -> None:
    job = queued.find_entry(queue, name).job
    if job is None or not signal(job):
        raise VideotuneError(f"{name} is not running")


def _remove(queue: Path, name: str) -> None:
    if queued.find_entry(queue, name).state in ("running", "paused"):
        raise VideotuneError(f"{name} is running: stop it first")
    queued.remove(queue, name)


ACTIONS: Mapping[str, tuple[Callable[[Path, str], object], str]] = {
    "stop": (queued.hold, "Stopping: it saves first"),
    "pause": (_pause, "Paused; it keeps its memory"),
    "continue": (_continue, "Continues"),
    "retry": (queued.requeue, "Queued again"),
    "remove": (_remove, "Removed from the queue"),
}
"""The buttons of an entry, each with its confirmation."""


@routes.post("/queue/{act}")
def change(act: str, page: CurrentPage, form: PostedForm) -> Response:
    """Stop, pause, continue, retry or remove an entry; or reorder the waiting ones."""
    queue = queue_folder(page.root)
    if act == "order":
        queued.reorder(queue, form.all("name"))
        return reply()
    if act not in ACTIONS:
        raise VideotuneError(f"the queue has no action {act[:40]}")

    action, confirmation = ACTIONS[act]
    action(queue, form["name"])
    ensure_worker(page.root)
    return reply(confirmation)


@routes.post("/p/{project}/sweep")
def start_sweep(page: CurrentPage, form: PostedForm) -> Response:
    """Queue a run for every combination of the values."""
    pairs = zip(form.all("key"), form.all("values"), strict=False)
    vary = {key: values for key, values in pairs if key and values.strip()}
    project = page.current_project
    questions = ask_before_start(project, form)
    if questions is not None:
        return questions
    check = page.path_rule.check_config
    cards = run_cards.cards_from(form)
    name = queue_sweep(page.root, project, vary, check, cards)
    return reply(f"{name} is queued", redirect=f"/queue?project={quote(project.name)}")
