"""The page Projects: create, open, rename, duplicate, export, import, remove and
restore.
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from videotune.errors import VideotuneError
from videotune.presets.shipped import preset_named
from videotune.queue import entries as queued
from videotune.studio import (
    clips,
    gpu,
    header,
    model_choices,
    project_names,
    projects,
    queue_page,
    run_states,
    transfer,
    trash,
    whole_settings,
)
from videotune.studio.default_root import other_root
from videotune.studio.downloads import file_stem, send_zip
from videotune.studio.field_errors import at_field
from videotune.studio.first_model import first_model
from videotune.studio.projects import Project
from videotune.studio.uploads import receive, temporary_upload
from videotune.studio.web import (
    CurrentPage,
    PageContext,
    PostedForm,
    Regions,
    ToastAction,
    fragment,
    page_response,
    render,
    reply,
)
from videotune.text import as_argument, counted

routes = APIRouter()

COVER_CLIPS = 4
"""Clips whose pictures show on the card of a project."""


def cards(page: PageContext) -> str:
    """Render the list of projects, each with its first clips."""
    work_by_project = _work_by_project(page.root)
    rows = []
    for project in projects.list_projects(page.root):
        try:
            rows.append(
                _card(page.root, project, work_by_project.get(project.name, ""))
            )
        except (VideotuneError, OSError) as error:
            rows.append(_empty_card(project, str(error)))
    home_root = other_root(page.root) if page.is_local else None
    return render(
        "projects_cards",
        cards=rows,
        root=page.root,
        other_root=home_root,
        other_root_argument=as_argument(home_root),
    )


def _work_by_project(root: Path) -> dict[str, str]:
    """Return what runs in each project, as the bar at the top names it.

    If the queue is damaged, the bar at the top of the page reports it.
    """
    try:
        rows = header.running_work(root)
    except VideotuneError:
        return {}

    work_by_project: dict[str, str] = {}
    for row in rows:
        is_training = row["kind"] == "train"
        words = projects.texts()["working"].get(row["kind"], row["kind"])
        text = f"{row['about']} running" if is_training else words
        work_by_project.setdefault(row["project"], text)
    return work_by_project


def _card(root: Path, project: Project, work: str) -> dict[str, object]:
    rows = clips.table(project).rows.values()
    covers = [
        row["picture"] or row["path"]
        for row in rows
        if row["part"] and row["reason"] not in clips.CLIP_REASONS
    ]

    return {
        **_empty_card(project, project.damage),
        "clips": len(rows),
        "cover": covers[:COVER_CLIPS],
        "runs": len(run_states.run_names(project, root)),
        "busy": work,
    }


def _empty_card(project: Project, damage: str) -> dict[str, object]:
    return {
        "project": project,
        "clips": 0,
        "cover": [],
        "runs": 0,
        "busy": "",
        "damage": damage,
    }


def removed(page: PageContext) -> str:
    """Render the projects in the bin."""
    return render("bin_items", items=trash.list_items(page.root), at="/bin")


REGIONS: Regions = {"cards": cards, "bin": removed}


@routes.get("/")
def show(page: CurrentPage) -> Response:
    """Show all projects."""
    usual_card = {} if gpu.list_gpus() else _latest_card(page.root)
    card = model_choices.chosen_card(usual_card)
    first = first_model(card)
    families = model_choices.families_for(card, first_preset=first.preset)

    return page_response(
        page,
        "projects",
        header.REGIONS | REGIONS,
        "Projects",
        found=gpu.list_gpus(),
        card=card,
        usual_card=usual_card,
        card_groups=model_choices.card_groups(),
        families=families,
        has_too_large=model_choices.has_too_large(families, card),
        first=first,
        chosen="",
        error="",
    )


def _latest_card(root: Path) -> dict[str, Any]:
    """Return the card of the newest project for which a known one was named, as facts;
    empty if none was.
    """
    for project in projects.list_projects(root):
        card = {key: project.facts.get(key) for key in ("card", "vram")}
        is_named = any(card.values())
        if is_named and model_choices.chosen_card(card).gigabytes:
            return card
    return {}


@routes.post("/create")
def create(page: CurrentPage, form: PostedForm) -> Response:
    """Create a project with the chosen card and model, and go to its data."""
    facts: dict[str, Any] = {}
    if form["card"] == "other" or form["vram"]:
        with at_field("vram"):
            facts |= _typed_card(form["vram"])
    elif form["card"] != "none":
        facts |= model_choices.card_facts(form["card"])
    if form["preset"]:
        facts["preset"] = preset_named(form["preset"])

    known_facts = {key: value for key, value in facts.items() if value}
    with at_field("title"):
        title = project_names.clean_title(form["title"])
    project = projects.create(page.root, title, **known_facts)
    return reply(redirect=f"/p/{quote(project.name)}/data")


def _typed_card(text: str) -> dict[str, Any]:
    """Return the facts of a card that is typed; VideotuneError if none is."""
    facts = model_choices.card_facts(text)
    if not facts["vram"] and not facts["card"]:
        raise VideotuneError("type the name or the memory of your card, such as 16 GB")
    return dict(facts)


@routes.post("/p/{project}/rename")
def rename(page: CurrentPage, form: PostedForm) -> Response:
    """Change the title of a project."""
    with at_field("title"):
        title = project_names.clean_title(form["title"])
    projects.update(page.current_project, title=title)
    return reply(f"Renamed to {title}")


@routes.post("/p/{project}/duplicate")
def duplicate(page: CurrentPage) -> Response:
    """Create a project with the same clips, captions and settings, without runs."""
    copy = transfer.duplicate(page.root, page.current_project)
    return reply(f"{copy.title} created")


@routes.get("/p/{project}/export")
def export(page: CurrentPage) -> Response:
    """Send the project as one zip."""
    project = page.current_project
    # An import needs to know which paths were the project's own.
    projects.update(project, folder=str(project.folder))
    return send_zip(
        project.folder,
        file_stem(project),
        transfer.is_exported,
        inner_name=project.name,
    )


@routes.post("/import")
async def import_archive(page: CurrentPage, name: str, request: Request) -> Response:
    """Import an exported project from the body of the request; a config of another
    trainer becomes a new project that shows what it means here.
    """
    with temporary_upload(page.root, name) as path:
        if path.suffix.lower() in whole_settings.CONFIG_SUFFIXES:
            await receive(request, path, whole_settings.MAX_CONFIG_BYTES)
            return _project_of_config(page, path)

        await receive(request, path)
        try:
            imported = await run_in_threadpool(
                transfer.import_project, page.root, path, page.path_rule
            )
        except VideotuneError as error:
            message = str(error).replace(str(path), path.name)
            raise VideotuneError(message) from error
    message = f"{imported.project.title} imported"
    if imported.notes:
        message += f" without {counted(len(imported.notes), 'part')} of it: "
        message += "; ".join(imported.notes)
    return reply(message)


def _project_of_config(page: PageContext, path: Path) -> Response:
    """Create a project for another trainer's config, and go to its Setup."""
    project = projects.create(page.root, path.stem[: project_names.MAX_TITLE_LENGTH])
    whole_settings.take_config(project, path)
    return reply(redirect=f"/p/{quote(project.name)}/setup")


