"""The page Train: begin, watch, stop with save, go on, branch; a process that died is shown as dead."""

import time
from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from videotune.reporter.build import warnings
from videotune.reporter.curves import exposure, loss, validation
from videotune.reporter.outcome import grounds, recommended_checkpoint, standing
from videotune.reporter.read import Run
from videotune.studio.actions import run_folder
from videotune.studio.jobs import Job, all_jobs, latest, result, why
from videotune.studio.pages.kit import asking, html, live, on
from videotune.studio.projects import Project
from videotune.studio.status import Progress, progress, read_live
from videotune.text import moment, plain

DOING = {
    "starting": "beginning: the model is loaded",
    "encoding": "encoding the clips",
    "training": "training",
    "saving": "saving",
    "measuring": "measuring the validation loss",
    "probing": "measuring small samples",
    "sampling": "drawing previews",
    "paused": "waiting for room on the disk",
    "exporting": "writing the result",
    "reporting": "writing the report",
    "ended": "ended",
}
"""What a run's heartbeat says, in words."""

ENDED = {
    "done": "all steps are done",
    "interrupted": "stopped and saved; it can go on",
    "stopped": "stopped as you asked, and saved; it can go on",
}
"""Why a run ended, in words."""

_charts: dict[Path, tuple[object, float, float, str]] = {}
"""The charts of a run: what they were made from, when, how long that took, and they."""


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    with gr.Row(equal_height=True):
        name = gr.Textbox(
            label="Begin a run", placeholder="a name, or leave it to be numbered", max_lines=1, elem_id="run-name"
        )
        begin = gr.Button("Start training", variant="primary", scale=0, min_width=160, elem_id="run-start")
    on(begin.click, asking(root, "train", "run"), [project, name], gr.HTML(elem_classes="told"))
    live("train", 2)
    live("charts", 5)


def runs(project: Project) -> list[str]:
    """The project's runs, the one begun last first; those too that ended before they wrote anything."""
    names: dict[str, float] = {}
    for job in all_jobs(project.folder, "train"):
        names.setdefault(job.about, job.started)
    for path in (project.folder / "runs").glob("*/config.json"):
        if not path.parent.name.startswith("."):
            names.setdefault(path.parent.name, path.stat().st_mtime)
    return sorted(names, key=lambda name: -names[name])


def chosen(project: Project, query: Mapping[str, str]) -> str | None:
    """The run that the address names, or the last one."""
    there = runs(project)
    return query["run"] if query.get("run") in there else there[0] if there else None


def part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """How the run stands, and what can be asked of it."""
    name = chosen(project, query)
    if name is None:
        return html("empty", words="No run yet. Look at the plan on the page Setup, then start one above.")
    job, run = latest(project.folder, "train", name), read_live(run_folder(project, name))
    far, verdict, doctor = progress(run), run.last("verdict"), latest(project.folder, "doctor", name)
    if doctor and isinstance(result(doctor), list) and (run.written or 0) > doctor.started + 1 and not doctor.running:
        doctor = None  # it speaks of an earlier state
    findings = None if doctor is None or doctor.running else result(doctor)
    failed = job is not None and job.state in ("failed", "dead") and run.journal and job.started >= (run.written or 0)
    return html(
        "train",
        project=project,
        runs=runs(project),
        name=name,
        run=run,
        job=job,
        far=far,
        state=_state(run, job, far),
        not_begun=why(job) if job and failed else "",
        memory=next((record.get("memory") for record in reversed(run.journal) if record.get("memory")), None),
        alive=is_alive(run, job),
        asked=(run.folder / "control.json").exists(),
        done=any(record.get("why") == "done" for record in run.of_kind("end")),
        saves=[record.get("step") for record in run.of_kind("save")],
        verdict=verdict,
        best=recommended_checkpoint(run, verdict)[0] if verdict["turned"] or run.last("end") else None,
        doctor=doctor,
        findings=findings if isinstance(findings, list) else None,
    )


def is_alive(run: Run, job: Job | None) -> bool:
    """Whether a process is at the run: its heartbeat says so, or it was begun just now and has not written one yet."""
    beat = run.life or {}
    return bool(beat.get("alive") or (job is not None and job.running and beat.get("started", 0) < job.started))


def _state(run: Run, job: Job | None, far: Progress) -> dict[str, str]:
    """A word and a sentence on how the run stands; a process that is gone is never called running."""
    kept = ""
    if is_alive(run, job):
        beat = run.life or {}
        doing = DOING.get(str(beat.get("state")), "beginning") if beat.get("alive") else "beginning: the program starts"
        word, css = ("paused", "care") if beat.get("state") == "paused" else ("running", "good")
        sentence = f"{doing}, since {moment(beat.get('since') or (job.started if job else time.time()))}"
    elif not run.journal and job is not None:
        word, css = job.state, "care" if job.state == "stopped" else "bad"
        sentence = f"It ended before its first step: {why(job)}"
    else:
        word, css, sentence = standing(run, far.total is not None and far.done >= far.total)
        died = job is not None and job.state == "dead"
        if word in ("dead", "no end") or (died and not run.last("end")):
            word, css = "dead", "bad"
            sentence = f"It died at step {plain(far.done)}: {why(job) if job and died else 'its process is gone'}."
            kept = "Nothing had been saved; it begins again at step 0."
            if saves := run.of_kind("save"):
                kept = f"Nothing later than step {plain(saves[-1].get('step'))} is saved; it can go on from there."
        elif word == "failed":
            sentence = why(job) if job is not None else sentence
        else:
            sentence = ENDED.get(word, sentence)
    return {"word": word, "css": css, "sentence": sentence, "kept": kept}


def charts_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """Curves and times seen. Made anew only where the journal has grown, and never so often that it would cost much."""
    name = chosen(project, query)
    if name is None:
        return ""
    folder = run_folder(project, name)
    run = read_live(folder)
    if not run.journal:
        return ""
    mark = (len(run.journal), len(run.steps.at), run.steps.last)
    known, now = _charts.get(folder), time.monotonic()
    if known is not None and (known[0] == mark or now - known[1] < 150 * known[2]):
        return known[3]
    if len(_charts) > 8:
        _charts.clear()
    begun = time.process_time()
    chapters = {"loss": loss(run), "validation": validation(run), "exposure": exposure(run), "warnings": warnings(run)}
    made = html("charts", chapters=chapters, grounds=grounds(run) if run.validations else None)
    _charts[folder] = mark, now, time.process_time() - begun, made
    return made
