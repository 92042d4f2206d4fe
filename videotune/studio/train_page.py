"""The page Train: the state of a run, its previews and curves, and the actions on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse, PlainTextResponse

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import entries as queued
from videotune.queue import jobs
from videotune.queue.jobs import QueuedJob
from videotune.reporter.build import warnings
from videotune.reporter.curves import exposure
from videotune.reporter.kept import kept_figures
from videotune.reporter.outcome import is_result_next, recommended_checkpoint
from videotune.reporter.progress import progress
from videotune.reporter.read import Run, mapping
from videotune.runs.rank_figures import find_stragglers, ranks_in
from videotune.runs.run_life import life
from videotune.studio import (
    data_changes,
    gpu,
    header,
    projects,
    queue_page,
    restarts,
    run_cards,
    stages,
    trash,
)
from videotune.studio.base_model_problem import problem_of_run
from videotune.studio.checkpoint_words import describe_best_step, is_unmeasured
from videotune.studio.field_errors import at_field
from videotune.studio.further_steps import refuse_no_steps
from videotune.studio.preview_outlook import preview_outlook
from videotune.studio.preview_rows import preview_rows
from videotune.studio.projects import Project
from videotune.studio.queue_page import run_folder, run_job, training_entry
from videotune.studio.run_settings import (
    describe_use,
    replace_preset,
    settings_of_run,
)
from videotune.studio.run_states import (
    BUSY_STATUSES,
    entries_ahead,
    run_names,
    run_state,
    selected_run,
)
from videotune.studio.start_questions import ask_before_start
from videotune.studio.status import (
    checkpoints,
    process_progress,
    read_cached,
    read_live,
)
from videotune.studio.validation_grounds import validation_grounds
from videotune.studio.web import (
    CurrentPage,
    FormData,
    PageContext,
    PostedForm,
    Regions,
    fragment,
    json_reply,
    page_response,
    render,
    reply,
)

routes = APIRouter()


MAX_LOG_LINES = 400
"""Lines of a log that the page shows."""


def run_context(page: PageContext) -> dict[str, Any]:
    """Return the template variables of the selected run."""
    name = selected_run(page)
    run, entry, job, code = run_state(page, name)

    verdict = run.last("verdict")
    saves = checkpoints(run.folder)
    best = None
    best_why = ""
    if verdict["turned"] or run.last("end"):
        best, best_why = recommended_checkpoint(run, verdict)

    ranks = ranks_in(run.life)
    waits = (
        entries_ahead(page.root, entry)
        if entry is not None and code == "queued"
        else ()
    )
    return {
        "context": page,
        "project": page.current_project,
        "name": name,
        "run": run,
        "job": job,
        "entry": entry,
        "far": process_progress(run, job),
        "is_complete": progress(run).is_complete,
        "code": code,
        "verdict": verdict,
        "best": best,
        "best_why": best_why,
        "best_note": ""
        if best_why
        else describe_best_step(
            verdict, best, saves, dict(run.held_out_losses), run.start
        ),
        "is_unmeasured": is_unmeasured(run, best, best_why),
        "is_result_next": is_result_next(code, verdict, best),
        "kept": kept_figures(run),
        "saves": saves,
        "waits": waits,
        "unexpected_end": restarts.unexpected_end(page, entry, job),
        "clips_changed": restarts.stopped_by_changed_clips(job),
        "restarted_from": restarts.restart_step(run, job),
        "ranks": ranks,
        "stragglers": find_stragglers(ranks),
        "busy": code in BUSY_STATUSES,
        "use_words": describe_use(page.current_project, run.folder)
        if run.config
        else "",
        "beat": mapping(run.life),
    }


def run_part(page: PageContext) -> str:
    """Render the status of the run, its figures and its buttons."""
    queue_page.ensure_worker(page.root)
    if not selected_run(page):
        return stages.no_run(page)

    run_data = run_context(page)
    run = run_data["run"]
    state = run_state(page, run_data["name"])
    doctor = _current_doctor(page.current_project, run, run_data["name"])
    findings = (
        jobs.result(doctor) if doctor is not None and not doctor.is_running else None
    )
    memory = next(
        (record["memory"] for record in reversed(run.journal) if record.get("memory")),
        None,
    )

    return render(
        "train_run",
        **run_data,
        problem=problem_of_run(
            run, run_data["entry"], run_data["job"], run_data["code"]
        ),
        doctor=doctor,
        findings=findings,
        exposure=exposure(run),
        warned=warnings(run),
        grounds=validation_grounds(run),
        memory=memory,
        views=run.last("views"),
        cards=gpu.list_gpus(),
        settings_changed=stages.resumes_other_settings(page.current_project, state),
    )


def _current_doctor(project: Project, run: Run, name: str) -> QueuedJob | None:
    """Return the last doctor job of a run, unless the run has gone on since."""
    doctor = jobs.latest(project.folder, "doctor", name)
    if doctor is None or doctor.is_running:
        return doctor
    is_outdated = (run.written or 0) > doctor.started + 1
    return None if is_outdated else doctor


def runs_part(page: PageContext) -> str:
    """Render the list of runs."""
    rows = [
        (name, *run_state(page, name))
        for name in run_names(page.current_project, page.root)
    ]
    return render("train_runs", runs=rows, chosen=selected_run(page))


def previews_part(page: PageContext) -> str:
    """Render the data of the preview viewer: for each prompt and seed the videos by
    step.
    """
    name = selected_run(page)
    if not name:
        return render("previews_data", name="", rows=[], start="")

    run, _, _, code = run_state(page, name)
    return render(
        "previews_data",
        project=page.current_project,
        name=name,
        rows=preview_rows(page.current_project, name),
        start=run.start.name,
        outlook=preview_outlook(run, is_busy=code in BUSY_STATUSES),
    )


HAS_STEPS = "journal.jsonl"
"""A file of each run that has begun to train."""


def runs_with(project: Project, root: Path, *patterns: str) -> list[str]:
    """Return a project's runs that have a file of one of these patterns, newest first."""
    names = []
    for name in run_names(project, root):
        folder = run_folder(project, name)
        if any(True for pattern in patterns for _ in folder.glob(pattern)):
            names.append(name)
    return names