@routes.post("/p/{project}/remove")
def remove(page: CurrentPage) -> Response:
    """Move a project to the bin."""
    project = page.current_project
    if header.running_work(page.root, project.name):
        raise VideotuneError(f"{project.title} has a running job: stop it first")

    for entry in queue_page.project_entries(page.root, project):
        queued.remove(page.root / header.QUEUE_FOLDER, entry.name)
    item = trash.move_to_trash(page.root, "project", project.title, [project.folder])
    undo = ToastAction(words="Undo", post="/bin/restore", values={"id": item})
    return reply(f"{project.title} is in the bin", action=undo)


@routes.post("/bin/restore")
def restore(page: CurrentPage, form: PostedForm) -> Response:
    """Restore a project from the bin."""
    with projects.lock_of(page.root):
        trash.restore(page.root, form["id"])
    return reply("Restored")


@routes.post("/bin/destroy")
def destroy(page: CurrentPage, form: PostedForm) -> Response:
    """Delete a project for good."""
    with projects.lock_of(page.root):
        trash.delete(page.root, form["id"])
    return reply("Deleted")


@routes.get("/models")
def models(
    page: CurrentPage, card: str = "", vram: str = "", preset: str = ""
) -> Response:
    """Send the models of the dialog "New project", ordered by their fit on a card."""
    error = ""
    current = model_choices.ChosenCard()
    try:
        facts = model_choices.card_facts(vram if card == "other" or vram else card)
        current = model_choices.chosen_card(facts)
    except VideotuneError as problem:
        error = str(problem)

    first = first_model(current)
    families = model_choices.families_for(current, first_preset=first.preset)
    return fragment(
        render(
            "models_new",
            families=families,
            has_too_large=model_choices.has_too_large(families, current),
            card=current,
            chosen=preset,
            error=error,
            first=first,
        )
    )
