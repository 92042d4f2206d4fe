"""The page Projects: create, open, rename, duplicate, export, import, remove and bring back."""

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from videotune.errors import VideotuneError
from videotune.queue import entries as queued
from videotune.studio import header, projects, queue_page, trash
from videotune.studio.downloads import send_zip
from videotune.studio.projects import CLIPS, Project, seen_files
from videotune.studio.uploads import incoming, receive
from videotune.studio.web import In, PageContext, PostedForm, Regions, html, page, say

routes = APIRouter()
TEXTS = (".txt", ".csv", ".jsonl")
COVER = 4
"""Pictures of a project on its card."""


def cards(asked: PageContext) -> str:
    """The list of projects, each with its first clips."""
    return html("projects_cards", cards=[_card(one) for one in projects.projects(asked.root)])


def _card(project: Project) -> dict[str, object]:
    found = seen_files(project.folder / CLIPS)
    clips = sorted(
        (path for path in found if path.suffix.lower() not in TEXTS), key=str
    )  # paths compare slowly
    return {
        "project": project,
        "clips": len(clips),
        "cover": [path.relative_to(project.folder).as_posix() for path in clips[:COVER]],
        "runs": len(list((project.folder / "runs").glob("*/config.json"))),
        "busy": bool(header.running(project.folder.parent, project.name)),
    }


def removed(asked: PageContext) -> str:
    """The projects in the bin."""
    return html("bin_items", items=trash.items(asked.root), at="/bin")


REGIONS: Regions = {"cards": cards, "bin": removed}


@routes.get("/")
def show(asked: In) -> Response:
    """All projects."""
    return page(asked, "projects", header.REGIONS | REGIONS, "Projects")


@routes.post("/create")
def create(asked: In, form: PostedForm) -> Response:
    """A new project, and on to its data."""
    return say(go=f"/p/{quote(projects.create(asked.root, form['title']).name)}/data")


@routes.post("/p/{project}/rename")
def rename(asked: In, form: PostedForm) -> Response:
    """Another title."""
    title = projects.change(asked.home, title=projects.clean_title(form["title"])).title
    return say(f"Renamed to {title}")


@routes.post("/p/{project}/duplicate")
def duplicate(asked: In) -> Response:
    """A new project with the same clips, captions and settings, without runs."""
    return say(f"{projects.duplicate(asked.root, asked.home).title} created")


@routes.get("/p/{project}/export")
def export(asked: In) -> Response:
    """The whole project as one zip."""
    projects.change(
        asked.home, folder=str(asked.home.folder)
    )  # whoever imports it has to know which paths were its own
    return send_zip(asked.home.folder, asked.home.name, projects.is_exported)


@routes.post("/import")
async def take_in(asked: In, name: str, request: Request) -> Response:
    """A project that was exported, from the body of the request."""
    with incoming(asked.root, name) as path:
        await receive(request, path)
        return say(
            f"{(await run_in_threadpool(projects.import_project, asked.root, path)).title} imported"
        )


@routes.post("/p/{project}/remove")
def remove(asked: In) -> Response:
    """Move a project to the bin."""
    if header.running(asked.root, asked.home.name):
        raise VideotuneError(f"{asked.home.title} has a running job: stop it first")
    for entry in queue_page.of(asked.root, asked.home):
        queued.remove(asked.root / header.QUEUE, entry.name)
    trash.throw(asked.root, "project", asked.home.title, [asked.home.folder])
    return say(f"{asked.home.title} is in the bin")


@routes.post("/bin/restore")
def restore(asked: In, form: PostedForm) -> Response:
    """Bring a project back."""
    trash.restore(asked.root, form["id"])
    return say("Restored")


@routes.post("/bin/destroy")
def destroy(asked: In, form: PostedForm) -> Response:
    """Delete for good."""
    trash.destroy(asked.root, form["id"])
    return say("Deleted")
