"""What a command is called with, resolved into a config and the base model that it names.

Nothing here imports torch, so that ``check`` and ``plan`` of a dataset start at once.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from videotune.config.load import (
    checked_keys,
    merge,
    parse_sets,
    read_config,
    read_preset,
    shortened,
)
from videotune.config.resolve import Resolved, resolve
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.models.base_model import own_files, place_of, published, spec_for
from videotune.models.model_files import NotHere, note
from videotune.sampling.prompts import prompts_in
from videotune.types import BasePlace, ModelSpec


@dataclass(frozen=True)
class Overrides:
    """What a command is called with: --preset, --config, --family, --data, each --set, and --base."""

    preset: str | None = None
    config: Path | Config | Mapping[str, Any] | None = None
    family: str | None = None
    data: str | None = None
    sets: tuple[str, ...] = ()
    base: str | None = None


ConfigSource = Overrides | Config | Mapping[str, Any] | Path | str | None
"""A config: its keys, a ``videotune.Config``, or the JSON or YAML file that holds them."""


class Layers(TypedDict, total=False):
    """What goes with a config: a preset below it, and on top of it a family, clips, ``KEY=VALUE`` words, a base model."""

    preset: str | None
    family: str | None
    data: str | None
    sets: tuple[str, ...]
    base: str | None


def overrides(
    config: ConfigSource, layers: Layers, allow_skips: str | None = None
) -> Overrides:
    """What a command is called with, in one object.

    With ``allow_skips`` clips without a caption are skipped like others, unless missing_caption is set.

    Raises VideotuneError where ``allow_skips`` is neither a number nor "all".
    """
    if allow_skips not in (None, "all") and not allow_skips.isdecimal():
        raise VideotuneError(f"--allow-skips takes a number or all, not {allow_skips!r}")
    found = config
    if not isinstance(found, Overrides):
        found = Overrides(config=Path(found) if isinstance(found, str) else found, **layers)
    if allow_skips is None or "missing_caption" in user_keys(found):
        return found
    return replace(found, sets=(*found.sets, "missing_caption=skip"))


def user_keys(words: Overrides) -> dict[str, Any]:
    """The user's own keys, with local paths made absolute."""
    config = words.config
    user = {}
    if isinstance(config, Path):
        user = read_config(config)
    elif config is not None:
        given = (
            config.model_dump(mode="json", exclude_unset=True)
            if isinstance(config, Config)
            else dict(config)
        )
        user = checked_keys(given, "config")
    named = {"family": words.family, "base_model_name": words.base}
    user = merge(user, {key: value for key, value in named.items() if value})
    if words.data and "datasets" in user:
        where = config if isinstance(config, Path) else "the config"
        raise VideotuneError(
            f"both --data and the datasets of {where}: which clips? Leave one out."
        )
    if words.data:
        user = merge(user, {"datasets": [{"path": str(words.data)}]})
    user = absolute_paths(with_sets(user, parse_sets(words.sets)))
    return user | ({"samples": prompts_in(user["samples"])} if "samples" in user else {})


def preset_keys(words: Overrides) -> dict[str, Any]:
    """The preset's keys; none where none is named."""
    return absolute_paths(read_preset(words.preset)) if words.preset else {}


def with_sets(user: dict[str, Any], sets: dict[str, Any]) -> dict[str, Any]:
    """The keys with those of ``--set`` on top.

    ``datasets.KEY`` sets a key of the only dataset, ``datasets.N.KEY`` one of the N-th, counted from 0.
    Raises VideotuneError where it is not clear which dataset is meant.
    """
    rows = user.get("datasets")
    changes = sets.get("datasets")
    if not isinstance(changes, dict):
        return merge(user, sets)
    rows = list(rows) if isinstance(rows, list) else []
    numbered = all(isinstance(one, dict) for one in changes.values()) and all(
        name.isdecimal() for name in changes
    )
    if not numbered and len(rows) != 1:
        count = (
            f"there are {len(rows)} datasets: name one, such as datasets.0"
            if rows
            else "name the clips by --data"
        )
        raise VideotuneError(f"--set datasets.{next(iter(changes))}: {count}")
    for name, inner in changes.items() if numbered else [("0", changes)]:
        if int(name) >= len(rows):
            raise VideotuneError(
                f"--set datasets.{name}: there are {len(rows)} datasets, counted from 0"
            )
        rows[int(name)] = merge(rows[int(name)], inner)
    return merge(user, {**sets, "datasets": rows})


