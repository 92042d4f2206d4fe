"""The page Data: clips, captions, scenes, and the bin."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.concurrency import run_in_threadpool

from videotune.data.clip_file import CLIP_SUFFIXES
from videotune.data.images import IMAGE_SUFFIXES
from videotune.data.source_videos import SOURCES_NEEDED
from videotune.errors import VideotuneError
from videotune.queue import jobs
from videotune.studio import (
    auto_caption,
    caption_choices,
    captions_edit,
    clip_history,
    clip_moves,
    clip_row,
    clip_subjects,
    clip_words,
    clips,
    downloads,
    film_scenes,
    gone_clips,
    header,
    left_sources,
    media,
    projects,
    sources,
    stray_texts,
    trash,
    undo,
    uploads,
)
from videotune.studio.caption_decisions import without_decisions
from videotune.studio.data_notes import DataNotes, notes_of_check
from videotune.studio.outside_clips import (
    lacks_caption,
    missing_sources,
    stopping_clips,
)
from videotune.studio.projects import CLIPS, HELD_OUT, inside
from videotune.studio.web import (
    NOT_CACHED,
    CurrentPage,
    FormData,
    PageContext,
    PostedForm,
    Regions,
    ToastAction,
    fragment,
    page_response,
    render,
    reply,
)
from videotune.text import counted

CHUNK = 60
"""Tiles that are sent at once."""

MAX_TILES = 10_000
"""Tiles that a request may ask for."""


NO_PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="10"/>'
"""Stands for a clip of which no picture can be decoded."""

KINDS = ("check", "caption", "split", "sheet")
"""Kinds of jobs that this page starts."""

CLIP_WORDS = {
    "states": clip_words.STATES,
    "state_words": clip_words.state_words,
    "is_aside": clip_row.is_aside,
    "is_drawn": clip_row.is_drawn,
    "sources_needed": SOURCES_NEEDED,
    "clip_actions": clip_words.clip_actions,
    "clip_settings": clip_words.clip_settings,
    "reason_advice": clip_words.reason_advice,
    "remedy_of": clip_words.remedy_of,
    "no_remedy": clip_words.NO_REMEDY,
    "stills": IMAGE_SUFFIXES,
    **clip_subjects.VALUES,
}
"""What the templates of this page say about clips."""

routes = APIRouter(prefix="/p/{project}")
routes.include_router(auto_caption.routes)
routes.include_router(gone_clips.routes)
routes.include_router(left_sources.routes)
routes.include_router(stray_texts.routes)
routes.include_router(sources.routes)


def state(page: PageContext) -> str:
    """Render the result of the last check, running jobs, and what the user should do."""
    project = page.current_project
    captions_edit.finish_jobs(project)
    is_check_due = clips.start_check(project)

    rows = list(clips.table(project).rows.values())
    notes = DataNotes()
    shared = clips.table(project).shared
    check, account = clips.latest_check(project) or (None, None)
    if account is not None:
        notes = notes_of_check(
            account,
            rows,
            [warning.text for warning in shared],
            has_model=project.has_model,
        )
    notes, strays = stray_texts.with_strays(project, rows, notes)
    stopping = stopping_clips(project, rows)

    return render(
        "data_state",
        strays={path: stray_texts.clip_of_stray(path, rows) for path in strays},
        context=page,
        waiting=is_check_due,
        check=check,
        account=account,
        rows=rows,
        uncaptioned=[row for row in rows if clip_row.needs_caption(row)],
        stopping=stopping,
        lacking=[row for row in stopping if lacks_caption(row)],
        missing=missing_sources(project),
        has_own=clips.has_own(project),
        shared=shared,
        notes=notes,
        clips_about=lambda code: clip_subjects.clips_about(rows, code),
        counts=clip_words.count_states(rows),
        **CLIP_WORDS,
        **undo.choices(project),
        running={kind: jobs.latest(project.folder, kind) for kind in KINDS},
        cut_words=film_scenes.describe_cut(project),
        draft=projects.draft(project),
    )


def version(page: PageContext) -> str:
    """Render the version of the clips, whose change makes the page reload its tiles."""
    return render("data_version", version=clips.table(page.current_project).version)


def scenes(page: PageContext) -> str:
    """Render the scenes that were cut out of each film."""
    films = film_scenes.list_films(page.current_project)
    return render("data_scenes", context=page, films=films)


def removed(page: PageContext) -> str:
    """Render the bin of the project."""
    project = page.current_project
    items = trash.list_items(project.folder)
    return render("bin_items", items=items, at=f"/p/{project.name}/data/bin")


REGIONS: Regions = {
    "state": state,
    "version": version,
    "scenes": scenes,
    "bin": removed,
}


@routes.get("/data")
def show(page: CurrentPage) -> Response:
    """Show the page."""
    return page_response(
        page,
        "data",
        header.REGIONS | REGIONS,
        "Data",
        caption_choices=caption_choices.caption_choices(),
        **_tiles(page),
    )


def _tiles(page: PageContext, first: int = 0, count: int = CHUNK) -> dict[str, Any]:
    """Return the template variables for ``count`` tiles from number ``first`` on."""
    rows = clips.select(page.current_project, page.query)
    aside = None
    if page.query.get("aside") and first == 0:
        all_rows = list(clips.table(page.current_project).rows.values())
        aside = clip_words.aside_hint(all_rows, rows)
    end = first + count
    return {
        "aside": aside,
        "rows": rows[first:end],
        "more": end if end < len(rows) else 0,
        "found": len(rows),
        "first": first,
        **CLIP_WORDS,
        "no_picture": clips.CLIP_REASONS,
    }


@routes.get("/data/tiles")
def tiles(page: CurrentPage, first: int = 0, count: int = CHUNK) -> Response:
    """Send tiles of the clips that the filter selects."""
    data = _tiles(page, first, min(count, MAX_TILES))
    return fragment(render("data_tiles", context=page, **data))


@routes.get("/data/clip")
def clip(page: CurrentPage, path: str) -> Response:
    """Send everything about a clip, with a large player."""
    project = page.current_project
    row = clips.find_clip(clips.table(project).rows, path)
    changes = clip_history.caption_changes(project, row["name"])
    others = clips.neighbours(project, path, page.query)
    return fragment(
        render(
            "data_clip",
            context=page,
            row=row,
            changes=changes,
            others=others,
            **CLIP_WORDS,
        )
    )


@routes.get("/data/sound")
def sound(page: CurrentPage, path: str) -> Response:
    """Send the waveform of a clip's sound."""
    peaks = media.peaks(_media_path(page, path), _media_cache(page))
    return fragment(render("data_sound", peaks=peaks))


