"""The bar at the top of every page: what runs in any project, its progress and time
left.
"""

from pathlib import Path
from typing import Any

from videotune.queue import entries as queued
from videotune.queue.jobs import all_jobs
from videotune.reporter.read import mapping
from videotune.studio.failures import newest_training, open_failure
from videotune.studio.projects import find_project, list_projects
from videotune.studio.status import process_progress, read_live
from videotune.studio.web import PageContext, Regions, render
from videotune.text import time_left

QUEUE_FOLDER = ".queue"
"""Folder of the queue below the projects' folder; hidden, so it is not taken for a
project.
"""


def running_work(root: Path, name: str = "") -> list[dict[str, Any]]:
    """Return what runs: the entries of the queue, then the jobs of the projects.

    Args:
        root: folder of the projects.
        name: only of this project; empty for all.
    """
    rows = []
    for entry in queued.entries(root / QUEUE_FOLDER):
        if entry.job is not None and entry.job.is_running:
            rows.append(_entry_row(entry))

    projects = [find_project(root, name)] if name else list_projects(root)
    for project in projects:
        for job in all_jobs(project.folder):
            if job.is_running:
                rows.append(_row(job.kind, project.name, job.about))

    titles = {project.name: project.title for project in projects}
    for row in rows:
        row["title"] = titles.get(row["project"], row["project"])
    return [row for row in rows if name in ("", row["project"])]


def _entry_row(entry: queued.QueueEntry) -> dict[str, Any]:
    project_name = entry.run.parent.parent.name
    row = _row(entry.kind, project_name, entry.run.name)
    row["paused"] = entry.state == "paused"

    if entry.kind == "train":
        run = read_live(entry.run)
        heartbeat = mapping(run.life)
        if heartbeat["alive"]:
            row["doing"] = str(heartbeat["state"] or "")
        run_progress = process_progress(run, entry.job)
        if run_progress.total and run_progress.done:
            row["share"] = run_progress.done / run_progress.total
        if run_progress.left is not None:
            row["left"] = time_left(run_progress.left)
        row["loss"] = run_progress.loss
    return row


def _row(kind: str, project_name: str, about: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "project": project_name,
        "title": "",
        "about": about,
        "share": None,
        "loss": None,
        "left": "",
        "paused": False,
        "doing": "",
        "failed": "",
    }


def failed_runs(root: Path) -> list[dict[str, Any]]:
    """Return the failed trainings to which the user has not reacted yet, at most one for
    each project: the newest.
    """
    if not (root / QUEUE_FOLDER).is_dir():
        return []
    rows = []
    for project in list_projects(root):
        entry = newest_training(root / QUEUE_FOLDER, project)
        reason = open_failure(project, entry)
        if entry is not None and reason:
            row = _row(entry.kind, project.name, entry.run.name)
            rows.append({**row, "title": project.title, "failed": reason})
    return rows


def status(page: PageContext) -> str:
    """Render what runs now, the open project's work first."""
    open_name = page.project.name if page.project else None
    rows = [*running_work(page.root), *failed_runs(page.root)]
    return render(
        "status",
        rows=sorted(rows, key=lambda row: row["project"] != open_name),
        open_name=open_name,
    )


REGIONS: Regions = {"status": status}
