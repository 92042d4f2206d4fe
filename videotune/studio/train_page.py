"""The page Train: how a run stands, its previews and curves, and what can be asked of it."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse, PlainTextResponse

from videotune.config.load import flatten, unflatten
from videotune.errors import VideotuneError
from videotune.files import life, write_json
from videotune.queue import entries as queued
from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.reporter.build import warnings
from videotune.reporter.curves import exposure
from videotune.reporter.outcome import grounds, recommended_checkpoint, standing
from videotune.reporter.previews import sample_rows
from videotune.reporter.read import Run, items, mapping
from videotune.studio import form, gpu, header, projects, queue_page, trash
from videotune.studio.projects import Project
from videotune.studio.queue_page import training_entry, run_folder, run_job
from videotune.studio.series import checkpoints
from videotune.studio.status import progress, read_live, read_cached
from videotune.studio.web import (
    FormData,
    CurrentPage,
    PageContext,
    PostedForm,
    Regions,
    fragment,
    render,
    page_response,
    reply,
)

routes = APIRouter()
BUSY = ("running", "paused")
PLAYABLE_SUFFIXES = (".mp4", ".webm", ".mov", ".m4v")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
MAX_LOG_LINES = 400
"""Lines of a log that the page shows."""


def run_names(asked: PageContext) -> list[str]:
    """The project's runs, the one begun last first; those too that wait, or that ended before they wrote anything."""
    folders = (
        path.parent
        for path in (asked.current_project.folder / "runs").glob("*/config.json")
        if NAME.fullmatch(path.parent.name)
    )
    found = {path.name: path.stat().st_ctime for path in folders if NAME.fullmatch(path.name)}
    found |= {
        one.run.name: one.added
        for one in queue_page.project_entries(asked.root, asked.current_project)
        if one.kind == "train"
    }
    return sorted(found, key=lambda name: -found[name])


def selected_run(asked: PageContext) -> str:
    """The run that the address names, or the last one; empty where there is none."""
    there = run_names(asked)
    return asked.query["run"] if asked.query.get("run") in there else there[0] if there else ""


def run_status(run: Run, entry: QueueEntry | None, job: QueuedJob | None) -> str:
    """How a run stands, as a code of texts.json; a process that is gone is never called running."""
    beat = mapping(run.life)
    far = progress(run)
    ended = run.last("end")["time"] or 0
    state, begun = (job.state, job.started) if job is not None else ("stopped", 0)
    if entry is not None and entry.state == "waiting":
        return "queued"
    if state in BUSY or beat["alive"]:
        waits = "paused" if beat["alive"] and beat["state"] == "paused" else "running"
        held = "stopping" if entry is not None and entry.is_held else waits
        return (
            "suspended"
            if state == "paused"
            else "ending"
            if ended > max(begun, beat["started"] or 0)
            else held
        )
    if not run.journal or (state == "failed" and begun > ended):
        return state if state != "done" else "failed"
    word = standing(run, far.total is not None and far.done >= far.total)[0]
    return "dead" if word == "no end" or (state == "dead" and not ended) else word


def entries_ahead(root: Path, entry: QueueEntry) -> list[str]:
    """The entries of the queue that run, or where none does those that run before this one, in words."""
    found = queued.entries(queue_page.queue_folder(root))
    titles = {one.name: one.title for one in projects.list_projects(root)}
    before = found[: next(place for place, one in enumerate(found) if one.name == entry.name)]
    first = [one for one in found if one.state in BUSY] or [
        one for one in before if one.state == "waiting"
    ]
    return [f"{one.run.name} of {titles.get(one.run.parent.parent.name, '')}" for one in first]


def stands(
    asked: PageContext, name: str
) -> tuple[Run, QueueEntry | None, QueuedJob | None, str]:
    """A run, its entry of the queue, its last process, and how it stands."""
    run = read_live(run_folder(asked.current_project, name))
    entry = training_entry(asked.root, asked.current_project, name)
    job = run_job(asked.root, asked.current_project, name)
    return run, entry, job, run_status(run, entry, job)


def run_context(asked: PageContext) -> dict[str, Any]:
    """What the pages of a run say of it."""
    name = selected_run(asked)
    run, entry, job, code = stands(asked, name)
    verdict = run.last("verdict")
    best, why = (
        recommended_checkpoint(run, verdict)
        if verdict["turned"] or run.last("end")
        else (None, "")
    )
    # fmt: off
    return {
        "asked": asked, "project": asked.current_project, "name": name, "run": run, "job": job, "entry": entry, "far": progress(run),
        "code": code, "verdict": verdict, "best": best, "best_why": why, "saves": checkpoints(run.folder),
        "waits": entries_ahead(asked.root, entry) if entry is not None and code == "queued" else (),
        "busy": code in ("queued", "running", "paused", "suspended", "stopping", "ending"), "beat": mapping(run.life),
    }
    # fmt: on