@routes.get("/poster")
def poster(page: CurrentPage, path: str) -> Response:
    """Send a picture of a clip; an empty one if none can be decoded.

    A browser may keep it if the address has the version of the clip.
    """
    picture = media.poster(_media_path(page, path), _media_cache(page))
    if picture is None:
        return Response(NO_PICTURE, media_type="image/svg+xml", headers=NOT_CACHED)
    keeping = "max-age=86400" if page.query["v"] else "no-cache"
    headers = {"Cache-Control": f"private, {keeping}"}
    return FileResponse(picture, media_type="image/jpeg", headers=headers)


def _media_cache(page: PageContext) -> Path:
    return page.current_project.folder / ".studio"


def _media_path(page: PageContext, path: str) -> Path:
    """Return the path of a clip or a sample of the project; HTTP 404 for other files."""
    try:
        media_path = inside(page.current_project.folder, path)
    except VideotuneError as error:
        raise HTTPException(404, str(error)) from error

    is_served = path.split("/")[0] in downloads.SERVED_FOLDERS
    is_media = path.lower().endswith(CLIP_SUFFIXES)
    if not is_served or not is_media or not media_path.is_file():
        raise HTTPException(404, "no such clip")
    return media_path


@routes.post("/data/caption")
def caption(page: CurrentPage, form: PostedForm) -> Response:
    """Save a caption.

    HTTP 409 with the caption on disk if that is neither the one the page loaded
    (``was``) nor the new one.
    """
    project = page.current_project
    with projects.lock_of(project.folder):
        row = clips.find_clip(clips.table(project).rows, form["path"])
        if not row["caption_fixed"]:
            caption_on_disk = clip_row.caption_of(row["clip"])
            expected_words = [text.split() for text in (*form.all("was"), form["text"])]
            if caption_on_disk.split() not in expected_words:
                return JSONResponse({"theirs": caption_on_disk}, 409)
            if caption_on_disk and not form["text"].strip():
                raise VideotuneError(
                    "an empty caption was not saved: write what the clip shows"
                )

        by = form["by"] or "edit"
        captions_edit.change(project, {form["path"]: form["text"]}, by)
    return reply()


def _selected_paths(page: PageContext, form: FormData) -> list[str]:
    """Return the selected clips, or all clips of the filter if the form asks for them."""
    if form["all"]:
        return [row["path"] for row in clips.select(page.current_project, form)]
    return form.all("path")


@routes.get("/data/captions")
def preview(page: CurrentPage) -> Response:
    """Show what an edit of all captions would change."""
    project = page.current_project
    form = page.query
    paths = _selected_paths(page, form)
    planned = captions_edit.plan_edit(project, form, paths)
    rows = clips.table(project).rows
    return fragment(render("data_preview", planned=planned, rows=rows, edit=form))


@routes.post("/data/captions")
def change_captions(page: CurrentPage, form: PostedForm) -> Response:
    """Edit all captions of the filter."""
    project = page.current_project
    by = "replace" if form["how"] == "replace" else "trigger word"
    with projects.lock_of(project.folder):
        paths = _selected_paths(page, form)
        text_by_path = captions_edit.plan_edit(project, form, paths).texts
        batch = captions_edit.change(project, text_by_path, by)
    message = f"{counted(len(text_by_path), 'caption')} changed"
    return reply(message, action=_undo_action(page, batch))


