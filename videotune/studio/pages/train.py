"""The page Train: begin, watch, stop with save, go on, branch; a process that died is shown as dead."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.reporter.build import chapter, render, warnings
from videotune.reporter.curves import exposure, loss, validation
from videotune.reporter.outcome import COLOURS, grounds, recommended_checkpoint, standing, verdict_sentence
from videotune.reporter.read import Run
from videotune.studio.actions import run_folder
from videotune.studio.jobs import Job, all_jobs, latest, log_tail, result, why
from videotune.studio.markup import NOTHING, Html, badge, bullets, details, element, join, paragraph, text
from videotune.studio.pages.data import choose
from videotune.studio.pages.kit import (
    FIRST,
    THEN,
    asking,
    at_work,
    bar,
    button,
    empty,
    entry,
    facts,
    link,
    live,
    log,
    tip,
)
from videotune.studio.projects import Project
from videotune.studio.status import Progress, progress, read_live
from videotune.text import duration, moment, plain

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

HOW_TO_READ = (
    "The error of single steps jumps, since each has other clips and other noise. The validation loss below measures the "
    "same clips with the same noise each time: falling means learning; where held-out clips rise while training clips fall, "
    "it copies."
)

_charts: dict[Path, tuple[object, float, float, Html]] = {}
"""The charts of a run: what they were drawn from, when, how long that took, and they."""


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    with gr.Row(equal_height=True):
        name = gr.Textbox(
            label="Begin a run", placeholder="a name, or leave it to be numbered", max_lines=1, elem_id="run-name"
        )
        begin = gr.Button("Start training", variant="primary", scale=0, min_width=160, elem_id="run-start")
    told = gr.HTML(elem_classes="told")
    begin.click(
        asking(root, "train", ("run",)),
        [project, name],
        told,
        js=FIRST,
        show_progress="hidden",
        api_visibility="private",
    ).then(None, js=THEN)
    live("train", 2)
    live("charts", 5)


def runs(project: Project) -> list[str]:
    """The project's runs, the one begun last first; those too that ended before they wrote anything."""
    names: dict[str, float] = {}
    for job in all_jobs(project.folder, "train"):
        names.setdefault(job.about, job.started)
    for path in (project.folder / "runs").glob("*"):
        if not path.name.startswith(".") and (path / "config.json").is_file():
            names.setdefault(path.name, (path / "config.json").stat().st_mtime)
    return sorted(names, key=lambda name: -names[name])


def chosen(project: Project, query: Mapping[str, str]) -> str | None:
    """The run that the address names, or the last one."""
    there = runs(project)
    return query["run"] if query.get("run") in there else there[0] if there else None


def tabs(project: Project, query: Mapping[str, str], page: str) -> Html:
    """Links to the other runs."""
    there, now = runs(project), chosen(project, query)
    return (
        element(
            "nav",
            *(link(name, "on" if name == now else "", project=project.name, tab=page, run=name) for name in there),
            css="runs",
        )
        if len(there) > 1
        else NOTHING
    )


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """How the run stands, and what can be asked of it."""
    if project is None:
        return choose()
    name = chosen(project, query)
    if name is None:
        return empty(paragraph(text("No run yet. Look at the plan on the page Setup, then start one above.")))
    job, run = latest(project.folder, "train", name), read_live(run_folder(project, name))
    far = progress(run)
    return join(
        [
            tabs(project, query, "train"),
            element("h2", text(name)),
            _standing(run, job, far),
            _not_begun(run, job),
            _bar(far, run),
            _asked(run, job, name),
            _verdict(run),
            _doctor(project, name, run),
            _log(job),
        ]
    )


def is_alive(run: Run, job: Job | None) -> bool:
    """Whether a process is at the run: its heartbeat says so, or it was begun just now and has not written one yet."""
    beat = run.life or {}
    if beat.get("alive"):
        return True
    begun = job is not None and job.running and beat.get("started", 0) < job.started
    return bool(begun)


