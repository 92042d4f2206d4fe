"""The page Samples: a run's previews, step by step, beside the base and the clip nearest in words; and a prompt to try."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.reporter.media import sample_rows
from videotune.reporter.read import Run, items, mapping
from videotune.studio.actions import run_folder
from videotune.studio.jobs import Job, all_jobs, latest
from videotune.studio.pages.kit import asking, html, live, on
from videotune.studio.pages.train import chosen, runs
from videotune.studio.projects import Project
from videotune.studio.status import read_live

TRIES = 24
"""So many of the latest tries are shown."""


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("samples", 5)
    with gr.Accordion("Try a prompt", open=True):
        prompt = gr.Textbox(label="What the video should show", lines=2, elem_id="try-prompt")
        with gr.Row(equal_height=True):
            step = gr.Textbox(label="Checkpoint (step)", placeholder="the newest", max_lines=1)
            info = "how strongly what was learnt acts; 0: the base model alone"
            strength = gr.Slider(0, 2, value=1, step=0.05, label="Strength", info=info)
            seed = gr.Textbox(label="Seed", placeholder="42", max_lines=1, info="another number, another video")
            go = gr.Button("Draw", variant="primary", scale=0, min_width=120, elem_id="try-draw")
        run = gr.Textbox(visible=False)
        answer = gr.HTML(elem_classes="told")
    js = "(...v) => [videotune.project(), document.querySelector('[data-run]')?.dataset.run || '', ...v.slice(2)]"
    act = asking(root, "draw", "run", "prompt", "step", "strength", "seed")
    on(go.click, act, [project, run, prompt, step, strength, seed], answer, js)
    live("tries", 2)


def part(root: Path, project: Project, query: Mapping[str, str]) -> str:
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
        steps=steps,
        rows=rows,
        measured=rows_measured,
        measured_at=at,
    )


def _nearest(project: Project, run: Run, prompt: str) -> dict[str, str] | None:
    """The training clip whose caption shares most words with the prompt."""
    used = [clip for clip in run.clips if clip["used"]]
    near = max(
        used, key=lambda clip: max((alike(prompt, one) for one in items(clip["captions"])), default=0), default=None
    )
    return None if near is None else _clip(project, near)


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
