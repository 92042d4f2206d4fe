"""The page Data: put clips in, see what becomes of each and why, write captions, hold some out, cut long videos."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.reporter.read import mapping
from videotune.studio import actions, clips, uploads
from videotune.studio.jobs import latest
from videotune.studio.pages.kit import answered, asking, html, live, on
from videotune.studio.projects import Project, datasets, named
from videotune.text import counted, plain, shape_words

USES = [("train on it", "train"), ("measure with it", "validation"), ("keep the model as it is", "regularization")]
"""What a folder of clips may be named for."""


def build(root: Path, project: gr.Textbox, local: bool) -> None:
    """The page's blocks."""
    files = gr.File(
        label="Clips, captions (.txt) or an archive (.zip): drop them here, or choose them",
        file_count="multiple",
        elem_id="upload",
        height=170,
    )
    answer = gr.HTML(elem_classes="told", elem_id="upload-told")

    def came(name: str, paths: list[str] | None) -> tuple[str, None]:
        return accept(root, name, [Path(path) for path in paths or ()]), None

    on(files.upload, came, [project, files], [answer, files])
    with gr.Accordion("Clips that lie elsewhere, and long videos", open=False):
        with gr.Row(equal_height=True):
            where = gr.Textbox(
                label="A folder of this computer, or a dataset of the Hugging Face Hub",
                placeholder="/home/me/clips, or user/name",
                max_lines=1,
            )
            kind = gr.Radio(USES, value="train", label="What for")
            add = gr.Button("Add", scale=0, min_width=120)
        with gr.Row(equal_height=True):
            long = gr.Textbox(label="Cut a long clip into its scenes", placeholder="clips/holiday.mp4", max_lines=1)
            cut = gr.Button("Cut", scale=0, min_width=120)
        more = gr.HTML(elem_classes="told")

        def source(name: str, path: str, use: str) -> str:
            words = {"project": name, "path": path, "kind": use}
            return answered(lambda: actions.perform(actions.source, root, words, local=local))

        on(add.click, source, [project, where, kind], more)
        on(cut.click, asking(root, "split", "path"), [project, long], more)
    live("data", 2)
    gr.HTML('<div class="vt" data-clips="1"></div>')


def accept(root: Path, name: str, paths: list[Path]) -> str:
    """Take sent files in and start a check; what became of each, as HTML."""

    def take() -> Mapping[str, Any]:
        got = uploads.accept(named(root, name), paths)
        taken = sum(one.taken for one in got)
        if taken:
            actions.start_check(named(root, name))
        words = f"{counted(taken, 'file')} added" if taken else "nothing was added"
        return {"say": words, "refused": [one for one in got if not one.taken]}

    return answered(take)


def part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """The account of the clips in figures, with what is at work; the table below it is the script's."""
    cut, job, last = latest(project.folder, "split"), latest(project.folder, "check"), clips.last_account(project)
    if cut is not None and cut.state == "done" and (job is None or job.started < (cut.ended or 0)):
        actions.start_check(project)  # the scenes are new clips
        job = latest(project.folder, "check")
    check, account = last or (None, {})
    return html(
        "data",
        project=project,
        check=check,
        account=mapping(account),
        checking=None if check == job else job,
        cutting=cut,
        any_clips=bool(datasets(project)),
        sources=[mapping(row) for row in project.facts.get("sources", ())],
        sizes=[(shape_words(row["shape"]), plain(row["windows"])) for row in account.get("buckets", ())],
        sheet=(project.folder / "sheet" / "index.html").is_file(),
    )
