"""The bar at the top of every page: what runs in any project, how far it is, and the time left."""

from videotune.queue.jobs import all_jobs
from videotune.studio.projects import Project, projects
from videotune.studio.status import progress, read_live
from videotune.studio.web import Asked, Regions, html
from videotune.text import duration


def status(asked: Asked) -> str:
    """What runs now, the open project's first."""
    rows = [row for project in projects(asked.root) for row in _running(project)]
    rows.sort(key=lambda row: asked.project is None or row["project"].name != asked.project.name)
    return html("status", asked=asked, rows=rows)


def _running(project: Project) -> list[dict[str, object]]:
    rows = []
    for job in [one for one in all_jobs(project.folder)[:12] if one.running]:
        row: dict[str, object] = {"project": project, "job": job, "share": None, "left": ""}
        if job.kind == "train":
            far = progress(read_live(project.folder / "runs" / job.about))
            row["share"] = far.done / far.total if far.total else None
            row["left"] = duration(far.left) if far.left is not None else ""
        rows.append(row)
    return rows


REGIONS: Regions = {"status": status}
