"""Make the local paths in a config absolute, so that a run can be resumed from any folder."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from videotune.data.object_store import is_object_url
from videotune.errors import VideotuneError
from videotune.sampling.given_files import FILE_KEYS


def absolute_paths(keys: dict[str, Any]) -> dict[str, Any]:
    """Make local paths absolute, so that a run can be resumed from any folder."""
    return {name: _absolute(value, name) for name, value in keys.items()}


def _absolute(value: Any, key: str) -> Any:
    """Make the paths in a value absolute.

    ``key`` is its dotted name, with [] for the items of a list.
    """
    if isinstance(value, dict):
        return {
            name: _absolute(inner, f"{key}.{name}") for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_absolute(inner, f"{key}[]") for inner in value]
    if isinstance(value, str) and key in LOCAL:
        return LOCAL[key](value)
    return value


def absolute(path: str) -> str:
    """Return a path that is valid from any folder."""
    return str(expand_user(path).absolute())


def local_or_id(path: str) -> str:
    """Make a dataset's path absolute; leave an address of an object store, and the id of
    a Hub dataset, unless a local file has that name.
    """
    if is_object_url(path):
        return path
    looks_like_id = re.fullmatch(r"(hf://datasets/.+|[\w.-]+/[\w.-]+)", path)
    if looks_like_id and not expand_user(path).exists():
        return path
    return absolute(path)


def absolute_or_url(path: str) -> str:
    """Make a path absolute; leave an address of an object store."""
    return path if is_object_url(path) else absolute(path)


def where_there(path: str) -> str:
    """Make the path of an existing file or folder absolute; anything else is an id of
    the Hub.
    """
    return absolute(path) if expand_user(path).exists() else path


LOCAL: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("prior_preservation", "datasets[].path"), local_or_id),
    **dict.fromkeys(("base_model_name", "base_parts"), where_there),
    "cache_dir": absolute_or_url,
    **dict.fromkeys(("init_from", "output_model_destination"), absolute),
    **dict.fromkeys(("transformer.file", "transformer.file[]"), absolute),
    **dict.fromkeys(("text_encoder.file", "text_encoder.file[]"), absolute),
    "vae.file": absolute,
    **dict.fromkeys(("base_loras[]", "base_loras[].file"), absolute),
    **dict.fromkeys(("sample.loras[]", "sample.loras[].file"), absolute),
    **dict.fromkeys(("samples[].loras[]", "samples[].loras[].file"), absolute),
    **{f"samples[].{name}": absolute for name in FILE_KEYS},
    "datasets[].loss_masks": absolute_or_url,
    "sample_metrics.encoder": lambda path: (
        absolute(path) if expand_user(path).is_dir() else path
    ),
}
"""Keys that may name local files, and how each becomes absolute."""


def expand_user(path: str) -> Path:
    """Expand ~ in a path.

    Raises VideotuneError if it names a user that does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise VideotuneError(f"{path}: {error}") from error
