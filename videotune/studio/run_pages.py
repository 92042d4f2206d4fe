"""The pages of a run as HTML: Train, Samples and Export."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.queue.jobs import Job, all_jobs, latest, result, why
from videotune.reporter.build import warnings
from videotune.reporter.curves import exposure, loss, validation
from videotune.reporter.outcome import grounds, recommended_checkpoint, standing
from videotune.reporter.previews import sample_rows
from videotune.reporter.read import Run, items, mapping, number
from videotune.studio.actions import run_folder
from videotune.studio.pages import html
from videotune.studio.projects import Project, texts
from videotune.studio.status import Progress, progress, read_live
from videotune.text import moment, plain

_charts: dict[Path, tuple[object, float, float, str]] = {}
"""The charts of a run: what they were made from, when, how long that took, and they."""

TRIES = 24
"""So many of the latest tries are shown."""


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


def train_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
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
        state = texts()["states"].get(str(beat.get("state")), "beginning")
        doing = state if beat.get("alive") else "beginning: the program starts"
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
            sentence = texts()["ends"].get(word, sentence)
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


def samples_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """A row for each prompt and seed: the nearest clip, the base, and each step."""
    name = chosen(project, query)
    if name is None:
        return html("empty", words="Samples appear here as a run draws them.")
    run = read_live(run_folder(project, name))
    cells_of = sample_rows(run)
    steps = sorted({step for cells in cells_of.values() for step in cells})
    rows = []
    for (prompt, seed), cells in cells_of.items():
        paths = (str(mapping(cells.get(step)).get("path") or "") for step in steps)
        there = [f"runs/{name}/{path}" if path and (run.folder / path).is_file() else "" for path in paths]
        rows.append((prompt, seed, _nearest(project, run, prompt), there))
    at, rows_measured = measured(project, name, run)
    return html(
        "samples",
        project=project,
        runs=runs(project),
        name=name,
        saves=[record.get("step") for record in run.of_kind("save")],
        steps=steps,
        rows=rows,
        measured=rows_measured,
        measured_at=at,
    )


def _nearest(project: Project, run: Run, prompt: str) -> dict[str, str] | None:
    """The training clip whose caption shares most words with the prompt."""
    used = [clip for clip in run.clips if clip["used"]]

    def likeness(clip: Mapping[str, Any]) -> float:
        return max((alike(prompt, one) for one in items(clip["captions"])), default=0)

    return _clip(project, max(used, key=likeness)) if used else None


def _clip(project: Project, clip: Mapping[str, Any]) -> dict[str, str]:
    """A clip of the account: its name, its id, and its path where the browser may have its video."""
    path = Path(str(clip["path"]))
    playable = path.suffix.lower() in (".mp4", ".webm", ".mov", ".m4v") and path.is_relative_to(project.folder)
    inside = path.relative_to(project.folder).as_posix() if playable and path.is_file() else ""
    return {"name": path.name, "id": str(clip.get("id"))[:16], "path": inside}


def measured(project: Project, name: str, run: Run) -> tuple[Any, list[Any]]:
    """The step of the latest sample metrics; and the samples, each with the training clip nearest in pictures."""
    found = [record for record in run.of_kind("sample_metrics") if items(record.get("samples"))]
    if not found:
        return None, []
    clips = {str(clip["path"]): clip for clip in run.clips}
    rows = []
    for one in map(mapping, items(found[-1].get("samples"))):
        path, near = str(one["path"] or ""), str(one["clip"] or "?")
        if (run.folder / path).is_file():
            rows.append((f"runs/{name}/{path}", one, _clip(project, clips.get(near, mapping({"path": near})))))
    return found[-1].get("step"), rows


def alike(one: str, other: str) -> float:
    """The share of words that two texts have in common, of all their words."""
    first, second = (set(re.findall(r"\w+", words.lower())) for words in (one, other))
    return len(first & second) / len(first | second) if first | second else 0.0


def tries_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """What was tried, the last one first."""
    name = chosen(project, query)
    if name is None:
        return ""
    home, jobs = project.folder / "tries" / name, all_jobs(project.folder, "sample")
    found = sorted(home.glob("*.mp4"), key=lambda path: -path.stat().st_mtime)[:TRIES]
    tries = [(f"tries/{name}/{path.name}", described(path, jobs)) for path in found]
    return html("tries", project=project, job=latest(project.folder, "sample", name), tries=tries)


def described(path: Path, jobs: list[Job]) -> str:
    """What a try shows, in words: the prompt of the command that wrote it, and step, strength and seed in its name."""
    written, prompt = path.stat().st_mtime, ""
    for job in jobs:
        if job.started <= written <= (job.ended or written) + 1 and "--prompt" in job.words:
            prompt = f"{job.words[job.words.index('--prompt') + 1]}: "
            break
    forms = {"step": r"step-(\d+)", "strength": r"strength-([\d.]+)", "seed": r"seed(\d+)"}
    places = {what: found[1] for what, form in forms.items() if (found := re.search(form, path.stem))}
    settings = ", ".join(f"{what} {value if '.' in value else int(value)}" for what, value in places.items())
    return f"{prompt}{settings}" if prompt else settings or path.stem


def offered(run: Run) -> tuple[str, ...]:
    """The formats that can be written of what the run trained."""
    method = run.setting("training_method")
    if method == "FINE_TUNE":
        return ("diffusers",)
    variant = run.setting("lora", "variant") if method == "LORA" else None
    return tuple(texts()["offered"].get(str(variant), ("comfyui", "diffusers")))


def export_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """The form, what is at work, and the files."""
    name = chosen(project, query)
    run = read_live(run_folder(project, name)) if name else None
    files = []
    for one in (run and run.exports) or ():
        verified = mapping(one.get("verified"))
        file = _download(project, run.folder / str(one.get("path", "")))  # type: ignore[union-attr]
        files.append((one.get("format", ""), file, verified, number(verified["max_error"])))
    return html(
        "export",
        project=project,
        runs=runs(project),
        name=name,
        saves=[record.get("step") for record in run.of_kind("save")] if run else [],
        files=files,
        job=latest(project.folder, "export", name),
        formats=offered(run) if run else (),
        titles=texts()["formats"],
    )


def _download(project: Project, path: Path) -> dict[str, str]:
    """How a file or folder is downloaded; without a size where it is not there, or lies outside the project."""
    if not path.is_relative_to(project.folder) or not path.exists():
        return {"name": path.name, "size": ""}
    folder = path.is_dir()
    size = sum(one.stat().st_size for one in (path.rglob("*") if folder else (path,)) if one.is_file())
    return {
        "kind": "folder" if folder else "file",
        "name": f"{path.name}.zip" if folder else path.name,
        "path": path.relative_to(project.folder).as_posix(),
        "size": f"{size / 1e6:.2f} MB",
    }