def comparable_runs(page: PageContext) -> dict[str, Any]:
    """Return the runs that have something to stand beside that of another run, and the
    other projects that have any.
    """
    project = page.current_project
    previews = ("samples/step-*", "branches/*/samples/step-*")
    return {
        "runs_with_previews": runs_with(project, page.root, *previews),
        "runs_with_steps": runs_with(project, page.root, HAS_STEPS),
        "projects_with_steps": [
            other
            for other in projects.list_projects(page.root)
            if other.name != project.name
            and not other.damage
            and runs_with(other, page.root, HAS_STEPS)
        ],
    }


REGIONS: Regions = {"runs": runs_part, "run": run_part, "previews": previews_part}


@routes.get("/p/{project}/train")
def show(page: CurrentPage) -> Response:
    """Show the page."""
    return page_response(
        page,
        "train",
        header.REGIONS | REGIONS,
        "Train",
        run=selected_run(page),
        runs=run_names(page.current_project, page.root),
        gpu_choices=run_cards.choices(),
        **comparable_runs(page),
    )


@routes.get("/p/{project}/previews")
def show_previews(page: CurrentPage) -> Response:
    """Send the previews of the run that the address names, to stand beside others."""
    name = selected_run(page)
    project = page.current_project
    if not name:
        raise VideotuneError(
            f"{project.title} has no run yet: start one on the page Setup"
        )
    start = read_live(run_folder(project, name)).start
    return json_reply({"rows": preview_rows(project, name), "start": start.name})


@routes.get("/p/{project}/exposure")
def show_exposure(page: CurrentPage) -> Response:
    """Send how often each clip was used, and the grounds of the verdict."""
    run = run_context(page)["run"]
    return fragment(
        render("train_exposure", d=exposure(run), grounds=validation_grounds(run))
    )


@routes.get("/p/{project}/log")
def log(page: CurrentPage, run: str, lines: bool = False) -> Response:
    """Send the log of a run's last process: the file, or only its last lines."""
    project = page.current_project
    job = run_job(page.root, project, run_folder(project, run).name)
    if job is None or not (job.folder / "log").is_file():
        raise HTTPException(404, "nothing has been printed yet")

    if lines:
        return PlainTextResponse("\n".join(jobs.log_tail(job, MAX_LOG_LINES)))
    return FileResponse(
        job.folder / "log",
        media_type="text/plain; charset=utf-8",
        filename=f"{run}.log",
    )


def ask(page: PageContext, run: Path, form: FormData) -> str:
    """Let the process of a run save, sample previews, or stop after its step."""
    command = form["word"]
    if command not in ("save", "sample", "stop") or not _is_alive(run):
        raise VideotuneError(f"{run.name} is not running")
    write_json(run / "control.json", {command: True})
    return ""


def _is_alive(run: Path) -> bool:
    return bool((life(run) or {}).get("alive"))


