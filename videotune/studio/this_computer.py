"""What a plan takes for granted and this computer may not have: the card, the base model,
and room on the disks.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from videotune.config.base_models import DownloadSize, download_size
from videotune.config.nested_keys import flatten
from videotune.files import existing_folder
from videotune.reporter.read import mapping, number
from videotune.studio import gpu, model_choices
from videotune.studio.auto_caption import HUB_MODEL
from videotune.studio.form import inherited_values
from videotune.studio.hub_models import downloaded_models
from videotune.studio.projects import Project, draft
from videotune.studio.trained_model import trains_anywhere
from videotune.text import time_span

OWN_WEIGHTS = ("base_parts", "transformer.file", "text_encoder.file", "vae.file")
"""Settings that name weights which are then not downloaded with the base model."""

CACHE_SIZES = ("latent_bytes", "condition_bytes", "text_bytes_at_most")
"""Sizes of the plan that belong to the cache of encoded clips."""


@dataclass(frozen=True)
class PendingDownload:
    """A base model that a training would download first."""

    model: str

    size: DownloadSize | None
    """What is known of its size; None if nothing is."""

    @property
    def gigabytes(self) -> float | None:
        """10^9 bytes, at least; None if nothing is known of them."""
        return None if self.size is None else self.size.gigabytes


@dataclass(frozen=True)
class DiskNeed:
    """What a training writes to a disk, and what is free there."""

    folder: Path
    needed_bytes: float
    free_bytes: int

    @property
    def short_bytes(self) -> float:
        """How much is missing; 0 if it is enough."""
        return max(0.0, self.needed_bytes - self.free_bytes)


def card_elsewhere(project: Project) -> str:
    """Return the name of the chosen card, if this computer has no NVIDIA card; else ""."""
    card = model_choices.chosen_card(project.facts)
    return card.name if card.name and not gpu.list_gpus() else ""


def needs_a_card(project: Project) -> bool:
    """Return whether the project's model trains on cards only, and this computer has
    none.
    """
    return not trains_anywhere(project) and not gpu.list_gpus()


def notes_on_this_computer(project: Project, plan: Mapping[str, Any]) -> list[str]:
    """Return notes on the time of a trial, and on the download of the base model.

    Args:
        project: the project.
        plan: the plan of its present settings, as far as it is calculated.
    """
    if not project.has_model:
        return []
    if trains_anywhere(project):
        note = _note_on_trial(project, plan)
        return [note] if note else []

    download = pending_download(project)
    if download is None:
        return []
    size = "it is downloaded"
    if download.size is not None:
        size = f"{download.size} are downloaded"
    return [
        f"{download.model} is not on this computer: {size} when the training starts."
    ]


def hours_here(project: Project, plan: Mapping[str, Any]) -> float | None:
    """Return how long the steps of a trial take on the CPU of this computer, if it has no
    card; None for other projects, or if it is not calculated.
    """
    is_trial = project.has_model and trains_anywhere(project)
    if not is_trial or gpu.list_gpus():
        return None
    return number(plan.get("cpu_hours"))


def _note_on_trial(project: Project, plan: Mapping[str, Any]) -> str:
    """Return where a trial takes how long, if the chosen card is not in this computer."""
    card = card_elsewhere(project)
    if hours_here(project, plan) is None or not card:
        return ""
    hours = (number(plan.get("hours")) or 0.0) + (
        number(plan.get("hours_beside")) or 0.0
    )
    return (
        "The time is that on the CPU of this computer, which has no NVIDIA card. "
        f"On {card} it would be {time_span(hours)}."
    )


def pending_download(project: Project) -> PendingDownload | None:
    """Return the base model that a training would download; None if it is here."""
    if not project.has_model:
        return None
    values = {**inherited_values(project.preset), **flatten(draft(project))}
    base = str(values["base_model_name"])
    names = [model.name for model in downloaded_models()]
    if not HUB_MODEL.fullmatch(base) or base in names or Path(base).exists():
        return None

    is_replaced = any(values.get(key) for key in OWN_WEIGHTS)
    return PendingDownload(base, None if is_replaced else download_size(base))


def disk_needs(project: Project, plan: Mapping[str, Any]) -> list[DiskNeed]:
    """Return what a training writes to each disk: its run and cache to the project's,
    the base model to that of the Hub's folder.
    """
    sizes = mapping(plan.get("disk"))
    needed = number(sizes["run_bytes"]) or 0.0
    is_encoded = any((project.folder / "runs").glob("*/journal.jsonl"))
    if not is_encoded:
        needed += sum(number(sizes[name]) or 0.0 for name in CACHE_SIZES)
    need_by_folder = {project.folder: needed}

    download = pending_download(project)
    if download is not None and download.gigabytes is not None:
        hub_folder = existing_folder(Path(constants.HF_HUB_CACHE))
        is_same_disk = os.stat(hub_folder).st_dev == os.stat(project.folder).st_dev
        folder = project.folder if is_same_disk else hub_folder
        need_by_folder.setdefault(folder, 0.0)
        need_by_folder[folder] += download.gigabytes * 1e9

    return [
        DiskNeed(folder, needed_bytes, shutil.disk_usage(folder).free)
        for folder, needed_bytes in need_by_folder.items()
    ]