def _standing(run: Run, job: Job | None, far: Progress) -> Html:
    """A word and a sentence on how the run stands; a process that is gone is never called running."""
    whole = far.total is not None and far.done >= far.total
    if is_alive(run, job):
        beat = run.life or {}
        doing = DOING.get(str(beat.get("state")), "beginning") if beat.get("alive") else "beginning: the program starts"
        word = badge("paused", "care") if beat.get("state") == "paused" else badge("running", "good")
        return paragraph(
            word,
            text(f"{doing}, since {moment(beat.get('since') or (job.started if job else time.time()))}"),
            css="state",
        )
    if not run.journal and job is not None:
        return element(
            "div",
            paragraph(
                badge(job.state, "care" if job.state == "stopped" else "bad"),
                text(f"It ended before its first step: {why(job)}"),
                css="state",
            ),
        )
    told_word, css, told = standing(run, whole)
    if told_word in ("dead", "no end") or (job is not None and job.state == "dead" and not run.last("end")):
        saves = [record.get("step") for record in run.of_kind("save")]
        kept = (
            f"Nothing later than step {plain(saves[-1])} is saved; it can go on from there."
            if saves
            else "Nothing had been saved; it begins again at step 0."
        )
        how = why(job) if job is not None and job.state == "dead" else "its process is gone"
        return join(
            [
                paragraph(badge("dead", "bad"), text(f"It died at step {plain(far.done)}: {how}."), css="state"),
                paragraph(text(kept)),
            ]
        )
    if told_word == "failed":
        return paragraph(badge("failed", "bad"), text(why(job) if job is not None else told), css="state")
    echo = {
        "done": "all steps are done",
        "interrupted": "stopped and saved; it can go on",
        "stopped": "stopped as you asked, and saved; it can go on",
    }
    return paragraph(badge(told_word, css), text(echo.get(told_word, told)), css="state")


def _not_begun(run: Run, job: Job | None) -> Html:
    """That the last command to go on ended without a step, where the run still shows how it stood before."""
    if job is None or job.state not in ("failed", "dead") or not run.journal or job.started < (run.written or 0):
        return NOTHING
    return paragraph(text(f"The last attempt to go on did not begin: {why(job)}"), css="bad")


def _bar(far: Progress, run: Run) -> Html:
    if far.total is None:
        return NOTHING
    plan = run.plan or {}
    left = None if far.left is None or far.done >= far.total else duration(far.left)
    memory = next((record.get("memory") for record in reversed(run.journal) if record.get("memory")), None)
    shown: dict[str, Any] = {
        "step": f"{plain(far.done)} of {plain(far.total)}",
        "time left in steps": left,
        "seconds a step": None if far.throughput is None else f"{far.throughput:.3g}",
        "error, mean of the last steps": None if far.loss is None else plain(far.loss),
        "memory": f"{memory / 1e9:.1f} GB" if isinstance(memory, (int, float)) else None,
        "samples a step": plan.get("effective_batch"),
        "device": run.last("start").get("device"),
    }
    return join([bar(far.done / far.total, "calm", f"{far.done} of {far.total} steps"), facts(shown)])