def run_part(asked: PageContext) -> str:
    """How the run stands, its figures and its buttons."""
    queue_page.ensure_worker(asked.root)
    if not selected_run(asked):
        return render("train_none", asked=asked, project=asked.current_project)
    now = run_context(asked)
    run = now["run"]
    doctor = jobs.latest(asked.current_project.folder, "doctor", now["name"])
    if doctor is not None and not doctor.is_running and (run.written or 0) > doctor.started + 1:
        doctor = None  # it speaks of an earlier state
    memory = next((one["memory"] for one in reversed(run.journal) if one.get("memory")), None)
    found = {
        "findings": jobs.result(doctor) if doctor is not None and not doctor.is_running else None,
        "doctor": doctor,
    }
    chapters = {
        "exposure": exposure(run),
        "warned": warnings(run),
        "grounds": grounds(run) if run.validations else None,
    }
    return render(
        "train_run",
        **now,
        **found,
        **chapters,
        memory=memory,
        views=run.last("views"),
        cards=gpu.list_gpus(),
    )


def runs_part(asked: PageContext) -> str:
    """The list of runs."""
    rows = [(name, *stands(asked, name)) for name in run_names(asked)]
    return render("train_runs", runs=rows, chosen=selected_run(asked))


def branches(run: Path) -> list[tuple[str, Path]]:
    """The run's folder, and those of the steps that a return to an earlier one has set aside."""
    return [
        ("", run),
        *((f"branch {path.name}", path) for path in sorted(run.glob("branches/[0-9]*"))),
    ]


def previews_part(asked: PageContext) -> str:
    """What the viewer of previews shows, as data: for each prompt and seed the nearest clip and the videos by step."""
    rows = list[dict[str, Any]]()
    home = asked.current_project.folder
    name = selected_run(asked)
    for label, folder in branches(run_folder(asked.current_project, name)) if name else ():
        run = read_live(folder)
        checked = sum(path.stat().st_mtime_ns for path in folder.glob("check.json"))
        for (prompt, seed), cells in sample_rows(run).items():
            paths = (
                (step, folder / str(cell.get("path"))) for step, cell in sorted(cells.items())
            )
            there = [
                (step, path.relative_to(home).as_posix())
                for step, path in paths
                if path.is_file()
            ]
            row = {
                "branch": label,
                "prompt": prompt,
                "seed": seed,
                "near": nearest(home, folder, checked, prompt),
            }
            rows += [{**row, "cells": there}] if there else []
    return render("previews_data", rows=rows)


@lru_cache(maxsize=256)
def nearest(home: Path, run: Path, checked: int, prompt: str) -> Mapping[str, str] | None:
    """The training clip whose caption shares most words with the prompt; ``checked``: when the account was written."""
    used = [clip for clip in read_live(run).clips if clip["used"]]
    scores = [
        max((word_overlap(prompt, str(one)) for one in items(clip["captions"])), default=0)
        for clip in used
    ]
    return clip_of(home, run, used[scores.index(max(scores))]) if used else None


def clip_of(home: Path, run: Path, clip: Mapping[str, Any]) -> dict[str, str]:
    """A clip of a run's account: its name, and the path within the project of its video, or else of its picture."""
    path = Path(str(clip["path"]))
    picture = run / "pictures" / f"{str(clip.get('id'))[:16]}.jpg"
    shown = (
        path
        if path.suffix.lower() in PLAYABLE_SUFFIXES and path.is_relative_to(home) and path.is_file()
        else picture
    )
    return {
        "name": path.name,
        "path": shown.relative_to(home).as_posix() if shown.is_file() else "",
    }


def word_overlap(one: str, other: str) -> float:
    """The share of words that two texts have in common, of all their words."""
    first, second = (set(re.findall(r"\w+", words.lower())) for words in (one, other))
    return len(first & second) / len(first | second) if first | second else 0.0


REGIONS: Regions = {"runs": runs_part, "run": run_part, "previews": previews_part}


@routes.get("/p/{project}/train")
def show(asked: CurrentPage) -> Response:
    """The page."""
    return page_response(
        asked, "train", header.REGIONS | REGIONS, "Train", run=selected_run(asked), runs=run_names(asked)
    )


@routes.get("/p/{project}/exposure")
def seen(asked: CurrentPage) -> Response:
    """How often each clip was seen, and what the verdict rests on."""
    run = run_context(asked)["run"]
    return fragment(
        render(
            "train_exposure", d=exposure(run), grounds=grounds(run) if run.validations else None
        )
    )


@routes.get("/p/{project}/log")
def log(asked: CurrentPage, run: str, lines: bool = False) -> Response:
    """What a run's last process has printed: the whole file, or its last lines."""
    job = run_job(asked.root, asked.current_project, run_folder(asked.current_project, run).name)
    if job is None or not (job.folder / "log").is_file():
        raise HTTPException(404, "nothing has been printed yet")
    if lines:
        return PlainTextResponse("\n".join(jobs.log_tail(job, MAX_LOG_LINES)))
    return FileResponse(
        job.folder / "log", media_type="text/plain; charset=utf-8", filename=f"{run}.log"
    )


