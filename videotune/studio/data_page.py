"""The page Data: clips, captions, scenes, and the bin."""

import re
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.concurrency import run_in_threadpool

from videotune.data.clip_file import CLIP_SUFFIXES
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.errors import VideotuneError
from videotune.queue import jobs
from videotune.reporter.read import mapping
from videotune.studio import (
    captions_edit,
    clips,
    downloads,
    header,
    media,
    projects,
    trash,
    uploads,
)
from videotune.studio.projects import CLIPS, inside
from videotune.studio.web import (
    FormData,
    In,
    PageContext,
    PostedForm,
    Regions,
    fragment,
    html,
    page,
    say,
)

CHUNK = 60
"""Tiles that are sent at once."""

SCENES = "scenes"
"""The folder of a project in which each film's scenes lie until they are kept or removed."""

KINDS = ("check", "caption", "split", "sheet")
"""Kinds of jobs that this page starts."""

routes = APIRouter(prefix="/p/{project}")


def state(asked: PageContext) -> str:
    """What the last check counted, what runs, and what a person should do."""
    project = asked.home
    captions_edit.settle(project)
    waiting = clips.start_check(project)
    last = clips.last_account(project)
    data: dict[str, Any] = {
        "waiting": waiting,
        "check": last and last[0],
        "account": mapping(last[1]) if last else None,
    }
    data |= {
        "rows": list(clips.table(project).rows.values()),
        "undo": captions_edit.last(project),
    }
    data |= {
        "running": {kind: jobs.latest(project.folder, kind) for kind in KINDS},
        "draft": projects.draft(project),
    }
    return html("data_state", asked=asked, **data)


def version(asked: PageContext) -> str:
    """What tells the page's script to ask for the tiles anew."""
    return html("data_version", version=clips.table(asked.home).version)


def scenes(asked: PageContext) -> str:
    """The scenes that were cut out of films, each film's apart."""
    found = [
        (film, _scenes(film)) for film in sorted((asked.home.folder / SCENES).glob("[!.]*"))
    ]
    return html(
        "data_scenes", asked=asked, films=[(film.name, names) for film, names in found if names]
    )


def removed(asked: PageContext) -> str:
    """What was removed from the project."""
    return html(
        "bin_items", items=trash.items(asked.home.folder), at=f"/p/{asked.home.name}/data/bin"
    )


REGIONS: Regions = {"state": state, "version": version, "scenes": scenes, "bin": removed}


@routes.get("/data")
def show(asked: In) -> Response:
    """The page."""
    return page(asked, "data", header.REGIONS | REGIONS, "Data", **_tiles(asked))


def _tiles(asked: PageContext, first: int = 0, count: int = CHUNK) -> dict[str, Any]:
    rows = clips.select(asked.home, asked.query)
    more = first + count if first + count < len(rows) else 0
    return {
        "rows": rows[first : first + count],
        "more": more,
        "found": len(rows),
        "first": first,
    }


@routes.get("/data/tiles")
def tiles(asked: In, first: int = 0, count: int = CHUNK) -> Response:
    """Tiles of the clips that the filter chooses."""
    return fragment(html("data_tiles", asked=asked, **_tiles(asked, first, min(count, 10_000))))


@routes.get("/data/clip")
def clip(asked: In, path: str) -> Response:
    """Everything about a clip, with a large player."""
    row = clips.found(clips.table(asked.home).rows, path)
    return fragment(
        html(
            "data_clip",
            asked=asked,
            row=row,
            changes=captions_edit.history(asked.home, row["name"]),
        )
    )


@routes.get("/data/sound")
def sound(asked: In, path: str) -> Response:
    """The waveform of a clip's sound."""
    return fragment(
        html(
            "data_sound", peaks=media.peaks(_media(asked, path), asked.home.folder / ".studio")
        )
    )


@routes.get("/poster")
def poster(asked: In, path: str) -> Response:
    """A picture of a clip; 404 where nothing of it can be decoded."""
    if (found := media.poster(_media(asked, path), asked.home.folder / ".studio")) is None:
        raise HTTPException(404, "no picture of it can be decoded")
    return FileResponse(
        found, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400"}
    )


