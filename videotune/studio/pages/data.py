"""The page Data: put clips in, see what becomes of each and why, write captions, hold some out, cut long videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.studio import actions, clips, uploads
from videotune.studio.jobs import latest
from videotune.studio.markup import NOTHING, Html, badge, bullets, details, element, join, paragraph, table, text
from videotune.studio.pages.kit import FIRST, THEN, asking, at_work, button, empty, live, said, tip
from videotune.studio.projects import Project, datasets, named
from videotune.text import counted, plain, shape_words

FIRST_WORDS = (
    "Put in your clips: some ten to a hundred, of a few seconds each, and with each one a text file of the same name that "
    "says what it shows (cat.mp4 and cat.txt). You can also write the captions here."
)


def build(root: Path, project: gr.Textbox, local: bool) -> None:
    """The page's blocks."""
    files = gr.File(
        label="Clips, captions (.txt) or an archive (.zip): drop them here, or choose them",
        file_count="multiple",
        elem_id="upload",
        height=170,
    )
    told = gr.HTML(elem_classes="told", elem_id="upload-told")

    def came(name: str, paths: list[str] | None) -> tuple[str, None]:
        return accept(root, name, [Path(path) for path in paths or ()]), None

    files.upload(came, [project, files], [told, files], js=FIRST, api_visibility="private").then(None, js=THEN)
    with gr.Accordion("Clips that lie elsewhere, and long videos", open=False):
        with gr.Row(equal_height=True):
            where = gr.Textbox(
                label="A folder of this computer, or a dataset of the Hugging Face Hub",
                placeholder="/home/me/clips, or user/name",
                max_lines=1,
            )
            kind = gr.Radio(
                [
                    ("train on it", "train"),
                    ("measure with it", "validation"),
                    ("keep the model as it is", "regularization"),
                ],
                value="train",
                label="What for",
            )
            add = gr.Button("Add", scale=0, min_width=120)
        with gr.Row(equal_height=True):
            long = gr.Textbox(label="Cut a long clip into its scenes", placeholder="clips/holiday.mp4", max_lines=1)
            cut = gr.Button("Cut", scale=0, min_width=120)
        more = gr.HTML(elem_classes="told")

        def source(name: str, path: str, use: str) -> str:
            return said(lambda: actions.source(root, {"project": name, "path": path, "kind": use}, local))

        add.click(source, [project, where, kind], more, js=FIRST, api_visibility="private").then(None, js=THEN)
        cut.click(asking(root, "split", ("path",)), [project, long], more, js=FIRST, api_visibility="private").then(
            None, js=THEN
        )
    live("data", 2)
    gr.HTML('<div class="vt" data-clips="1"></div>')


def accept(root: Path, name: str, paths: list[Path]) -> str:
    """Take sent files in and start a check; what became of each, as HTML."""

    def take() -> Mapping[str, str | bool]:
        got = uploads.accept(named(root, name), paths)
        refused.extend(one for one in got if not one.taken)
        taken.extend(one for one in got if one.taken)
        if taken:
            actions.start_check(named(root, name))
        return {"say": f"{counted(len(taken), 'file')} added" if taken else "nothing was added"}

    refused: list[uploads.Taken] = []
    taken: list[uploads.Taken] = []
    line = said(take)
    if refused:
        told = bullets([join([element("b", text(one.name)), text(f": {one.told}")]) for one in refused[:50]])
        line += element(
            "div",
            paragraph(text(f"{counted(len(refused), 'file')} not taken:")),
            told,
            css="vt bad",
            attributes={"role": "alert"},
        )
    return line


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """The account of the clips in figures, with what is at work; the table below it is the script's."""
    if project is None:
        return choose()
    cut = latest(project.folder, "split")
    job, last = latest(project.folder, "check"), clips.last_account(project)
    if cut is not None and cut.state == "done" and (job is None or job.started < (cut.ended or 0)):
        actions.start_check(project)  # the scenes are new clips
        job = latest(project.folder, "check")
    work = [
        NOTHING if last is not None and last[0] == job else at_work(job, "looking at the clips", "check"),
        at_work(cut, "cutting into scenes", "split"),
    ]
    sources = [dict(row) for row in project.facts.get("sources", ())]
    named_ones = bullets(
        [
            join(
                [
                    element("code", text(row["path"])),
                    text(f" ({row.get('kind', 'train')}) "),
                    button(
                        "leave out",
                        "drop-source",
                        {"path": row["path"]},
                        confirm=f"Leave {row['path']} out? Its files are not touched.",
                    ),
                ]
            )
            for row in sources
        ]
    )
    if last is None:
        first = NOTHING if datasets(project) else empty(paragraph(text(FIRST_WORDS)))
        return join([*work, first, named_ones])
    account = last[1]
    return join(
        [
            element("i", attributes={"data-table": last[0].folder.name, "hidden": "hidden"}),
            *work,
            _sums(account),
            named_ones,
            bullets([text(note) for note in account.get("blockers", ())], css="bad"),
            _more(project, account),
            element("p", button("check again", "check", {}), css="row"),
        ]
    )


def choose() -> Html:
    """What stands on a page that needs a project."""
    return empty(paragraph(text("Choose or make a project first, on the page Project.")))


def _sums(account: Mapping[str, Any]) -> Html:
    held = tip(
        "held out", "Clips that are never trained on. The run measures itself with them, to tell learning from copying."
    )
    skipped = tip(
        "skipped",
        "Clips that cannot be used; the table says why. A run begins without them only if you agree (page Setup).",
    )
    parts = [
        text(f"{counted(account['found'], 'clip')} found: "),
        badge(f"{account['used']} used", "good"),
        badge(str(account["held_out"]), "calm"),
        held,
        text(" "),
        badge(str(account["skipped"]), "bad" if account["skipped"] else "quiet"),
        skipped,
    ]
    return paragraph(*parts, css="state")


def _more(project: Project, account: Mapping[str, Any]) -> Html:
    rows = [[text(shape_words(bucket["shape"])), text(plain(bucket["windows"]))] for bucket in account["buckets"]]
    sizes = (
        details(
            "Sizes that will be trained",
            paragraph(text("Clips are cut into windows of so many frames and sorted by size."), css="soft"),
            table(["width x height", "windows"], rows),
        )
        if rows
        else NOTHING
    )
    notes = (
        details(counted(len(account["notes"]), "note"), bullets([text(note) for note in account["notes"]]))
        if account["notes"]
        else NOTHING
    )
    sheet = NOTHING
    if (project.folder / "sheet" / "index.html").is_file():
        where = f"/studio/file?project={project.name}&path=sheet/index.html"
        sheet = element(
            "p",
            element(
                "a",
                text("Contact sheet: every clip as it is trained"),
                attributes={"href": where, "target": "_blank", "rel": "noopener"},
            ),
        )
    return join([sizes, notes, sheet])
