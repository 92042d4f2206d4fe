"""The page Export: files for other programs, whether reading them back gave the same, and the download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import gradio as gr

from videotune.reporter.read import Run, mapping, number
from videotune.studio.actions import run_folder
from videotune.studio.jobs import latest
from videotune.studio.markup import NOTHING, Html, badge, element, join, paragraph, table, text
from videotune.studio.pages.data import choose
from videotune.studio.pages.kit import at_work, button, empty, live
from videotune.studio.pages.train import chosen, tabs
from videotune.studio.projects import Project
from videotune.studio.status import read_live

FORMATS = {
    "comfyui": ("ComfyUI", "put the file into ComfyUI's folder models/loras, or models/embeddings for new tokens"),
    "diffusers": ("diffusers", "for Python programs that use the diffusers library"),
    "peft": ("PEFT", "a file for the PEFT library, which trains and loads adapters of this kind"),
}
"""What a format is called, and who reads it."""

OFFERED = {"DORA": ("diffusers",), "LOHA": ("comfyui", "peft"), "LOKR": ("comfyui", "peft"), "OFT": ("peft",)}
"""Formats of kinds of adapters other than LoRA."""


def offered(run: Run) -> tuple[str, ...]:
    """The formats that can be written of what the run trained."""
    method = run.setting("training_method")
    if method == "FINE_TUNE":
        return ("diffusers",)
    variant = mapping(run.setting("lora")).get("variant") if method == "LORA" else None
    return OFFERED.get(str(variant), ("comfyui", "diffusers"))


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("export", 3)


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """The form, what is at work, and the files."""
    if project is None:
        return choose()
    name = chosen(project, query)
    run = read_live(run_folder(project, name)) if name else None
    saves = [str(record.get("step")) for record in run.of_kind("save")] if run else []
    if name is None or run is None or not saves:
        return join(
            [
                tabs(project, query, "export"),
                empty(paragraph(text("There is nothing to export yet: a run has to save first."))),
            ]
        )
    return join(
        [
            tabs(project, query, "export"),
            element("h2", text(f"What {name} has learnt")),
            _files(project, name, run),
            at_work(latest(project.folder, "export", name), "writing files", "export"),
            element("h3", text("Write more")),
            _form(name, saves, offered(run)),
        ]
    )


def _form(name: str, saves: list[str], formats: tuple[str, ...]) -> Html:
    boxes = [
        element(
            "label",
            Html(f'<input type="checkbox" name="{key}"{" checked" if key == formats[0] else ""}>'),
            text(f" {FORMATS[key][0]}"),
            element("small", text(f" {FORMATS[key][1]}")),
            css="check",
        )
        for key in formats
    ]
    options = [element("option", text(f"step {step}"), attributes={"value": step}) for step in reversed(saves)]
    newest = element("option", text("the newest checkpoint"), attributes={"value": ""})
    step = element(
        "label",
        element("span", text("of")),
        element("select", newest, *options, attributes={"name": "step"}),
        css="entry",
    )
    return element(
        "div",
        *boxes,
        element("div", step, button("Export", "export", {"run": name}, css="go"), css="row"),
        attributes={"data-form": "1"},
    )


def _files(project: Project, name: str, run: Run) -> Html:
    if not run.exports:
        return paragraph(text("No file has been written yet."), css="soft")
    rows = []
    for one in run.exports:
        path, verified = Path(str(one.get("path", ""))), mapping(one.get("verified"))
        path = path if path.is_absolute() else run.folder / path
        error = number(verified.get("max_error"))
        same = "the same to the bit" if error == 0 else f"largest difference {error or 0:.1e}"
        parts = f"read back by {verified.get('reader')}: {verified.get('modules')} parts, {same}"
        told = [badge("not verified", "care")] if error is None else [badge("verified", "good"), text(parts)]
        rows.append([text(one.get("format", "")), _download(project, path), join(told)])
    return table(["format", "file", "read back"], rows, "cards") if rows else NOTHING


def _download(project: Project, path: Path) -> Html:
    if not path.is_relative_to(project.folder) or not path.exists():
        return text(f"{path.name} is not there any more")
    kind, name, files = "file", path.name, [path]
    if path.is_dir():
        kind, name, files = "folder", f"{path.name}.zip", [one for one in path.rglob("*") if one.is_file()]
    size = sum(one.stat().st_size for one in files) / 1e6
    where = f"/studio/{kind}?project={quote(project.name)}&path={quote(path.relative_to(project.folder).as_posix())}"
    return element(
        "a",
        text(f"Download {name} ({size:.2f} MB)"),
        css="fetch",
        attributes={"href": where, "download": name},
    )
