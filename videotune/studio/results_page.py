"""The page Results: checkpoints, tried prompts, exports for other programs, and
publishing.
"""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse
from huggingface_hub import get_token

from videotune.errors import VideotuneError
from videotune.files import disk_usage, write_json
from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.reporter.comparison import write_comparison
from videotune.reporter.inventory import use
from videotune.reporter.read import Run, items, mapping
from videotune.reporter.sample_findings import sample_findings
from videotune.sampling.picture_faults import describe_sound, remark_at
from videotune.studio import (
    header,
    model_choices,
    queue_page,
    run_states,
    stages,
    train_page,
    trash,
)
from videotune.studio.data_changes import changes_since
from videotune.studio.downloads import COMPARISON, download_name
from videotune.studio.field_errors import FieldError, at_field
from videotune.studio.projects import find_project, inside, texts
from videotune.studio.queue_page import run_folder
from videotune.studio.records import Try, read_record
from videotune.studio.result_files import (
    chosen_comfyui_loras,
    comfyui_files,
    comfyui_loras,
    copies_in_comfyui,
    copy_to_comfyui,
    exported_files,
    files_to_take,
    step_to_take,
    use_of_file,
)
from videotune.studio.run_states import selected_run
from videotune.studio.run_work import (
    RunExport,
    ahead_of,
    export,
    export_at,
    exports_of,
    is_queued_already,
)
from videotune.studio.settings import read_settings
from videotune.studio.shown_samples import preview_of, sample_groups
from videotune.studio.sound_settings import prompt_files
from videotune.studio.status import read_live
from videotune.studio.sweep_records import runs_of_sweeps
from videotune.studio.train_page import checkpoint, refuse_running
from videotune.studio.web import (
    UNEXPECTED,
    CurrentPage,
    FormData,
    PageContext,
    Regions,
    page_response,
    render,
)

routes = APIRouter()

MAX_TRIES = 24
"""Number of latest tries that are shown."""

TRY_FIELDS = ("step", "seed", "strength", "negative")
"""Fields of a tried prompt that its card shows."""

REPORT = "report.html"
MODEL_CARD = "export/README.md"

RUN_FILES = (REPORT, MODEL_CARD)
"""Files that the page links if a run has them."""


def result(page: PageContext) -> str:
    """Render the result of the run: the files to take of the recommended checkpoint, and
    why it is recommended.
    """
    if not selected_run(page):
        return stages.no_run(page)

    run_data = train_page.run_context(page)
    run = run_data["run"]
    files = list(exported_files(page.current_project, run.folder))
    step = step_to_take(run_data["best"], run_data["saves"], files)
    comfyui, comfyui_fault = _comfyui_folder(page)
    state = (run, run_data["entry"], run_data["job"], run_data["code"])
    is_older = stages.has_changed_since(page.current_project, state)

    return render(
        "results_result",
        **run_data,
        step=step,
        taken=files_to_take(files, step),
        formats=export_formats(run),
        preview=preview_of(run, page.current_project.folder, step),
        samples=sample_findings(run.journal, step),
        losses=dict(run.held_out_losses),
        works=_output_jobs(page, run_data["name"]),
        export=export_at(exports_of(page, run_data["name"]), step),
        there=[name for name in RUN_FILES if (run.folder / name).is_file()],
        use=use(run),
        comfyui=comfyui,
        comfyui_fault=comfyui_fault,
        copies=copies_in_comfyui(files_to_take(files, step), comfyui),
        download_name=partial(download_name, page.current_project),
        is_older=is_older,
        is_of_sweep=run_data["name"] in runs_of_sweeps(page.current_project),
        clip_changes=stages.clip_changes(page.current_project, state),
        run_of_now=stages.run_with_settings_of_now(page, run_data["name"]),
        has_clips_of_now=partial(_has_clips_of_now, page),
    )


def _has_clips_of_now(page: PageContext, other_run: stages.RunOfNow) -> bool:
    """Return whether the clips are still those of a run that was given them."""
    return not changes_since(page.current_project, other_run.state[0])


