"""The page Project: choose one, make one, give it another name, put it aside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.studio.jobs import all_jobs
from videotune.studio.pages.kit import asking, html, live, on
from videotune.studio.projects import CLIPS, Project, projects, seen_files


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("project", 10)
    with gr.Row(equal_height=True):
        title = gr.Textbox(
            label="A new project", placeholder="what it is about, such as: my cat", elem_id="new-title", max_lines=1
        )
        make = gr.Button("Make the project", variant="primary", elem_id="new-make", scale=0, min_width=180)
    answer = gr.HTML(elem_classes="told")
    for event in (make.click, title.submit):
        on(event, asking(root, "create", "title"), [project, title], answer)


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> str:
    """The list of projects."""
    cards: dict[bool, list[Any]] = {False: [], True: []}
    for one in projects(root):
        files = sum(1 for path in seen_files(one.folder / CLIPS) if path.suffix not in (".txt", ".csv", ".jsonl"))
        runs = len(list((one.folder / "runs").glob("*/config.json")))
        busy, away = [job for job in all_jobs(one.folder)[:12] if job.running], bool(one.facts.get("archived"))
        chosen = not away and project is not None and one.name == project.name
        cards[away].append((one, files, runs, busy, chosen))
    return html("project", open=cards[False], archived=cards[True])
