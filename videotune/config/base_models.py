"""What is known of published base models without a network: the size of their download,
their licence, the files that ComfyUI loads them from, and how it reads captions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from videotune.files import read_json

DOWNLOAD_NOTE = (
    "The base model is downloaded once; ≥: at least, where the size of its files is not "
    "known."
)
"""Explains a column of ``DownloadSize.cell``."""


@dataclass(frozen=True)
class DownloadSize:
    """How much of a base model is downloaded, in GB of 10^9 bytes."""

    gigabytes: float

    is_published: bool
    """Whether these are the published files. Otherwise only the weights are known: the
    networks with text encoder and autoencoder, at two bytes a number, which is the least.
    """

    def __str__(self) -> str:
        bound = "about" if self.is_published else "at least"
        return f"{bound} {self.gigabytes:g} GB"

    def cell(self) -> str:
        """Return the size for the cell of a table: "28.9 GB" or "≥21 GB"."""
        bound = "" if self.is_published else "≥"
        return f"{bound}{self.gigabytes:g} GB"


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return read_json(Path(__file__).with_name("base_models.json"))


def download_size(base_model: str) -> DownloadSize | None:
    """Return the size of a base model's download; None if nothing of it is known, and
    for one that comes with videotune.
    """
    facts = _table().get(base_model, {})
    if "download_gb" in facts:
        return DownloadSize(facts["download_gb"], is_published=True)
    if "weights_gb" in facts:
        return DownloadSize(facts["weights_gb"], is_published=False)
    return None


def published_licence(base_model: str) -> str:
    """Return the name of a base model's licence; empty if it is not known."""
    licence: str = _table().get(base_model, {}).get("licence", "")
    return licence


def comfyui_files(base_model: str) -> list[str]:
    """Return the usual files of a base model below ComfyUI/models, the high-noise model
    first; empty if they are not known.
    """
    files: list[str] = _table().get(base_model, {}).get("comfyui", [])
    return files


def has_pictures_only(base_model: str) -> bool:
    """Return whether a base model generates single pictures, and no videos."""
    is_listed: bool = _table().get(base_model, {}).get("pictures_only", False)
    return is_listed


def starting_keys(base_model: str) -> dict[str, Any]:
    """Return the keys that a new config or project of a base model begins with.

    Captions are read as the model's authors and ComfyUI read them, where diffusers reads
    them differently.
    """
    if _table().get(base_model, {}).get("comfyui_reads_otherwise", False):
        return {"text_encoder": {"convention": "authors"}}
    return {}