def _comfyui_folder(page: PageContext) -> tuple[Path | None, str]:
    """Return ComfyUI's folder of LoRA files, and what is wrong with the setting."""
    try:
        return comfyui_loras(read_settings(page.root).get("comfyui")), ""
    except VideotuneError as error:
        return None, str(error)


def summary(page: PageContext) -> str:
    """Render the checkpoints, all written files, and publishing."""
    if not selected_run(page):
        return ""

    run_data = train_page.run_context(page)
    run = run_data["run"]
    home = page.current_project.folder
    losses = dict(run.held_out_losses)
    files = list(exported_files(page.current_project, run.folder))
    step = step_to_take(run_data["best"], run_data["saves"], files)
    saved_steps = [saved for saved, _ in run_data["saves"]]

    return render(
        "results_summary",
        **run_data,
        works=_output_jobs(page, run_data["name"]),
        size=disk_usage,
        remarks={saved: remark_at(run.journal, saved) for saved in saved_steps},
        formats=export_formats(run),
        home=home,
        describe_sound=describe_sound,
        there=[name for name in RUN_FILES if (run.folder / name).is_file()],
        files=files,
        comfyui_files=comfyui_files(files),
        comfyui_exports=_comfyui_exports(page, run_data["name"]),
        has_login=get_token() is not None,
        download_name=partial(download_name, page.current_project),
        use=use(run),
        code_of=partial(use_of_file, run, files),
        losses=losses,
        sample_groups=sample_groups(home, run, step, saved_steps),
    )


def _comfyui_exports(page: PageContext, run_name: str) -> dict[int | None, RunExport]:
    """Return the exports for ComfyUI that wait or run, by the step of the checkpoint."""
    return {
        queued.step: queued
        for queued in exports_of(page, run_name)
        if queued.is_active and "comfyui" in queued.formats
    }


def _output_jobs(page: PageContext, run_name: str) -> dict[str, jobs.QueuedJob | None]:
    """Return the last job of each kind that writes outputs of a run at once."""
    folder = page.current_project.folder
    return {
        kind: jobs.latest(folder, kind, run_name)
        for kind in ("publish", "card", "report")
    }


def has_adapter(run: Run) -> bool:
    """Return whether a run trains an adapter: it can be merged, and has a strength."""
    return run.setting("training_method") not in ("FINE_TUNE", "EMBEDDING")


def export_formats(run: Run) -> tuple[str, ...]:
    """Return the formats in which the run's result can be exported."""
    method = run.setting("training_method")
    if method == "FINE_TUNE":
        return ("diffusers",)

    all_formats = ("comfyui", "diffusers")
    if method != "LORA":
        return all_formats
    variant = str(run.setting("lora", "variant"))
    return tuple(texts()["offered"].get(variant, all_formats))


def tries(page: PageContext) -> str:
    """Render the tried prompts with their results, newest first."""
    name = selected_run(page)
    project = page.current_project

    rows, damaged = _read_tries(page, name) if name else ([], [])
    return render(
        "results_tries",
        project=project,
        name=name,
        home=project.folder,
        rows=rows,
        damaged=damaged,
    )


TriedPrompt = tuple[Path, Any, QueueEntry | None]
"""Folder of a try, its record, and its entry of the queue."""


def _read_tries(page: PageContext, name: str) -> tuple[list[TriedPrompt], list[str]]:
    """Return the tries of a run, newest first, and the messages of damaged ones."""
    project = page.current_project
    entries = queue_page.shown_entries(page.root, project, name)
    entry_by_name = {entry.name: entry for entry in entries}
    folder = project.folder / "tries" / name

    rows: list[TriedPrompt] = []
    damaged = []
    for path in sorted(folder.glob("*/try.json"), reverse=True)[:MAX_TRIES]:
        try:
            record = mapping(read_record(path, Try, "remove it"))
        except VideotuneError as error:
            damaged.append(str(error))
            continue
        rows.append((path.parent, record, entry_by_name.get(record["entry"])))
    return rows, damaged