@routes.post("/data/undo")
def undo_action(page: CurrentPage, form: PostedForm) -> Response:
    """Undo the newest action of the page, or the named one."""
    return reply(undo.undo(page.current_project, form["batch"]))


@routes.post("/data/redo")
def redo_action(page: CurrentPage, form: PostedForm) -> Response:
    """Do the action again that was undone last, or the named one."""
    return reply(undo.redo(page.current_project, form["batch"]))


def _undo_action(page: PageContext, batch: str) -> ToastAction:
    address = f"/p/{quote(page.current_project.name, safe='')}/data/undo"
    return {"words": "Undo", "post": address, "values": {"batch": batch}}


@routes.post("/data/stop")
def stop(page: CurrentPage, kind: str) -> Response:
    """Stop a job of this page."""
    job = jobs.latest(page.current_project.folder, kind) if kind in KINDS else None
    if job is None or not jobs.stop(job):
        raise VideotuneError("nothing of that kind is running")
    return reply("Stopped")


@routes.post("/data/move")
def move(page: CurrentPage, form: PostedForm) -> Response:
    """Keep clips aside for checking, train on them again, or move them to the bin."""
    project = page.current_project
    with projects.lock_of(project.folder):
        paths = _selected_paths(page, form)
        others = clip_moves.drawn_beside(project, paths) if form["to"] == CLIPS else []
        if others:
            record = clip_moves.move(project, others, HELD_OUT)
        else:
            record = clip_moves.move(project, paths, form["to"])
        clip_history.record_move(project, record)

    results = {"bin": "moved to the bin", CLIPS: "used for training"}
    result = results.get(form["to"], "kept aside for checking")
    subject = Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} clips"
    if others:
        result += (
            f"; {counted(len(others), 'other clip')} still kept aside for checking"
        )
    return reply(f"{subject} {result}", action=_undo_action(page, record["batch"]))


@routes.post("/data/leave-out")
def leave_out(page: CurrentPage, form: PostedForm) -> Response:
    """Train without the clips that have no caption and without all other skipped clips, or
    take that back.
    """
    project = page.current_project
    takes_back = bool(form["back"])
    with projects.lock_of(project.folder):
        keys = without_decisions(projects.draft(project))
        if not takes_back:
            keys["missing_caption"] = "skip"
        projects.save_draft(project, keys)
        projects.update(project, allow_skips=not takes_back)
    if takes_back:
        return reply("Clips without a caption need one again")
    return reply("Clips without a caption are left out")


@routes.post("/data/sheet")
def sheet(page: CurrentPage) -> Response:
    """Start the job that makes the contact sheet."""
    project = page.current_project
    arguments = ["check", "--json", "--contact-sheet", str(project.folder / "sheet")]
    arguments += projects.command_arguments(project)
    jobs.restart(project.folder, "sheet", arguments)
    return reply("Making the contact sheet")


@routes.post("/data/upload")
async def upload(
    page: CurrentPage, name: str, request: Request
) -> list[uploads.UploadResult]:
    """Add a file from the body of the request; the folders in its name are kept."""
    with uploads.temporary_upload(page.root, name) as path:
        await uploads.receive(request, path)
        return await run_in_threadpool(
            uploads.accept, page.current_project, [path], name
        )


@routes.post("/data/cut")
def cut(page: CurrentPage, form: PostedForm) -> Response:
    """Cut a film into its scenes; the film stays until that has succeeded."""
    project = page.current_project
    row = clips.find_clip(clips.table(project).rows, form["path"])
    if row["fixed"]:
        raise VideotuneError(
            f"{row['name']} is named in a list, or is in another folder: cut it there"
        )
    if row["picture"]:
        raise VideotuneError(f"{row['name']} is a folder of frames: move them by hand")

    out = film_scenes.folder_of_scenes(project, row["name"])
    arguments = ["dataset", "split", str(row["clip"].path), "--out", str(out)]
    jobs.start(project.folder, "split", arguments, row["path"])
    return reply(f"Cutting {row['name']} into scenes")


@routes.post("/data/scene")
def scene(page: CurrentPage, form: PostedForm) -> Response:
    """Keep scenes as clips, or move them to the bin; without a name all scenes of the
    film.
    """
    project = page.current_project
    with projects.lock_of(project.folder):
        return film_scenes.decide_scenes(project, form)


@routes.post("/data/bin/{act}")
def from_bin(
    page: CurrentPage, act: Literal["restore", "destroy"], form: PostedForm
) -> Response:
    """Restore a removed item, or delete it for good."""
    home = page.current_project.folder
    with projects.lock_of(home):
        if act == "restore":
            trash.restore(home, form["id"])
            undo.record_restored(page.current_project, form["id"])
            return reply("Restored")
        trash.delete(home, form["id"])
    return reply("Deleted")
