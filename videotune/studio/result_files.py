"""The files that a run has exported, and the copy of one into ComfyUI's folder."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from filecmp import cmp
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors import SafetensorError, safe_open

from videotune.errors import VideotuneError
from videotune.files import disk_usage, path_from
from videotune.reporter.inventory import use
from videotune.reporter.read import Run, items, mapping, number
from videotune.studio.downloads import download_name
from videotune.studio.paths import PathRule
from videotune.studio.preview_rows import branches
from videotune.studio.projects import Project, inside
from videotune.studio.settings import change_settings, read_settings
from videotune.studio.status import read_cached

FORMAT_ORDER = ("comfyui", "diffusers", "peft")
"""Formats in the order in which most people want them."""

COMFYUI_VARIABLE = "VIDEOTUNE_COMFYUI"
"""Environment variable with the folder of ComfyUI, if it has no setting."""

LORA_FOLDER = Path("models", "loras")
"""Folder of ComfyUI for LoRA files, below its own."""

OTHER_FOLDERS = {"embedding": "embeddings", "model": "diffusion_models"}
"""Folders of ComfyUI beside that of LoRA files, by what a file holds."""

MERGED_NAME = re.compile(r"-step-[0-9]+-merged(?![a-z])")

STEP_IN_NAME = re.compile(r"-step-([0-9]{1,12})(?![0-9])")

MOST_COPIES = 1000

COMPARED_BYTES = 1 << 20
"""Bytes of a file that tell whether it is a copy of another one of the same size."""


@dataclass(frozen=True)
class ExportedFile:
    """A file or folder that a run has exported and that is still there."""

    branch: str
    """Label of the branch that has exported it; empty for the run itself."""

    record: Any
    """Its entry in exports.json."""

    path: Path

    @property
    def format(self) -> str:
        """Its format, such as comfyui; "merge" for a merged model's folder, and
        "merged-comfyui" for its file.
        """
        is_merged = MERGED_NAME.search(self.path.name) is not None
        if not is_merged:
            return str(self.record["format"])
        return "merge" if self.path.is_dir() else "merged-comfyui"

    @property
    def step(self) -> int | None:
        """The step of its weights, which is part of its name."""
        match = STEP_IN_NAME.search(self.path.name)
        return int(match[1]) if match else None

    @property
    def is_verified(self) -> bool:
        """Whether it was read back after writing."""
        return number(mapping(self.record["verified"])["max_error"]) is not None

    @property
    def size(self) -> int:
        """Its bytes; for a folder, those of all its files."""
        return disk_usage(self.path)


def exported_files(project: Project, run: Path) -> Iterator[ExportedFile]:
    """Yield what a run and its branches have exported, as far as it is there."""
    for label, folder in branches(run):
        for record in map(mapping, items(read_cached(folder / "exports.json"))):
            relative = path_from(project.folder, folder / str(record["path"]))
            try:
                path = inside(project.folder, relative)
            except VideotuneError:
                continue  # outside of the project, from where nothing is served
            if path.exists():
                yield ExportedFile(label, record, path)


def files_to_take(
    files: Sequence[ExportedFile], step: int | None
) -> list[ExportedFile]:
    """Return the files of a step that other programs load, the likeliest first.

    A model with two experts has two files of a format.
    """
    chosen = [
        file
        for file in files
        if file.step == step and not file.branch and file.format in FORMAT_ORDER
    ]
    return sorted(chosen, key=lambda file: FORMAT_ORDER.index(file.format))


def comfyui_files(
    files: Sequence[ExportedFile],
) -> dict[int | None, list[ExportedFile]]:
    """Return a run's own files for ComfyUI by the step of their weights."""
    files_by_step: dict[int | None, list[ExportedFile]] = {}
    for file in files:
        if file.format == "comfyui" and not file.branch:
            files_by_step.setdefault(file.step, []).append(file)
    return files_by_step


def use_of_file(
    run: Run, files: Sequence[ExportedFile], file: ExportedFile
) -> dict[str, Any]:
    """Return the report's chapter on using a file in diffusers.

    A model with two experts is loaded with a file of each.

    Args:
        run: the run.
        files: all files of the run and of its branches.
        file: the one that is used.
    """
    same_result = [
        other.record
        for other in files
        if (other.branch, other.format, other.step)
        == (file.branch, file.format, file.step)
    ]
    folder = dict(branches(run.folder))[file.branch]
    return use(replace(run, folder=folder, exports=same_result))


def comfyui_loras(setting: str | None) -> Path | None:
    """Return ComfyUI's folder of LoRA files.

    Args:
        setting: the folder that the user has named: ComfyUI's own, or that of its LoRA
            files. None: the one of the environment variable.

    Returns:
        The folder, which may be still to be made in a folder that has ComfyUI's models;
        None if no folder was named.

    Raises:
        VideotuneError: if the folder is not there, or not ComfyUI's.
    """
    text = setting or os.environ.get(COMFYUI_VARIABLE, "")
    if not text:
        return None

    folder = Path(text).expanduser()
    for candidate in (folder / LORA_FOLDER, folder):
        if candidate.is_dir() and candidate.name == LORA_FOLDER.name:
            return candidate
    if (folder / LORA_FOLDER.parent).is_dir():
        return folder / LORA_FOLDER
    raise VideotuneError(
        f"{text[:200]}: there is no folder {LORA_FOLDER.as_posix()} in it. Give the "
        "folder that ComfyUI was installed into, or its folder of LoRA files."
    )