def _asked(run: Run, job: Job | None, name: str) -> Html:
    """The buttons: of a run that goes on, to stop it; of another, to go on with it."""
    body = {"run": name}
    if is_alive(run, job):
        asked = (run.folder / "control.json").exists()
        return element(
            "div",
            button(
                "Stop and save",
                "stop",
                body,
                confirm=f"Stop {name}? It finishes its step and saves; you can go on later.",
                css="stop",
            ),
            button("Save now", "control", {**body, "word": "save"}),
            button("Draw previews now", "control", {**body, "word": "sample"}),
            text("asked; it answers after its step") if asked else NOTHING,
            css="row",
        )
    saves = [str(record.get("step")) for record in run.of_kind("save")]
    steps = (run.config or {}).get("steps")
    if steps is None:
        return element("div", button("Look for what is wrong", "doctor", body), css="row") if run.journal else NOTHING
    options = [element("option", text(f"step {step}"), attributes={"value": step}) for step in reversed(saves)]
    start = element("option", text("step 0"), attributes={"value": "0"})
    branch = element(
        "details",
        element("summary", text("Go back to an earlier step, or train longer")),
        paragraph(text("What came after that step is kept whole in the run's folder branches."), css="soft"),
        element(
            "div",
            element(
                "label",
                element("span", text("from")),
                element(
                    "select",
                    element("option", text("the newest"), attributes={"value": ""}),
                    *options,
                    start,
                    attributes={"name": "from"},
                ),
                css="entry",
            ),
            entry("steps", "steps in all", "", "number", f"{steps} now"),
            button(
                "Go on like this",
                "resume",
                body,
                confirm=f"Go on with {name} like this? With another number of steps its learning rate changes too.",
            ),
            css="row",
            attributes={"data-form": "1"},
        ),
        attributes={"id": "branch"},
    )
    done = any(record.get("why") == "done" for record in run.of_kind("end"))
    go_on = (
        NOTHING
        if done
        else button(
            "Resume", "resume", body, css="go", title="Goes on from the newest checkpoint as if it had never stopped"
        )
    )
    return element("div", element("div", go_on, button("Look for what is wrong", "doctor", body), css="row"), branch)


def _verdict(run: Run) -> Html:
    """How it went, in words, with the state that is best taken; the export is a page of its own."""
    latest = run.last("verdict")
    if not latest:
        return NOTHING
    word = str(latest.get("verdict") or "no verdict")
    best, _ = recommended_checkpoint(run, latest) if latest.get("turned") or run.last("end") else (None, "")
    take = (
        NOTHING
        if best is None
        else paragraph(text(f"Recommended: the checkpoint of step {plain(best)} (page Export)."))
    )
    told = text(verdict_sentence(latest))
    return join([paragraph(badge(word, COLOURS.get(word, "quiet")), told, css="state"), take])


def _grounds(run: Run) -> Html:
    """What the verdict rests on: the curve of clips that were held out, when it changed, and the clips one by one."""
    if not run.validations:
        return NOTHING
    return details("What the verdict rests on", Html(render("grounds.html.j2", grounds=grounds(run))))


def _doctor(project: Project, name: str, run: Run) -> Html:
    job = latest(project.folder, "doctor", name)
    if job is None:
        return NOTHING
    found = result(job)
    if job.running or not isinstance(found, list):
        return at_work(job, "looking at the run", "doctor")
    if run.written is not None and run.written > job.started + 1:
        return NOTHING  # it speaks of an earlier state
    if not found:
        return paragraph(text("Nothing that its files show is wrong."), css="soft")
    rows = [
        join(
            [
                element("b", text(one["line"])),
                text(f": {one['found']} "),
                element("i", text(f"What helps: {one['do']}")),
            ]
        )
        for one in found
    ]
    return element("div", element("h3", text("What the run's files show")), bullets(rows))


def _log(job: Job | None) -> Html:
    return log(job, 40) if job is not None and log_tail(job, 1) else NOTHING


def charts_part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """Curves and views. Drawn anew only where the journal has grown, and never so often that it would cost much."""
    name = None if project is None else chosen(project, query)
    if project is None or name is None:
        return NOTHING
    folder = run_folder(project, name)
    run = read_live(folder)
    if not run.journal:
        return NOTHING
    mark = (len(run.journal), len(run.steps.at), run.steps.last)
    known, now = _charts.get(folder), time.monotonic()
    if known is not None and (known[0] == mark or now - known[1] < 150 * known[2]):
        return known[3]
    if len(_charts) > 8:
        _charts.clear()
    begun = time.process_time()
    drawn = join(
        [
            Html(chapter("loss", loss(run))),
            paragraph(tip("How to read this", HOW_TO_READ), css="soft"),
            Html(chapter("validation", validation(run))),
            _grounds(run),
            Html(chapter("exposure", exposure(run))),
            Html(chapter("warnings", warnings(run))),
        ]
    )
    _charts[folder] = mark, now, time.process_time() - begun, drawn
    return drawn