def trying(page: PageContext) -> str:
    """Render what becomes of the newest tried prompt, for below its button."""
    name = selected_run(page)
    if not name:
        return ""

    rows, _ = _read_tries(page, name)
    newest = rows[:1]
    ahead = ahead_of(page, newest[0][2]) if newest else []
    return render(
        "results_trying", project=page.current_project, rows=newest, ahead=ahead
    )


def exporting(page: PageContext) -> str:
    """Render what becomes of the newest exports, for below their button."""
    name = selected_run(page)
    exports = exports_of(page, name) if name else []
    if not exports:
        return ""

    active = [queued for queued in exports if queued.is_active]
    return render("results_exporting", exports=active or exports[:1])


REGIONS: Regions = {
    "trying": trying,
    "exporting": exporting,
    "result": result,
    "summary": summary,
    "tries": tries,
    "previews": train_page.previews_part,
}


@routes.get("/p/{project}/results")
def show(page: CurrentPage) -> Response:
    """Show the page."""
    name = selected_run(page)
    data: dict[str, Any] = {
        "run": name,
        "runs": run_states.run_names(page.current_project, page.root),
    }
    data |= train_page.comparable_runs(page)
    if name:
        data |= _dialog_data(page)
    return page_response(page, "results", header.REGIONS | REGIONS, "Results", **data)


def _dialog_data(page: PageContext) -> dict[str, Any]:
    """Return what the dialogs of the page offer: checkpoints, and the step of the files.

    If a file of the run is damaged they offer nothing; the summary reports it.
    """
    try:
        run_data = train_page.run_context(page)
        formats = export_formats(run_data["run"])
    except UNEXPECTED:
        return {
            "saves": [],
            "best": None,
            "is_unmeasured": False,
            "step": None,
            "formats": (),
            "has_adapter": False,
            "given": {},
        }

    files = list(exported_files(page.current_project, run_data["run"].folder))
    return {
        "saves": run_data["saves"],
        "best": run_data["best"],
        "is_unmeasured": run_data["is_unmeasured"],
        "step": step_to_take(run_data["best"], run_data["saves"], files),
        "formats": formats,
        "has_adapter": has_adapter(run_data["run"]),
        "given": files_taken(run_data["run"]),
    }


def files_taken(run: Run) -> dict[str, str]:
    """Return what a sample of a run can be given: the words of each file by its key."""
    takes = mapping(run.plan)["takes"]
    if takes is None:
        takes = model_choices.conditions_of(str(run.setting("base_model_name")))
    offered = prompt_files(items(takes), run.setting("generate"))
    return {file.key: file.action for file in offered.values() if file.is_offered}


@routes.get("/p/{project}/compare")
def compare(
    page: CurrentPage,
    run: Annotated[list[str], Query()],
    beside: str = "",
) -> Response:
    """Write a page that compares runs, their settings and validation losses, and show
    it.

    Args:
        page: the page.
        run: runs of the project.
        beside: another project, all of whose runs are compared too.
    """
    project = page.current_project
    folders = [run_folder(project, name) for name in run]
    if beside:
        other = find_project(page.root, beside)
        names = train_page.runs_with(other, page.root, train_page.HAS_STEPS)
        folders += [run_folder(other, name) for name in names]

    existing_folders = [folder for folder in folders if folder.is_dir()]
    if not existing_folders:
        raise VideotuneError(
            f"{project.title} has no such run: choose others on the page Train"
        )
    write_comparison(existing_folders, project.folder / COMPARISON)
    return RedirectResponse(f"/p/{project.name}/file/{COMPARISON}", 303)


