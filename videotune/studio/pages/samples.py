"""The page Samples: what the run drew, step by step, beside the base and the clip nearest in words; and a prompt to try."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr

from videotune.reporter.read import Run, items, mapping, number
from videotune.studio.actions import run_folder
from videotune.studio.jobs import Job, all_jobs, latest
from videotune.studio.markup import NOTHING, Html, details, element, join, paragraph, text
from videotune.studio.pages.data import choose
from videotune.studio.pages.kit import THEN, asking, at_work, empty, live
from videotune.studio.pages.train import chosen, tabs
from videotune.studio.projects import Project
from videotune.studio.status import read_live
from videotune.text import plain

TRIES = 24
"""So many of the latest tries are shown."""


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("samples", 5)
    with gr.Accordion("Try a prompt", open=True):
        prompt = gr.Textbox(label="What the video should show", lines=2, elem_id="try-prompt")
        with gr.Row(equal_height=True):
            step = gr.Textbox(label="Checkpoint (step)", placeholder="the newest", max_lines=1)
            strength = gr.Slider(
                0,
                2,
                value=1,
                step=0.05,
                label="Strength",
                info="how strongly what was learnt acts; 0: the base model alone",
            )
            seed = gr.Textbox(label="Seed", placeholder="42", max_lines=1, info="another number, another video")
            go = gr.Button("Draw", variant="primary", scale=0, min_width=120, elem_id="try-draw")
        run = gr.Textbox(visible=False)
        told = gr.HTML(elem_classes="told")
    js = "(...v) => [videotune.project(), document.querySelector('[data-run]')?.dataset.run || '', ...v.slice(2)]"
    act = asking(root, "draw", ("run", "prompt", "step", "strength", "seed"))
    go.click(
        act, [project, run, prompt, step, strength, seed], told, js=js, show_progress="hidden", api_visibility="private"
    ).then(None, js=THEN)
    live("tries", 2)


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """A row for each prompt and seed: the nearest clip, the base, and each step."""
    if project is None:
        return choose()
    name = chosen(project, query)
    if name is None:
        return empty(paragraph(text("Samples appear here as a run draws them.")))
    run = read_live(run_folder(project, name))
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for record in run.of_kind("sample"):
        rows.setdefault((str(record.get("prompt", "")), int(record.get("seed") or 0)), {})[
            int(record.get("step") or 0)
        ] = str(record.get("path", ""))
    mark = element("span", attributes={"data-run": name})
    if not rows:
        return join(
            [
                mark,
                tabs(project, query, "samples"),
                empty(
                    paragraph(text(f"{name} has drawn nothing yet; previews come at step 0 and every so many steps."))
                ),
            ]
        )
    steps = sorted({step for cells in rows.values() for step in cells})
    parts: list[Html] = []
    for (prompt, seed), cells in rows.items():
        words = element("div", element("b", text(prompt)), text(f" seed {seed}"), css="prompt")
        parts += [
            words,
            _nearest(project, run, prompt),
            *(_cell(project, name, step, cells.get(step)) for step in steps),
        ]
    grid = element("div", *parts, css="samples", attributes={"style": f"--columns:{len(steps) + 1}"})
    play = element("button", text("Play all in step"), attributes={"type": "button", "data-play": ".samples video"})
    return join(
        [
            mark,
            tabs(project, query, "samples"),
            element("p", play, css="row"),
            element("div", grid, css="grid-scroll"),
            measured(project, name, run),
        ]
    )


def media(project: Project, path: str, caption: str) -> Html:
    """A video of the project with a line below it."""
    where = f"/studio/file?project={quote(project.name)}&path={quote(path)}"
    video = element(
        "video",
        attributes={"src": where, "preload": "metadata", "aria-label": caption},
        flags="controls loop muted playsinline",
    )
    return element("figure", video, element("figcaption", text(caption)))


def _cell(project: Project, name: str, step: int, path: str | None) -> Html:
    words = "before (base model)" if step == 0 else f"step {plain(step)}"
    if not path or not (project.folder / "runs" / name / path).is_file():
        return element("figure", paragraph(text("not drawn"), css="missing"), element("figcaption", text(words)))
    return media(project, f"runs/{name}/{path}", words)


def _nearest(project: Project, run: Run, prompt: str) -> Html:
    """The training clip whose caption shares most words with the prompt."""
    clips = [clip for clip in (run.check or {}).get("clips", ()) if clip.get("used")]
    best = max(
        clips, key=lambda clip: max((alike(prompt, one) for one in clip.get("captions", ())), default=0.0), default=None
    )
    if best is None:
        return element("figure")
    return _clip(project, best, f"training clip with the nearest caption: {Path(best['path']).name}")


def _clip(project: Project, clip: Mapping[str, Any], caption: str) -> Html:
    """A clip of the account: its video where the browser may have it, else its picture."""
    path = Path(str(clip["path"]))
    shown = path.suffix.lower() in (".mp4", ".webm", ".mov", ".m4v")
    if shown and path.is_relative_to(project.folder) and path.is_file():
        return media(project, path.relative_to(project.folder).as_posix(), caption)
    thumb = f"/studio/thumb?project={quote(project.name)}&id={str(clip.get('id'))[:16]}"
    return element("figure", element("img", attributes={"src": thumb, "alt": ""}), element("figcaption", text(caption)))


def measured(project: Project, name: str, run: Run) -> Html:
    """The samples that the latest probe drew, each beside the training clip that it is nearest to in pictures."""
    found = [record for record in run.of_kind("probe") if items(record.get("samples"))]
    if not found:
        return NOTHING
    clips = {str(clip.get("path")): clip for clip in map(mapping, items((run.check or {}).get("clips")))}
    parts: list[Html] = []
    for one in map(mapping, items(found[-1].get("samples"))):
        path, seed = str(one.get("path") or ""), plain(number(one.get("seed")))
        drawn = f"{one.get('prompt', '')} (seed {seed})"
        if not (run.folder / path).is_file():
            continue
        clip = str(one.get("clip", "?"))
        near = f"nearest training clip: {Path(clip).name}, likeness {plain(number(one.get('similarity')), 3)}"
        near += ": likely a copy" if one.get("copy") else ""
        parts += [
            media(project, f"runs/{name}/{path}", drawn),
            _clip(project, clips.get(clip, {"path": clip}), near),
        ]
    title = (
        f"Measured at step {plain(number(found[-1].get('step')))}: samples beside the clips that they are nearest to"
    )
    return details(title, element("div", *parts, css="tries")) if parts else NOTHING


def alike(one: str, other: str) -> float:
    """The share of words that two texts have in common, of all their words."""
    first, second = (set(re.findall(r"\w+", words.lower())) for words in (one, other))
    return len(first & second) / len(first | second) if first | second else 0.0


def tries_part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """What was tried, the last one first."""
    name = None if project is None else chosen(project, query)
    if project is None or name is None:
        return NOTHING
    home = project.folder / "tries" / name
    found = sorted(home.glob("*.mp4"), key=lambda path: -path.stat().st_mtime)[:TRIES] if home.is_dir() else []
    jobs = all_jobs(project.folder, "sample")
    cells = [media(project, f"tries/{name}/{path.name}", drawn_as(path, jobs)) for path in found]
    job = latest(project.folder, "sample", name)
    return join([at_work(job, "drawing", "sample"), element("div", *cells, css="tries")])


def drawn_as(path: Path, jobs: list[Job]) -> str:
    """What a try shows, in words: the prompt of the command that wrote it, and what its name says of the rest."""
    written = path.stat().st_mtime
    prompt = next(
        (
            job.words[job.words.index("--prompt") + 1]
            for job in jobs
            if job.started <= written <= (job.ended or written) + 1 and "--prompt" in job.words
        ),
        "",
    )
    said = [f"{what} {found[1] if '.' in found[1] else int(found[1])}" for what, found in _places(path.stem)]
    return f"{prompt}: {', '.join(said)}" if prompt else ", ".join(said) or path.stem


def _places(stem: str) -> list[tuple[str, re.Match[str]]]:
    """Step, strength and seed in the name of a try, as far as it says them."""
    forms = (("step", r"step-(\d+)"), ("strength", r"strength-([\d.]+)"), ("seed", r"seed(\d+)"))
    return [(what, found) for what, form in forms if (found := re.search(form, stem))]
