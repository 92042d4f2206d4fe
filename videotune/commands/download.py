"""``download``: fetch a base model before a run."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from videotune.config.base_models import download_size, published_licence
from videotune.config.nested_keys import merge
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import CONFIG_SUFFIXES, disk_usage
from videotune.job.overrides import Overrides, preset_keys, user_keys
from videotune.models.base_model import place
from videotune.models.hub import (
    HubUnreached,
    describe_download,
    download_text,
    is_complete_here,
)
from videotune.presets.shipped import read_preset


def download(model: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Fetch what is missing of a base model, and check every file.

    Files that are complete are kept if the connection breaks.

    Args:
        model: an id of the Hub; or the name of a preset or a config file, whose base
            model is meant.
        dry_run: only ask the Hub what would be fetched.

    Returns:
        {"model", "folder", "bytes", "missing_bytes", "files", "cache", "licence"}; the
        folder is None in a dry run, and only model and folder are known otherwise. A dry
        run that does not reach the Hub has "download" as a plan has it, and no bytes.

    Raises:
        VideotuneError: if the model is not on the Hub, the Hub is not reached or the
            disk is too full.
    """
    name = hub_id(model)
    if dry_run:
        try:
            details = describe_download(name)
        except HubUnreached as error:
            return _known_without_hub(name, error)
        echo(f"{name}: {download_text(details)}")
        return {"model": name, "folder": None, **asdict(details)}

    folder = place(name, echo=echo).folder
    return {"model": name, "folder": str(folder), "bytes": disk_usage(folder)}


def _known_without_hub(name: str, error: HubUnreached) -> dict[str, Any]:
    """Return what is known of a download without a network.

    Raises:
        HubUnreached: nothing is known of this model.
    """
    model = name.partition("@")[0]
    size = download_size(model)
    if size is None:
        raise error
    licence = published_licence(model)
    is_here = is_complete_here(name)
    return {
        "model": name,
        "folder": None,
        "download": asdict(size),
        "licence": licence or None,
        "is_here": is_here,
    }


def hub_id(model: str) -> str:
    """Return the id on the Hub of a base model, by its id, by a preset's name, or by a
    config file that names it.

    Raises:
        VideotuneError: for a model that needs no download, and an unknown preset.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() in CONFIG_SUFFIXES:
        overrides = Overrides(config=path)
        keys = merge(preset_keys(overrides), user_keys(overrides))
        name = base_of(keys)
        if not name:
            raise VideotuneError(
                f"{model}: it names no base model. Set base_model_name in it"
            )
    elif "/" in model or model.startswith("asset:") or path.exists():
        name = model
    else:
        name = base_of(read_preset(model))

    if name.startswith("asset:"):
        raise VideotuneError(f"{name} comes with videotune: it needs no download")
    if Path(name).expanduser().exists():
        raise VideotuneError(f"{name} is here already: nothing has to be downloaded")
    return name


def base_of(keys: Mapping[str, Any]) -> str:
    """Return the model of a config whose files are fetched; empty if it names none.

    If ``base_model_name`` is a file of weights, it is that of ``base_parts``.
    """
    return str(keys.get("base_parts") or keys.get("base_model_name") or "")
