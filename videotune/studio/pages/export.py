"""The page Export: files for other programs, whether reading them back gave the same, and the download."""

from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from videotune.reporter.read import Run, mapping, number
from videotune.studio.actions import run_folder
from videotune.studio.jobs import latest
from videotune.studio.pages.kit import html, live
from videotune.studio.pages.train import chosen, runs
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
    variant = run.setting("lora", "variant") if method == "LORA" else None
    return OFFERED.get(str(variant), ("comfyui", "diffusers"))


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    live("export", 3)


def part(root: Path, project: Project, query: Mapping[str, str]) -> str:
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
        titles=FORMATS,
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
