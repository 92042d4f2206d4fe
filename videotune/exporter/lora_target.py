"""The files that ``lora`` commands read and write, checked before torch is imported."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.models.file_kinds import foreign_kind, is_lfs_pointer
from videotune.models.model_files import headers
from videotune.text import as_argument, counted, some

if TYPE_CHECKING:
    from videotune.config.sections import LoraFile

FORM_KINDS = {
    "diffusers": ("LORA", "DORA"),
    "comfyui": ("LORA", "LOHA", "LOKR"),
    "kohya": ("LORA", "LOHA", "LOKR"),
    "original": ("LORA", "LOHA", "LOKR"),
    "peft": ("LORA", "DORA", "LOHA", "LOKR", "OFT"),
}
"""The forms that are written, and the kinds of adapter that each can hold."""

_STANDARD_NAMES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
_PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_CONNECTOR_KEY = re.compile("(video|audio)_(embeddings_)?connector")


@dataclass(frozen=True)
class Target:
    """The file or folder that a result is written to."""

    path: Path

    form: str = "diffusers"
    """A key of ``FORM_KINDS``."""

    base: str | None = None
    """The base model of the sources, if they do not name it."""

    family: str | None = None
    """The family of the sources, if they do not name it."""

    overwrite: bool = False

    def check(self, *sources: Path) -> None:
        """Raise VideotuneError if the form is unknown, a source does not exist, or the
        path is taken or does not go with the form.
        """
        refuse_form(self.form)
        for source in sources:
            refuse_missing(source)
        fault = self._fault(sources)
        if fault:
            raise VideotuneError(f"--out {self.path} {fault}; give another name")

    def _fault(self, sources: Sequence[Path]) -> str:
        exists = self.path.exists()
        if self.form == "peft":
            if exists and not (self.path / "adapter_config.json").is_file():
                return "is not a PEFT folder, so it is not replaced"
        elif self.path.suffix != ".safetensors" or self.path.is_dir():
            return "must be a file with the ending .safetensors"

        # Path.resolve raises RuntimeError for a link to itself.
        real_sources = [os.path.realpath(source) for source in sources]
        if os.path.realpath(self.path) in real_sources:
            return "is one of the sources"
        if exists and not self.overwrite:
            return "already exists; --overwrite replaces it"
        return ""


def refuse_form(form: str) -> None:
    """Raise VideotuneError for a form that is not written."""
    if form not in FORM_KINDS:
        forms = ", ".join(FORM_KINDS)
        raise VideotuneError(f"--to {form}: this form is unknown. Choose of {forms}")


def refuse_missing(path: Path) -> None:
    """Raise VideotuneError if there is no such file or folder."""
    if not path.exists():
        raise VideotuneError(f"no such file or folder: {path}")


def refuse_weights(paths: Sequence[Path], weights: Sequence[float]) -> None:
    """Raise VideotuneError unless there is a finite weight for each file, one for all,
    or none.
    """
    are_finite = all(math.isfinite(weight) for weight in weights)
    if len(weights) not in (0, 1, len(paths)) or not are_finite:
        listed_weights = ", ".join(map(str, weights))
        files = counted(len(paths), "file")
        raise VideotuneError(
            f"--weight: {listed_weights} for {files}; give one finite number per"
            " file, or one for all"
        )


def adapter_path(path: Path) -> Path:
    """Return an adapter's file: the path, or the one safetensors file in a folder.

    PEFT and diffusers save an adapter as a folder.

    Raises:
        VideotuneError: if there is not exactly one file, or its format can run code
            when read.
    """
    if path.is_dir():
        names = _adapter_names(path)
        standard_names = [name for name in names if name in _STANDARD_NAMES]
        candidates = standard_names or names
        if len(candidates) != 1:
            raise VideotuneError(_which_file(path, candidates))
        return path / candidates[0]

    if path.suffix in _PICKLE_SUFFIXES:
        raise VideotuneError(
            f"{path} can run code when it is read, so it is not read; convert it to safetensors"
        )
    _refuse_foreign(path)
    return path


def _refuse_foreign(path: Path) -> None:
    """Raise VideotuneError for a file that is surely none of safetensors."""
    if not path.is_file():
        return
    kind = foreign_kind(path)
    if kind and not is_lfs_pointer(path):
        raise VideotuneError(
            f"{path} is {kind}, not a LoRA. Give the .safetensors file of a LoRA, or the "
            "folder that holds it"
        )


def _adapter_names(folder: Path) -> list[str]:
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    return [name for name in names if not name.startswith(".")]


def _which_file(folder: Path, candidates: Sequence[str]) -> str:
    """Return what to name instead of a folder that does not hold one adapter."""
    if candidates:
        return (
            f"{folder} holds {len(candidates)} safetensors files. Name the one to read: "
            f"{some(candidates)}"
        )

    exported = _adapter_names(folder / "export")
    if exported:
        paths = [str(folder / "export" / name) for name in exported]
        return f"{folder} is a run; its files are in export. Name one: {some(paths)}"
    if (folder / "config.json").is_file() and (folder / "journal.jsonl").is_file():
        return f"{folder} is a run without exports. Write them: videotune export {as_argument(folder)}"
    return (
        f"{folder} is a folder without a safetensors file. Give the .safetensors file of a "
        "LoRA, or the folder that holds it"
    )


def changes_connectors(lora: LoraFile | Path) -> bool:
    """Return whether a LoRA file has modules of text connectors.

    False for a file that cannot be read: it is refused where it is opened.
    """
    path = lora if isinstance(lora, Path) else Path(lora.file).expanduser()
    try:
        keys = headers([adapter_path(path)])
    except (VideotuneError, OSError):
        return False
    return any(map(_CONNECTOR_KEY.search, keys))
