"""Which runs a project has, and what each of them does now."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from videotune.queue import entries as queued
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.reporter.outcome import describe_state
from videotune.reporter.progress import progress
from videotune.reporter.read import Run, mapping, number
from videotune.runs.schemas import parse_line
from videotune.studio import (
    projects,
    queue_page,
)
from videotune.studio.projects import Project
from videotune.studio.queue_page import RUN_NAME, run_folder, run_job, training_entry
from videotune.studio.status import read_live
from videotune.studio.web import PageContext

RUNNING_STATES = ("running", "paused")

MAX_LINE = 100_000
"""Bytes of a journal's first line that are read."""


BUSY_STATUSES = ("queued", "running", "paused", "suspended", "stopping", "ending")


def run_names(project: Project, root: Path) -> list[str]:
    """Return a project's runs, newest first, also those that have written nothing yet.

    Args:
        project: the project.
        root: folder of the projects.
    """
    started_at = {}
    for path in (project.folder / "runs").glob("*/config.json"):
        folder = path.parent
        if RUN_NAME.fullmatch(folder.name):
            started_at[folder.name] = _begun_at(folder)

    for entry in queue_page.shown_entries(root, project):
        if entry.kind == "train":
            started_at[entry.run.name] = entry.first_added
    return sorted(started_at, key=lambda name: -started_at[name])


def _begun_at(folder: Path) -> float:
    """Return when a run began, by its journal: a copy of its folder is newer."""
    with suppress(OSError, ValueError):
        with (folder / "journal.jsonl").open("rb") as journal:
            first_line = parse_line(journal.readline(MAX_LINE))
        begun = number(first_line.get("time"))
        if begun is not None:
            return begun
    return folder.stat().st_ctime


def selected_run(page: PageContext) -> str:
    """Return the run that the address names, or the one to follow; empty if there is
    none.
    """
    names = run_names(page.current_project, page.root)
    if page.query.get("run") in names:
        return page.query["run"]
    return run_to_follow(page, names) if names else ""


def run_status(run: Run, entry: QueueEntry | None, job: QueuedJob | None) -> str:
    """Return the status of a run, as a code of texts.json.

    A run without a process is never reported as running.
    """
    if entry is not None and entry.state == "waiting":
        return "queued"
    if entry is not None and entry.refused:
        return "failed"

    ended = run.last("end")["time"] or 0
    state = job.state if job is not None else "stopped"
    started = job.started if job is not None else 0
    if state in RUNNING_STATES or mapping(run.life)["alive"]:
        return _running_status(run, entry, state, started)
    if not run.journal or (state == "failed" and started > ended):
        return "failed" if state == "done" else state

    status = describe_state(run, progress(run).is_complete)[0]
    if status == "no end" or (state == "dead" and not ended):
        return "dead"
    return status


def _running_status(
    run: Run, entry: QueueEntry | None, state: str, started: float
) -> str:
    """Return the status of a run that has a process."""
    heartbeat = mapping(run.life)
    ended = run.last("end")["time"] or 0
    if state == "paused":
        return "suspended"
    if ended > max(started, heartbeat["started"] or 0):
        return "ending"
    if entry is not None and entry.is_held:
        return "stopping"
    if heartbeat["alive"] and heartbeat["state"] == "paused":
        return "paused"
    return "running"


WORK_ON_RUN = {
    "sample": "a sample from ",
    "export": "an export of ",
}
"""What an entry of the queue does with its run, by its kind; a training is the run itself."""


def entries_ahead(root: Path, entry: QueueEntry) -> list[str]:
    """Describe the running entries, or if none runs, the ones that run before this one."""
    entries = queued.entries(queue_page.queue_folder(root))
    # The entry may have left the queue meanwhile; then nothing is ahead of it.
    names = [queue_entry.name for queue_entry in entries]
    position = names.index(entry.name) if entry.name in names else 0
    earlier = entries[:position]

    blocking = [
        queue_entry for queue_entry in entries if queue_entry.state in RUNNING_STATES
    ]
    if not blocking:
        blocking = [
            queue_entry for queue_entry in earlier if queue_entry.state == "waiting"
        ]

    title_by_name = {
        project.name: project.title for project in projects.list_projects(root)
    }
    descriptions = []
    for queue_entry in blocking:
        project_name = queue_entry.run.parent.parent.name
        run_name = f"{queue_entry.run.name} of {title_by_name.get(project_name, '')}"
        descriptions.append(WORK_ON_RUN.get(queue_entry.kind, "") + run_name)
    return descriptions


def run_state(
    page: PageContext, name: str
) -> tuple[Run, QueueEntry | None, QueuedJob | None, str]:
    """Return a run with its entry of the queue, its last process, and its status."""
    project = page.current_project
    run = read_live(run_folder(project, name))
    entry = training_entry(page.root, project, name)
    job = run_job(page.root, project, name)
    return run, entry, job, run_status(run, entry, job)


def run_to_follow(page: PageContext, names: Sequence[str]) -> str:
    """Return the run that trains, or else the newest."""
    entries = queue_page.shown_entries(page.root, page.current_project)
    training = {
        entry.run.name
        for entry in entries
        if entry.kind == "train" and entry.state in RUNNING_STATES
    }
    for name in names:
        if name in training:
            return name

    # A run that was started in a terminal has no entry.
    for name in names:
        code = run_state(page, name)[3]
        if code != "queued":
            return name if code in BUSY_STATUSES else names[0]
    return names[0]
