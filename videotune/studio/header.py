"""The bar at the top of every page: what runs in any project, how far it is, and the time left."""

from pathlib import Path
from typing import Any

from videotune.queue import entries as queued
from videotune.queue.jobs import all_jobs
from videotune.studio.projects import named, projects
from videotune.studio.status import progress, read_live
from videotune.studio.web import PageContext, Regions, html
from videotune.text import duration

QUEUE = ".queue"
"""The folder of the queue, below that of the projects; hidden, so it is no project."""


def running(root: Path, name: str = "") -> list[dict[str, Any]]:
    """What runs in all projects, or in one: the entries of the queue first, then the projects' own jobs."""
    found = [
        _of_queue(one)
        for one in queued.entries(root / QUEUE)
        if one.job is not None and one.job.running
    ]
    for project in projects(root) if not name else [named(root, name)]:
        found += [
            _row(job.kind, project.name, job.about)
            for job in all_jobs(project.folder)
            if job.running
        ]
    return [row for row in found if name in ("", row["project"])]


def _of_queue(entry: queued.QueueEntry) -> dict[str, Any]:
    row = _row(entry.kind, entry.run.parent.parent.name, entry.run.name)
    if entry.kind == "train":
        far = progress(read_live(entry.run))
        row["share"] = far.done / far.total if far.total and far.done else None
        row["left"] = duration(far.left) if far.left is not None else ""
    return row | {"paused": entry.state == "paused"}


def _row(kind: str, project: str, about: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "project": project,
        "about": about,
        "share": None,
        "left": "",
        "paused": False,
    }


def status(asked: PageContext) -> str:
    """What runs now, the open project's first."""
    own = asked.project.name if asked.project else None
    return html(
        "status", rows=sorted(running(asked.root), key=lambda row: row["project"] != own)
    )


REGIONS: Regions = {"status": status}