def _media(asked: PageContext, path: str) -> Path:
    """A clip or a sample of the project; 404 where it is none."""
    try:
        found = inside(asked.home.folder, path)
    except VideotuneError as error:
        raise HTTPException(404, str(error)) from error
    if (
        path.split("/")[0] not in downloads.OPEN
        or not path.lower().endswith(CLIP_SUFFIXES)
        or not found.is_file()
    ):
        raise HTTPException(404, "no such clip")
    return found


@routes.post("/data/caption")
def caption(asked: In, form: PostedForm) -> Response:
    """Save a caption; 409 with the caption on the disk where that is not the one that was loaded (``was``)."""
    row = clips.found(clips.table(asked.home).rows, form["path"])
    there = clips.caption_of(row["clip"]) if not row["fixed"] else ""
    if not row["fixed"] and there.split() not in (form["was"].split(), form["text"].split()):
        return JSONResponse({"text": there}, 409)
    if there and not form["text"].strip():
        raise VideotuneError("an empty caption was not saved: write what the clip shows")
    captions_edit.change(asked.home, {form["path"]: form["text"]}, form["by"] or "edit")
    return say(saved=form["path"])


def _chosen(asked: PageContext, form: FormData) -> list[str]:
    """The clips that were selected, or all that the filter chooses."""
    return (
        [row["path"] for row in clips.select(asked.home, form)]
        if form["all"]
        else form.all("path")
    )


@routes.get("/data/captions")
def preview(asked: In) -> Response:
    """What a change of all captions would alter."""
    words = FormData({key: [value] for key, value in asked.query.items()})
    texts = captions_edit.planned(asked.home, words, _chosen(asked, words))
    return fragment(html("data_preview", texts=texts, rows=clips.table(asked.home).rows))


@routes.post("/data/captions")
def change_captions(asked: In, form: PostedForm) -> Response:
    """Change all captions that the filter chooses."""
    texts = captions_edit.planned(asked.home, form, _chosen(asked, form))
    count = captions_edit.change(
        asked.home, texts, "replace" if form["how"] == "replace" else "trigger word"
    )
    return say(f"{count} captions changed")


@routes.post("/data/undo")
def undo(asked: In) -> Response:
    """Take the newest change of captions back."""
    return say(f"{captions_edit.undo(asked.home)} captions restored")


@routes.post("/data/auto-caption")
def auto_caption(asked: In, form: PostedForm) -> Response:
    """Let a vision-language model write captions."""
    asks = {
        key: form[key].strip()
        for key in ("model", "endpoint", "purpose", "trigger", "max-words")
    }
    if not asks["model"] or not (
        asked.local or asks["endpoint"] or re.fullmatch(r"[\w.-]+/[\w.-]+", asks["model"])
    ):
        raise VideotuneError(
            "name the model: of a server, or of the Hub, such as Qwen/Qwen2.5-VL-7B-Instruct"
        )
    projects.change(asked.home, captioning=asks)
    words = ["caption", str(asked.home.folder / CLIPS), "--preset", asked.home.preset]
    words += [f"--{key}={value}" for key, value in asks.items() if value] + [
        "--overwrite"
    ] * bool(form["overwrite"])
    captions_edit.begin_captioning(asked.home, words)
    return say("Writing captions")


@routes.post("/data/stop")
def stop(asked: In, kind: str) -> Response:
    """End a job of this page."""
    if (
        kind not in KINDS
        or (job := jobs.latest(asked.home.folder, kind)) is None
        or not jobs.stop(job)
    ):
        raise VideotuneError("nothing of that kind is running")
    return say("Stopped")


@routes.post("/data/move")
def move(asked: In, form: PostedForm) -> Response:
    """Use clips for validation, or for training, or move them to the bin."""
    paths = _chosen(asked, form)
    clips.move(asked.home, paths, form["to"])
    said = {"bin": "moved to the bin", CLIPS: "used for training"}.get(
        form["to"], "used for validation"
    )
    return say(f"{f'{len(paths)} clips' if len(paths) != 1 else Path(paths[0]).name} {said}")


@routes.post("/data/leave-out")
def leave_out(asked: In) -> Response:
    """Train without the clips that have no caption, and without all others that are skipped."""
    projects.save_draft(asked.home, {**projects.draft(asked.home), "missing_caption": "skip"})
    projects.change(asked.home, allow_skips=True)
    return say("Clips without a caption are left out")