def draw(page: PageContext, run: Path, form: FormData) -> str:
    """Queue a sample of a prompt with a checkpoint."""
    prompt = form["prompt"].strip()
    if not prompt:
        raise FieldError(
            "prompt: the field is empty. Describe what the video should show.",
            "prompt",
        )

    train_page.check_run_paths(page, run)
    folder = page.current_project.folder / "tries" / run.name / f"{time.time_ns():x}"
    arguments = ["sample", str(run), "--prompt", prompt, "--out", str(folder)]
    options = {
        "--step": form.number("step"),
        "--seed": form.number("seed"),
        "--strength": form.number("strength", decimal=True),
    }
    for option, value in options.items():
        if value:
            arguments += [option, value]
    for key in texts()["prompt_files"]:
        if form[key].strip():
            path = str(page.current_project.folder / form[key].strip())
            with at_field(key):
                page.path_rule.check_path(path, key)
            arguments += [f"--{key.replace('_', '-')}", path]
    if form["negative"].strip():
        arguments += ["--set", f"sample.negative={form['negative']}"]

    with queue_page.queue_lock:
        if is_queued_already(page, run.name, arguments):
            return "This video is queued already"
        entry = queue_page.submit(
            page.root, page.current_project, run.name, arguments, "sample"
        )
    folder.mkdir(parents=True)
    record = {name: form[name] for name in TRY_FIELDS if form[name]}
    record["prompt"] = prompt
    write_json(
        folder / "try.json", {**record, "entry": entry, "asked": round(time.time(), 3)}
    )
    return ""


def dismiss(page: PageContext, run: Path, form: FormData) -> str:
    """Move a try to the bin and remove it from the queue."""
    project = page.current_project
    folder = inside(project.folder / "tries" / run.name, form["try"])
    remove_entry = queue_page.ACTIONS["remove"][0]
    for entry in queue_page.project_entries(page.root, project, run.name):
        if str(folder) in entry.arguments:
            remove_entry(queue_page.queue_folder(page.root), entry.name)

    title = form["prompt"][:60] or folder.name
    trash.move_to_trash(project.folder, "sample", title, [folder])
    return ""


def copy(page: PageContext, run: Path, form: FormData) -> str:
    """Copy the files of a step into ComfyUI's folder, which the form may name first."""
    with at_field("comfyui"):
        folder = form["comfyui"].strip()
        loras = chosen_comfyui_loras(page.root, page.path_rule, folder)
    project = page.current_project
    step = int(form.number("step") or -1)
    files = files_to_take(list(exported_files(project, run)), step)
    copies = [
        copy_to_comfyui(file, project, loras)
        for file in files
        if file.format == "comfyui"
    ]
    if not copies:
        raise VideotuneError(f"step {step} has no file for ComfyUI: write it first")
    names = ", ".join(path.name for path in copies)
    if read_live(run).is_toy:
        return f"{names}: in ComfyUI's folder. ComfyUI does not have the toy model."
    return f"{names}: in ComfyUI's folder. Press R in ComfyUI to list it."


def delete(page: PageContext, run: Path, form: FormData) -> str:
    """Move a checkpoint to the bin."""
    refuse_running(page, run)
    folder = checkpoint(run, form)
    title = f"{run.name}, step {form['step']}"
    trash.move_to_trash(page.current_project.folder, "checkpoint", title, [folder])
    return f"The checkpoint of step {form['step']} is in the bin"


def write(page: PageContext, run: Path, form: FormData) -> str:
    """Run a command that needs no GPU: report, doctor, model card, or publishing."""
    repo = form["repo"].strip()
    options_by_kind: dict[str, list[str]] = {
        "report": [],
        "doctor": ["--json"],
        "card": ["--out", str(run / MODEL_CARD)],
        "publish": ["--repo", repo] if repo else [],
    }

    kind = form["kind"]
    if kind not in options_by_kind:
        raise VideotuneError(f"there is no command {kind[:40]}")
    train_page.check_run_paths(page, run)
    arguments = [kind, str(run), *options_by_kind[kind]]
    job = jobs.latest(page.current_project.folder, kind, run.name)
    if job is not None and job.is_running and list(job.arguments) == arguments:
        return "It runs already"
    jobs.restart(page.current_project.folder, kind, arguments, run.name)
    return ""


train_page.ACTIONS |= {
    "draw": draw,
    "dismiss": dismiss,
    "export": export,
    "copy": copy,
    "delete": delete,
    "write": write,
}