def absolute_paths(layer: dict[str, Any]) -> dict[str, Any]:
    """The same keys with local paths made absolute, so that a run can be resumed from any folder."""
    return {name: _absolute(value, name) for name, value in layer.items()}


def _absolute(value: Any, key: str) -> Any:
    """A value with the paths in it made absolute; ``key``: its dotted name, with [] for the items of a list."""
    if isinstance(value, dict):
        return {name: _absolute(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_absolute(inner, f"{key}[]") for inner in value]
    return LOCAL[key](value) if isinstance(value, str) and key in LOCAL else value


def absolute(path: str) -> str:
    """A path as it is from anywhere."""
    return str(expand_user(path).absolute())


def local_or_id(path: str) -> str:
    """A dataset's path made absolute; a Hub dataset's id, where nothing of that name is here, as it is."""
    is_id = (
        re.fullmatch(r"(hf://datasets/.+|[\w.-]+/[\w.-]+)", path)
        and not expand_user(path).exists()
    )
    return path if is_id else absolute(path)


def where_there(path: str) -> str:
    """A path made absolute where something lies there; else it is an id of the Hub."""
    return absolute(path) if expand_user(path).exists() else path


LOCAL: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("prior_preservation", "datasets[].path"), local_or_id),
    **dict.fromkeys(("base_model_name", "base_parts"), where_there),
    **dict.fromkeys(("cache_dir", "init_from", "output_model_destination"), absolute),
    **dict.fromkeys(("transformer.file", "transformer.file[]"), absolute),
    "sample_metrics.encoder": lambda path: (
        absolute(path) if expand_user(path).is_dir() else path
    ),
}
"""Keys that name what may lie on this machine, and how each becomes absolute."""


def expand_user(path: str) -> Path:
    """A path with ~ written out; VideotuneError where it names a user that there is not."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise VideotuneError(f"{path}: {error}") from error


def _base(named: Mapping[str, Any], planning: bool) -> BasePlace:
    try:
        return place_of(named)
    except NotHere:
        name = named.get("base_parts") or named["base_model_name"]
        folder = published(name) if planning else None
        if folder is None:
            raise
        note(
            f"note: {name} is not here, and the Hub is not reached: its configs that come with videotune are used"
        )
        return BasePlace(named["base_model_name"], folder)


def reopened(settings: Mapping[str, Any]) -> tuple[Resolved, ModelSpec, BasePlace]:
    """The config of settings that name their base model, such as a run's, with its model and the place of its base."""
    base = place_of(settings)
    spec = spec_for(settings.get("family"), base)
    return resolve(settings, {}, spec), spec, base


def resolve_config(
    words: Overrides, *, planning: bool = False
) -> tuple[Resolved, ModelSpec, BasePlace | None]:
    """Config layers and the base model they name.

    ``planning``: no weights will be read, so of a base model that is not here the configs that come with videotune will do.
    Raises VideotuneError where neither a family nor a base model is given.
    """
    user = user_keys(words)
    preset = preset_keys(words)
    named = merge(preset, user)
    for key in ("base_model_name", "base_parts", "family"):
        if not isinstance(named.get(key), str | None):
            raise VideotuneError(f"{key}: takes text, not {shortened(repr(named[key]))}")
    base = _base(named, planning) if named.get("base_model_name") else None
    family = named.get("family")
    if base is None and family is None:
        raise VideotuneError(
            "which model? Give --preset NAME (see `videotune presets list`), --config FILE, or --set base_model_name=…"
        )
    spec = spec_for(family, base)
    resolved = resolve(user, preset, spec)
    own_files(resolved.config, spec)  # a file that is not there is said before anything is read
    return resolved, spec, base