def ask(asked: PageContext, run: Path, words: FormData) -> str:
    """Ask the process of a run to save, to draw previews, or to stop, after its step."""
    if words["word"] not in ("save", "sample", "stop") or not (life(run) or {}).get("alive"):
        raise VideotuneError(f"{run.name} is not running")
    write_json(run / "control.json", {words["word"]: True})
    return ""


def resume(asked: PageContext, run: Path, words: FormData) -> str:
    """Queue the run again, from its newest checkpoint or an earlier one; with more steps where they are named."""
    refuse_running(asked, run)
    step = words.number("step")
    steps = words.number("steps")
    # with another number of steps the rate's schedule is of another length, and that was asked for
    more = (["--from", step] if step else []) + (
        ["--set", f"steps={steps}", "--override"] if steps else []
    )
    queue_page.submit(
        asked.root, asked.current_project, run.name, ["train", "--out", str(run), "--resume", *more]
    )
    return ""


def refuse_running(asked: PageContext, run: Path) -> None:
    """VideotuneError while a process is at the run."""
    job = run_job(asked.root, asked.current_project, run.name)
    if (job is not None and job.is_running) or (life(run) or {}).get("alive"):
        raise VideotuneError(f"{run.name} is running: stop it first")


def start_now(asked: PageContext, run: Path, words: FormData) -> str:
    """Start a run that waits, beside what runs already."""
    if (
        entry := training_entry(asked.root, asked.current_project, run.name)
    ) is None or entry.state != "waiting":
        raise VideotuneError(f"{run.name} does not wait")
    queued.start(queue_page.queue_folder(asked.root), entry, None)
    return ""


def changed_settings(project: Project, run: Path) -> dict[str, Any]:
    """The settings of a run that differ from the project's preset, without those that the studio sets itself."""
    config = mapping(read_cached(run / "config.json"))
    known = form.inherited_values(project.preset)
    origins = mapping(config["origins"])
    aside = ("datasets", "init_from", *projects.MANAGED_KEYS)
    own = {
        key: value
        for key, value in flatten(mapping(config["settings"])).items()
        if origins[key] in ("user", "preset")
    }
    return unflatten(
        {
            key: value
            for key, value in own.items()
            if key not in aside and value != known.get(key)
        }
    )


def use_settings(asked: PageContext, run: Path, words: FormData) -> str:
    """Write the run's settings into the form of the page Setup."""
    projects.save_draft(asked.current_project, changed_settings(asked.current_project, run))
    return f"Setup has the settings of {run.name}"


def checkpoint(run: Path, words: FormData) -> Path:
    """The folder of the checkpoint that a form names; VideotuneError where there is none."""
    step = int(words.number("step") or -1)
    there = dict(checkpoints(run))
    if step not in there:
        raise VideotuneError(f"{run.name} has no checkpoint of step {words['step']}")
    return there[step]


def remove(asked: PageContext, run: Path, words: FormData) -> str:
    """Move a run, with what was tried of it, into the bin, and take it out of the queue."""
    refuse_running(asked, run)
    for entry in queue_page.project_entries(asked.root, asked.current_project, run.name):
        queued.remove(queue_page.queue_folder(asked.root), entry.name)
    if paths := [
        path for path in (run, asked.current_project.folder / "tries" / run.name) if path.is_dir()
    ]:
        trash.move_to_trash(asked.current_project.folder, "run", run.name, paths)
    return f"{run.name} is in the bin"


ACTIONS: dict[str, Callable[[PageContext, Path, FormData], str]] = {
    "ask": ask, "resume": resume, "now": start_now, "use": use_settings, "remove": remove,
}  # fmt: skip
"""What can be asked of a run; each answers in a sentence. The queue stops, pauses and continues it."""


@routes.post("/p/{project}/run/{act}")
def act(act: str, asked: CurrentPage, words: PostedForm) -> Response:
    """Ask for something about a run."""
    if act not in ACTIONS:
        raise VideotuneError(f"a run cannot {act[:40]}")
    said = ACTIONS[act](asked, run_folder(asked.current_project, words["run"]), words)
    return reply(said, go=f"/p/{quote(asked.current_project.name)}/train" if act == "remove" else "")


@routes.post("/p/{project}/start")
def start(asked: CurrentPage, words: PostedForm) -> Response:
    """Queue a new run: of the project's settings, or of a run's, beginning with one of its checkpoints."""
    keys = None
    if words["run"]:
        run = run_folder(asked.current_project, words["run"])
        keys = changed_settings(asked.current_project, run) | {"init_from": str(checkpoint(run, words))}
    name = queue_page.queue_run(asked.root, asked.current_project, words["title"], keys)
    return reply(go=f"/p/{quote(asked.current_project.name)}/train?run={quote(name)}")
