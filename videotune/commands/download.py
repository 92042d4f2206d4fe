"""``download``: fetch a base model before a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import disk_usage
from videotune.models.base_model import place
from videotune.models.hub import describe_download, download_text
from videotune.presets.shipped import read_preset


def download(model: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Fetch what is missing of a base model, and check every file.

    Files that are complete are kept if the connection breaks.

    Args:
        model: an id of the Hub, or the name of a preset, whose base model is meant.
        dry_run: only ask the Hub what would be fetched.

    Returns:
        {"model", "folder", "bytes", "missing_bytes", "files", "cache", "licence"}; the
        folder is None in a dry run, and only model and folder are known otherwise.

    Raises:
        VideotuneError: if the model is not on the Hub, the Hub is not reached or the
            disk is too full.
    """
    name = hub_id(model)
    if dry_run:
        details = describe_download(name)
        echo(f"{name}: {download_text(details)}")
        return {"model": name, "folder": None, **asdict(details)}

    folder = place(name, echo=echo).folder
    return {"model": name, "folder": str(folder), "bytes": disk_usage(folder)}


def hub_id(model: str) -> str:
    """Return the id on the Hub of a base model, by its id or by a preset's name.

    Raises:
        VideotuneError: for a model that needs no download, and an unknown preset.
    """
    if Path(model).expanduser().exists():
        raise VideotuneError(f"{model} is here already: nothing has to be downloaded")
    name = model
    if "/" not in model and not model.startswith("asset:"):
        name = str(read_preset(model)["base_model_name"])
    if name.startswith("asset:"):
        raise VideotuneError(f"{name} comes with videotune: it needs no download")
    return name