def chosen_comfyui_loras(root: Path, rule: PathRule, folder: str) -> Path:
    """Return ComfyUI's folder of LoRA files.

    Args:
        root: folder of the projects.
        rule: what the user may name.
        folder: ComfyUI's folder, which the studio then keeps; empty for the one that it
            keeps.

    Raises:
        VideotuneError: if no folder is named, or it is not ComfyUI's.
    """
    if folder:
        rule.check_path(folder, "ComfyUI's folder")
        comfyui_loras(folder)
        change_settings(root, {"comfyui": folder})

    loras = comfyui_loras(read_settings(root).get("comfyui"))
    if loras is None:
        raise VideotuneError("name the folder that ComfyUI was installed into")
    return loras


def copy_to_comfyui(file: ExportedFile, project: Project, loras: Path) -> Path:
    """Copy an exported file into ComfyUI's folder for such files, and return the copy.

    Nothing there is overwritten: a file of that name with other content gets a number.
    """
    if not file.path.is_file():
        raise VideotuneError(f"{file.path.name} is a folder: download it instead")
    loras.mkdir(exist_ok=True)
    folder = _comfyui_folder_of(file.path, loras)
    folder.mkdir(exist_ok=True)
    target = _free_target(
        file.path, folder, Path(download_name(project, file.path)).stem
    )
    if target.exists():
        return target

    part = folder / f".{target.name}.{token_hex(4)}"
    try:
        shutil.copyfile(file.path, part)
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink()
    return target


def copies_in_comfyui(files: Sequence[ExportedFile], loras: Path | None) -> list[str]:
    """Return the names under which ComfyUI's folders hold exported files, also those of
    an earlier name of the project.

    Args:
        files: the exported files; those of other programs are left out.
        loras: ComfyUI's folder of LoRA files; None if it is not known.
    """
    if loras is None:
        return []

    names = []
    for file in files:
        if file.format != "comfyui" or not file.path.is_file():
            continue
        folder = _comfyui_folder_of(file.path, loras)
        pattern = f"*{escape(file.path.stem)}*{file.path.suffix}"
        for copy in sorted(folder.glob(pattern)):
            if copy.is_file() and _is_same_file(file.path, copy):
                names.append(copy.name)
    return names


def _is_same_file(source: Path, copy: Path) -> bool:
    """Return whether a file is a copy of an exported one, by its size and its beginning:
    the header there has the digest of the tensors, and a whole model takes a minute to
    read.
    """
    try:
        if source.stat().st_size != copy.stat().st_size:
            return False
        with source.open("rb") as exported, copy.open("rb") as copied:
            return exported.read(COMPARED_BYTES) == copied.read(COMPARED_BYTES)
    except OSError:  # removed meanwhile
        return False


def _comfyui_folder_of(file: Path, loras: Path) -> Path:
    """Return the folder in which ComfyUI looks for an exported file."""
    other_folder = OTHER_FOLDERS.get(_content_of(file))
    if other_folder is not None and loras.parent.name == LORA_FOLDER.parent.name:
        return loras.parent / other_folder
    return loras


def _content_of(path: Path) -> str:
    """Return what videotune's own header says of an exported file: "lora", "embedding",
    "model", or "" if it has no header.
    """
    try:
        with safe_open(path, "np") as file:
            facts = mapping(json.loads((file.metadata() or {})["videotune"]))
    except (SafetensorError, OSError, KeyError, ValueError):
        return ""
    if "variant" in facts:
        return "lora"
    return "embedding" if "vectors" in facts else "model"


def _free_target(source: Path, folder: Path, stem: str) -> Path:
    """Return a path that is free, or that holds the same content already."""
    for count in range(1, MOST_COPIES):
        ending = "" if count == 1 else f"-{count}"
        target = folder / f"{stem}{ending}{source.suffix}"
        if not os.path.lexists(target):
            return target
        if target.is_file() and cmp(source, target, shallow=False):
            return target
    raise VideotuneError(
        f"{folder} has too many copies of {source.name}: remove some of them"
    )


def step_to_take(
    recommended: int | None,
    saves: Sequence[tuple[int, Path]],
    files: Sequence[ExportedFile],
) -> int | None:
    """Return the step whose files the page offers first: the recommended one, else the
    newest checkpoint, else the newest file.
    """
    if recommended is not None:
        return recommended
    steps = [step for step, _ in saves]
    steps += [] if steps else [file.step for file in files if file.step is not None]
    return max(steps, default=None)
