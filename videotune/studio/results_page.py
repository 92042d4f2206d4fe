"""The page Results: the recommended checkpoint, all checkpoints, tried prompts, files for other programs, publishing."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import jobs
from videotune.reporter.build import write_comparison
from videotune.reporter.inventory import use
from videotune.reporter.outcome import grounds
from videotune.reporter.read import Run, items, mapping, points
from videotune.runs.schemas import load_json
from videotune.studio import header, queue_page, train_page, trash
from videotune.studio.projects import inside, texts
from videotune.studio.queue_page import run_folder
from videotune.studio.status import read_cached
from videotune.studio.train_page import branches, checkpoint, selected_run, refuse_running
from videotune.studio.web import FormData, CurrentPage, PageContext, Regions, render, page_response

routes = APIRouter()
MAX_TRIES = 24
"""So many of the latest tries are shown."""

RUN_FILES = ("report.html", "export/README.md")
"""What is linked where a run has it: the report and the model card."""


def summary(asked: PageContext) -> str:
    """The recommended checkpoint and why it is that one, the checkpoints, the written files, and what is being written."""
    if not selected_run(asked):
        return render("train_none", asked=asked, project=asked.current_project)
    now = train_page.run_context(asked)
    home = asked.current_project.folder
    run = now["run"]
    works = {
        kind: jobs.latest(home, kind, now["name"]) for kind in ("publish", "card", "report")
    }
    works["export"] = next(
        iter(queue_page.jobs_about(asked.root, asked.current_project, now["name"], "export")), None
    )
    given = {
        "files": list(exported_files(home, run.folder)),
        "works": works,
        "size": disk_usage,
        "formats": export_formats(run),
        "home": home,
    }
    given |= {
        "there": [name for name in RUN_FILES if (run.folder / name).is_file()],
        "use": use(run),
    }
    losses = dict(points(run.validations, "held_out", "normalised"))
    given |= {
        "losses": losses,
        "grounds": grounds(run) if losses else None,
        "measured": list(metric_samples(home, run)),
    }
    return render("results_summary", **now, **given)


def exported_files(home: Path, run: Path) -> Iterator[tuple[str, Any, Path]]:
    """The files that a run and its branches have written for other programs, which are still there."""
    for label, folder in branches(run):
        for one in map(mapping, items(read_cached(folder / "exports.json"))):
            if (path := folder / str(one["path"])).exists() and path.resolve().is_relative_to(
                home.resolve()
            ):
                yield label, one, path


def disk_usage(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file())


def export_formats(run: Run) -> tuple[str, ...]:
    """The formats that can be written of what the run trained."""
    method = run.setting("training_method")
    variant = run.setting("lora", "variant")
    every = ("diffusers",) if method == "FINE_TUNE" else ("comfyui", "diffusers")
    return tuple(texts()["offered"].get(str(variant), every)) if method == "LORA" else every


def metric_samples(home: Path, run: Run) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """The samples of the latest sample metrics, each with the training clip that is nearest in pictures."""
    clips = {str(clip["path"]): clip for clip in run.clips}
    for one in map(mapping, items(run.last("sample_metrics")["samples"])):
        if (path := run.folder / str(one["path"])).is_file():
            near = clips.get(str(one["clip"]), {"path": one["clip"]})
            yield (
                path.relative_to(home).as_posix(),
                one,
                train_page.clip_of(home, run.folder, near),
            )


def tries(asked: PageContext) -> str:
    """What was tried, the last one first, each with what became of it."""
    name = selected_run(asked)
    home = asked.current_project.folder
    entries = (
        {one.name: one for one in queue_page.project_entries(asked.root, asked.current_project, name)} if name else {}
    )
    books = (
        sorted((home / "tries" / name).glob("*/try.json"), reverse=True)[:MAX_TRIES] if name else []
    )
    rows = [
        (
            book.parent,
            known := mapping(load_json(book, "remove it")),
            entries.get(known["entry"]),
        )
        for book in books
    ]
    return render("results_tries", project=asked.current_project, name=name, home=home, rows=rows)


REGIONS: Regions = {"summary": summary, "tries": tries, "previews": train_page.previews_part}


@routes.get("/p/{project}/results")
def show(asked: CurrentPage) -> Response:
    """The page."""
    more: dict[str, Any] = {"run": (name := selected_run(asked)), "runs": train_page.run_names(asked)}
    if name:
        now = train_page.run_context(asked)
        more |= {"saves": now["saves"], "best": now["best"], "formats": export_formats(now["run"])}
    return page_response(asked, "results", header.REGIONS | REGIONS, "Results", **more)


@routes.get("/p/{project}/compare")
def compare(asked: CurrentPage, run: Annotated[list[str], Query()]) -> Response:
    """A page that compares runs: what differs in their settings, and their validation losses on one chart."""
    folders = [folder for name in run if (folder := run_folder(asked.current_project, name)).is_dir()]
    write_comparison(folders, asked.current_project.folder / "runs" / "comparison.html")
    return RedirectResponse(f"/p/{asked.current_project.name}/file/runs/comparison.html", 303)


def draw(asked: PageContext, run: Path, words: FormData) -> str:
    """Try a prompt with a checkpoint, when its turn in the queue comes."""
    if not (prompt := words["prompt"].strip()):
        raise VideotuneError("type what the video should show")
    folder = asked.current_project.folder / "tries" / run.name / f"{time.time_ns():x}"
    options = {"--step": words.number("step"), "--seed": words.number("seed")}
    options |= {"--strength": words.number("strength", whole=False)}
    more = [part for option, value in options.items() if value for part in (option, value)]
    more += (
        ["--set", f"sample.negative={words['negative']}"] if words["negative"].strip() else []
    )
    command = ["sample", str(run), "--prompt", prompt, "--out", str(folder), *more]
    entry = queue_page.submit(asked.root, asked.current_project, run.name, command, "sample")
    folder.mkdir(parents=True)
    write_json(folder / "try.json", {**words, "entry": entry, "asked": time.time()})
    return ""


def dismiss(asked: PageContext, run: Path, words: FormData) -> str:
    """Move a try to the bin, and take it out of the queue."""
    folder = inside(asked.current_project.folder / "tries" / run.name, words["try"])
    for entry in queue_page.project_entries(asked.root, asked.current_project, run.name):
        if str(folder) in entry.arguments:
            queue_page.ACTIONS["remove"][0](queue_page.queue_folder(asked.root), entry.name)
    trash.move_to_trash(asked.current_project.folder, "sample", words["prompt"][:60] or folder.name, [folder])
    return ""


def export(asked: PageContext, run: Path, words: FormData) -> str:
    """Write a checkpoint for other programs, when its turn in the queue comes."""
    if not (formats := words.all("format")) and not words["merge"]:
        raise VideotuneError("choose at least one format")
    step = ["--step", words.number("step")] if words["step"] else []
    more = [part for name in formats for part in ("--format", name)] + (
        ["--merge"] if words["merge"] else []
    )
    queue_page.submit(
        asked.root, asked.current_project, run.name, ["export", str(run), *step, *more], "export"
    )
    return ""


def delete(asked: PageContext, run: Path, words: FormData) -> str:
    """Move a checkpoint to the bin."""
    refuse_running(asked, run)
    folder = checkpoint(run, words)
    trash.move_to_trash(asked.current_project.folder, "checkpoint", f"{run.name}, step {words['step']}", [folder])
    return f"The checkpoint of step {words['step']} is in the bin"


def write(asked: PageContext, run: Path, words: FormData) -> str:
    """Run a command that needs no card and about this run alone: report, model card, publishing, doctor."""
    repo = ["--repo", words["repo"].strip()] if words["repo"].strip() else []
    more = {
        "report": [],
        "doctor": ["--json"],
        "card": ["--out", str(run / RUN_FILES[1])],
        "publish": repo,
    }
    if words["kind"] not in more:
        raise VideotuneError(f"there is no command {words['kind'][:40]}")
    jobs.restart(
        asked.current_project.folder,
        words["kind"],
        [words["kind"], str(run), *more[words["kind"]]],
        run.name,
    )
    return ""


train_page.ACTIONS |= {
    "draw": draw,
    "dismiss": dismiss,
    "export": export,
    "delete": delete,
    "write": write,
}
