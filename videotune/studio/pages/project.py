"""The page Project: choose one, make one, give it another name, put it aside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from videotune.studio.jobs import all_jobs
from videotune.studio.markup import NOTHING, Html, badge, details, element, join, paragraph, text
from videotune.studio.pages.kit import FIRST, THEN, asking, button, empty, entry, link, live
from videotune.studio.projects import CLIPS, Project, projects, seen_files
from videotune.text import counted, moment


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("project", 10)
    with gr.Row(equal_height=True):
        title = gr.Textbox(
            label="A new project", placeholder="what it is about, such as: my cat", elem_id="new-title", max_lines=1
        )
        make = gr.Button("Make the project", variant="primary", elem_id="new-make", scale=0, min_width=180)
    told = gr.HTML(elem_classes="told")
    act = asking(root, "create", ("title",))
    for event in (make.click, title.submit):
        event(act, [project, title], told, js=FIRST, show_progress="hidden", api_visibility="private").then(
            None, js=THEN
        )


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """The list of projects."""
    found = projects(root)
    open_ones = [one for one in found if not one.facts.get("archived")]
    away = [one for one in found if one.facts.get("archived")]
    if not found:
        return empty(
            element("h2", text("Teach a video model from your own clips")),
            paragraph(
                text("A project holds your clips, the settings, and what was trained. Make one below; next come:")
            ),
            element(
                "ol",
                *(
                    element("li", text(words))
                    for words in (
                        "Data: put in your clips and say what each one shows",
                        "Setup: choose a model, and see whether it fits your card and how long it takes",
                        "Train: watch it learn; stop and go on whenever you like",
                        "Samples: compare before and after",
                        "Export: download the file (a LoRA) for ComfyUI or diffusers",
                    )
                ),
            ),
        )
    rows = [_card(one, project is not None and one.name == project.name) for one in open_ones]
    old = details(counted(len(away), "archived project"), *(_card(one, False) for one in away)) if away else NOTHING
    return join([element("h2", text("Projects")), element("div", *rows, css="deck"), old])


def _card(one: Project, chosen: bool) -> Html:
    home = one.folder / CLIPS
    files = sum(1 for path in seen_files(home) if path.suffix not in (".txt", ".csv", ".jsonl"))
    runs = [path for path in (one.folder / "runs").glob("*") if (path / "config.json").is_file()]
    busy = [job for job in all_jobs(one.folder)[:12] if job.running]
    gone = bool(one.facts.get("archived"))
    state = badge(f"at work: {busy[0].kind}", "good") if busy else badge("archived", "quiet") if gone else NOTHING
    name = element(
        "h3",
        link(one.title, project=one.name, tab="data"),
        text(" "),
        badge("open", "calm") if chosen else NOTHING,
        state,
    )
    about = f"{counted(files, 'clip')}, {counted(len(runs), 'run')}, made {moment(one.facts.get('created', ''))}"
    question = "" if gone else f"Archive {one.title}? Nothing is deleted; you find it below the list."
    more = element(
        "details",
        element("summary", text("rename or archive")),
        element(
            "div",
            entry("title", "name", one.title),
            button("rename", "rename", {"of": one.name}),
            button(
                "take back" if gone else "archive", "archive", {"of": one.name, "archived": not gone}, confirm=question
            ),
            css="row",
            attributes={"data-form": "1"},
        ),
        attributes={"id": f"more-{one.name}"},
    )
    return element("div", name, paragraph(text(about), css="soft"), more, css="card chosen" if chosen else "card")