@routes.post("/data/sheet")
def sheet(asked: In) -> Response:
    """Make the contact sheet."""
    words = [
        "check",
        "--json",
        "--contact-sheet",
        str(asked.home.folder / "sheet"),
        *projects.words(asked.home),
    ]
    jobs.restart(asked.home.folder, "sheet", words)
    return say("Making the contact sheet")


@routes.post("/data/upload")
async def upload(asked: In, name: str, request: Request) -> list[uploads.Taken]:
    """Take a file from the body of the request; the folders in its name are kept below the clips."""
    with uploads.incoming(asked.root, name) as path:
        await uploads.receive(request, path)
        return await run_in_threadpool(uploads.accept, asked.home, [path], name)


@routes.post("/data/source")
def source(asked: In, form: PostedForm) -> Response:
    """Train on another folder of this computer, or a dataset of the Hub, too; or no longer."""
    path = form["path"].strip()
    kind = form["kind"] or "train"
    project = asked.home
    rows = [row for row in project.facts.get("sources", ()) if row["path"] != path]
    if not form["drop"]:
        place = Path(path).expanduser()
        if place.is_absolute() or path.startswith((".", "~")):
            if not asked.local and not place.resolve().is_relative_to(asked.root):
                raise VideotuneError(
                    "folders elsewhere on the server can be named only by someone who sits at it"
                )
            if not place.exists() or (place.is_file() and type_of_file(place) not in ARCHIVES):
                raise VideotuneError(
                    f"there is no folder or archive {path} on the computer that the studio runs on"
                )
            path = str(place.resolve())
        elif not re.fullmatch(r"(hf://datasets/)?[\w.-]+/[\w.-]+(@.+)?", path):
            raise VideotuneError(
                f"{path!r} is neither a whole path (/home/me/clips) nor a dataset (user/name)"
            )
        rows.append({"path": path} | ({} if kind == "train" else {"kind": kind}))
    projects.change(project, sources=rows)
    return say(
        f"{path} is {'left out; its files stay' if form['drop'] else 'used; its files stay where they are'}"
    )


@routes.post("/data/cut")
def cut(asked: In, form: PostedForm) -> Response:
    """Cut a film into its scenes; the film stays until that has succeeded."""
    row = clips.found(clips.table(asked.home).rows, form["path"])
    if row["fixed"]:
        raise VideotuneError(
            f"{row['name']} is named in a list, or lies elsewhere: cut it there"
        )
    out = asked.home.folder / SCENES / re.sub(r"[^\w -]", "_", Path(row["name"]).stem)
    jobs.start(
        asked.home.folder,
        "split",
        ["dataset", "split", str(row["clip"].path), "--out", str(out)],
        row["path"],
    )
    return say(f"Cutting {row['name']} into scenes")


def _scenes(film: Path) -> list[str]:
    found = (
        (path.name for path in film.iterdir() if path.suffix.lower() in CLIP_SUFFIXES)
        if film.is_dir()
        else ()
    )
    return sorted(name for name in found if not name.startswith("."))


@routes.post("/data/scene")
def scene(asked: In, form: PostedForm) -> Response:
    """Keep scenes as clips, or move them to the bin; without a name all of the film."""
    folder = inside(asked.home.folder / SCENES, form["film"])
    paths = [
        inside(folder, name) for name in ([form["name"]] if form["name"] else _scenes(folder))
    ]
    files = [one for path in paths for one in (path, path.with_suffix(".txt")) if one.is_file()]
    if not form["keep"]:
        trash.throw(
            asked.home.folder, "scene", form["name"] or f"Scenes of {folder.name}", files
        )
        return say("In the bin")
    targets = [asked.home.folder / CLIPS / path.name for path in files]
    if there := [target.name for target in targets if target.exists()]:
        raise VideotuneError(f"{there[0]} is among the clips already: rename one of the two")
    for path, target in zip(files, targets, strict=True):
        path.rename(target)
    return say(f"{len(paths)} kept" if len(paths) > 1 else "Kept")


@routes.post("/data/bin/{act}")
def from_bin(asked: In, act: Literal["restore", "destroy"], form: PostedForm) -> Response:
    """Bring back what was removed, or delete it for good."""
    (trash.restore if act == "restore" else trash.destroy)(asked.home.folder, form["id"])
    return say("Restored" if act == "restore" else "Deleted")