def resume(page: PageContext, run: Path, form: FormData) -> str:
    """Queue the run again from a checkpoint, the newest by default, or with more steps."""
    refuse_running(page, run)
    arguments = ["train", "--out", str(run), "--resume"]

    step = form.number("step")
    if step:
        arguments += ["--from", step]

    steps = form.number("steps")
    run_read, _, _, code = run_state(page, run.name)
    with at_field("steps"):
        refuse_no_steps(run_read, is_done=code == "done", start=step, end=steps)
    if steps:
        # Another number of steps changes the learning rate schedule, as the user wants
        # here.
        arguments += ["--set", f"steps={steps}", "--override"]

    if form["data"] == "changed" or form["sure"]:
        arguments.append("--allow-data-change")

    check_run_paths(page, run)
    cards = run_cards.cards_of_run(run)  # a run that has left the queue keeps them
    queue_page.submit(page.root, page.current_project, run.name, arguments, cards=cards)
    return ""


def check_run_paths(page: PageContext, run: Path) -> None:
    """Raise VideotuneError if the settings of a run name a path that the user may not
    name; a run may have been imported, or copied here.
    """
    config = mapping(read_cached(run / "config.json"))
    page.path_rule.check_config(
        {"settings": config["settings"], "asked": config["asked"]}
    )


def refuse_running(page: PageContext, run: Path) -> None:
    """Raise VideotuneError if a process works on the run."""
    job = run_job(page.root, page.current_project, run.name)
    if (job is not None and job.is_running) or _is_alive(run):
        raise VideotuneError(f"{run.name} is running: stop it first")


def start_now(page: PageContext, run: Path, form: FormData) -> str:
    """Start a waiting run, in parallel with the running ones."""
    entry = training_entry(page.root, page.current_project, run.name)
    if entry is None or entry.state != "waiting":
        raise VideotuneError(f"{run.name} is not waiting in the queue")
    queued.start(queue_page.queue_folder(page.root), entry)
    return ""


def use_settings(page: PageContext, run: Path, form: FormData) -> str:
    """Copy the run's settings, with its model, to the page Setup."""
    project = page.current_project
    check_run_paths(page, run)
    end_of_message = describe_use(project, run).removeprefix("those of ")
    with projects.lock_of(project.folder):
        settings = settings_of_run(project, run)
        projects.save_draft(project, settings.keys)
        projects.update(project, preset=settings.preset or None, earlier_values=None)
    return f"Setup has the settings of {end_of_message}"


def checkpoint(run: Path, form: FormData) -> Path:
    """Return the folder of the checkpoint that a form names.

    Raises:
        VideotuneError: if there is none.
    """
    step = int(form.number("step") or -1)
    folder_by_step = dict(checkpoints(run))
    if step not in folder_by_step:
        raise VideotuneError(f"{run.name} has no checkpoint of step {form['step']}")
    return folder_by_step[step]


def remove(page: PageContext, run: Path, form: FormData) -> str:
    """Move a run with its tries to the bin, and remove it from the queue."""
    refuse_running(page, run)
    project = page.current_project
    for entry in queue_page.project_entries(page.root, project, run.name):
        queued.remove(queue_page.queue_folder(page.root), entry.name)

    folders = (run, project.folder / "tries" / run.name)
    existing_folders = [folder for folder in folders if folder.is_dir()]
    if existing_folders:
        trash.move_to_trash(project.folder, "run", run.name, existing_folders)
    return f"{run.name} is in the bin"


ACTIONS: dict[str, Callable[[PageContext, Path, FormData], str]] = {
    "ask": ask,
    "resume": resume,
    "now": start_now,
    "use": use_settings,
    "remove": remove,
}
"""The actions on a run; each returns the message to show.

Stop, pause and continue are actions of the queue. The page Results adds actions of its
own.
"""


@routes.post("/p/{project}/run/{act}")
def act(act: str, page: CurrentPage, form: PostedForm) -> Response:
    """Perform an action on a run."""
    if act not in ACTIONS:
        raise VideotuneError(f"a run has no action {act[:40]}")

    project = page.current_project
    run = run_folder(project, form["run"])
    if act == "resume":
        question = data_changes.ask_about_changes(project, read_live(run), form)
        if question is not None:
            return question
    message = ACTIONS[act](page, run, form)
    redirect = f"/p/{quote(project.name)}/train" if act == "remove" else ""
    return reply(message, redirect=redirect)


@routes.post("/p/{project}/start")
def start(page: CurrentPage, form: PostedForm) -> Response:
    """Queue a new run with the project's settings, or from a checkpoint of another run."""
    project = page.current_project
    keys = None
    questions = None if form["run"] else ask_before_start(project, form)
    if questions is not None:
        return questions
    if form["run"]:
        run = run_folder(project, form["run"])
        check_run_paths(page, run)
        settings = settings_of_run(project, run)
        project = replace_preset(project, settings.preset)
        keys = {**settings.keys, "init_from": str(checkpoint(run, form))}

    cards = run_cards.cards_from(form)
    name = queue_page.queue_run(page.root, project, form["title"], keys, cards)
    return reply(redirect=f"/p/{quote(project.name)}/train?run={quote(name)}")
