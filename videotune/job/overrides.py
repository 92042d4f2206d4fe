"""Resolve what a command is called with into a config and the base model that it names.

Nothing here imports torch, so that ``check`` and ``plan`` of a dataset start at once.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.config.data_schema import READ_ALIKE
from videotune.config.load import (
    checked_keys,
    parse_sets,
    read_config,
    without_epochs_overridden,
)
from videotune.config.nested_keys import merge
from videotune.config.notify_addresses import WITH_SECRETS
from videotune.config.resolve import Resolved, check_values, resolve
from videotune.config.schema import Config
from videotune.data.layouts import require_dataset_path
from videotune.data.locations import is_local
from videotune.errors import VideotuneError
from videotune.exporter.lora_target import changes_connectors
from videotune.job.absolute_paths import absolute_paths, expand_user
from videotune.model_spec import ASSET, ModelSpec
from videotune.models import models_folder
from videotune.models.base_model import (
    check_own_files,
    has_weights_here,
    keys_of_files,
    lacking_parts,
    own_files,
    place_of,
    published,
    spec_for,
)
from videotune.models.model_files import NotHere, note
from videotune.models.registry import find
from videotune.presets.shipped import read_preset
from videotune.sampling.given_files import FILE_KEYS
from videotune.sampling.prompts import resolve_prompts
from videotune.text import shortened
from videotune.types import BasePlace


@dataclass(frozen=True)
class Overrides:
    """The config of a command and what goes on top of it, as the command line or the
    Python API gives them.
    """

    preset: str | None = None
    """Name of a preset; it lies below the config."""
    config: Path | Config | Mapping[str, Any] | None = None
    family: str | None = None
    data: str | None = None
    """The only dataset of a config that names none."""
    held_out: str | None = None
    """Clips that are measured and never trained: one more dataset, of kind validation."""
    sets: tuple[str, ...] = ()
    """``KEY=VALUE`` settings."""
    base: str | None = None
    """The base model."""
    models_folder: Path | None = None
    """A folder in which files of the base model's weights are looked for."""
    accept_licence: bool = False
    """Whether the user accepts the base model's terms with this command."""


ConfigSource = Overrides | Config | Mapping[str, Any] | Path | str | None
"""A config: its keys, a ``videotune.Config``, or the JSON or YAML file that holds them.
"""


def to_overrides(
    config: ConfigSource, keywords: Mapping[str, Any], allow_skips: str | None = None
) -> Overrides:
    """Join a config and the keywords of a command.

    Args:
        config: the config, or overrides.
        keywords: fields of ``Overrides``, which replace those of overrides.
        allow_skips: how many clips may be skipped. Clips without a caption are then
            skipped like others, unless missing_caption is set.

    Raises:
        VideotuneError: if ``allow_skips`` is neither a number nor "all".
    """
    check_allow_skips(allow_skips)
    if isinstance(config, Overrides):
        overrides = replace(config, **keywords)
    else:
        source = Path(config) if isinstance(config, str) else config
        overrides = Overrides(config=source, **keywords)

    if allow_skips is None or "missing_caption" in user_keys(overrides):
        return overrides
    return replace(overrides, sets=(*overrides.sets, "missing_caption=skip"))


def check_allow_skips(allow_skips: str | None) -> None:
    """Raise VideotuneError if ``allow_skips`` is neither a number nor "all"."""
    if allow_skips not in (None, "all") and not allow_skips.isdecimal():
        raise VideotuneError(
            f"--allow-skips: {allow_skips!r} is neither a number nor all"
        )


def user_keys(overrides: Overrides) -> dict[str, Any]:
    """Return the user's own keys, with local paths made absolute."""
    keys = _config_keys(overrides.config)
    if overrides.family:
        keys = merge(keys, {"family": overrides.family})
    if overrides.base:
        keys = merge(keys, {"base_model_name": overrides.base})

    if overrides.data:
        keys = merge(keys, {"datasets": _datasets_of(overrides, keys)})

    keys = with_sets(keys, deepcopy(_parse_once(tuple(overrides.sets))))
    if overrides.held_out:
        keys = merge(keys, {"datasets": _with_held_out(overrides.held_out, keys)})
    keys = absolute_paths(keys)
    if "samples" in keys:
        keys["samples"] = resolve_prompts(keys["samples"])
    return keys


def _datasets_of(overrides: Overrides, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the datasets with the clips of ``--data``.

    They replace the folder of a config's only dataset if it does not exist here, as in a
    config of another machine; its other settings stay.

    Raises:
        VideotuneError: if the config names clips that are there.
    """
    data = str(overrides.data)
    datasets = keys.get("datasets")
    if not datasets:
        return [{"path": data}]

    source = overrides.config if isinstance(overrides.config, Path) else "the config"
    is_only = isinstance(datasets, list) and len(datasets) == 1
    only = datasets[0] if is_only and isinstance(datasets[0], Mapping) else {}
    path = only.get("path")
    if not isinstance(path, str):
        raise VideotuneError(
            f"--data: {source} names several datasets. Set their folders, such as "
            f"--set datasets.0.path={data}"
        )
    if expand_user(path).absolute() == expand_user(data).absolute():
        return [dict(only)]
    # Only an absolute path can be one of another machine. A relative one means a folder
    # here, so it is not replaced without a word.
    if not Path(path).is_absolute() or Path(path).exists():
        raise VideotuneError(
            f"--data: {source} names the clips too: {path}. Leave one of them out, or "
            f"replace them with --set datasets.path={data}"
        )
    return [{**only, "path": data}]


def _with_held_out(held_out: str, keys: Mapping[str, Any]) -> list[Any]:
    """Return the datasets with one more for validation, read as the first is."""
    datasets = list(keys.get("datasets") or ())
    first = datasets[0] if datasets and isinstance(datasets[0], Mapping) else {}
    read_alike = {key: first[key] for key in READ_ALIKE if key in first}
    return [*datasets, {**read_alike, "path": held_out, "kind": "validation"}]


def check_settings(overrides: Overrides) -> None:
    """Check the keys and values of a config before anything heavy is imported.

    Whether they go together is checked later: a resume has the run's own beside them.

    Raises:
        VideotuneError: for an unknown key or preset, a file that is not a config, and a
            value out of its bounds.
    """
    check_values(preset_keys(overrides), user_keys(overrides))


def check_files(overrides: Overrides) -> None:
    """Check that a model is named, and that the named folders exist, before
    anything heavy is imported.

    Raises:
        VideotuneError: if the clips, the weights to start from or other files that the
            config names do not exist, and if neither a family nor a base model is
            given.
    """
    keys = merge(preset_keys(overrides), user_keys(overrides))
    refuse_no_model(keys)
    for dataset in keys.get("datasets") or ():
        path = dataset.get("path") if isinstance(dataset, Mapping) else None
        if isinstance(path, str) and is_local(path):
            require_dataset_path(expand_user(path))

    start = keys.get("init_from")
    if isinstance(start, str) and not Path(start).exists():
        raise VideotuneError(f"init_from: no such file or folder: {start}")
    for key, path in _named_files(keys):
        if not expand_user(path).exists():
            raise VideotuneError(f"{key}: no such file or folder: {path}")


def _named_files(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each LoRA file, part and start image in a config."""
    sample = keys.get("sample")
    loras = {
        "base_loras": keys.get("base_loras"),
        "sample.loras": sample.get("loras") if isinstance(sample, Mapping) else None,
    }
    for key, entries in loras.items():
        for entry in entries if isinstance(entries, list) else ():
            path = entry.get("file") if isinstance(entry, Mapping) else entry
            if isinstance(path, str):
                yield key, path

    prompts = keys.get("samples")
    if not isinstance(prompts, list):
        return
    for prompt in prompts:
        if not isinstance(prompt, Mapping):
            continue  # a prompt that is only text names no file
        for name in FILE_KEYS:
            path = prompt.get(name)
            if isinstance(path, str):
                yield f"samples: {name}", path


def refuse_no_model(keys: Mapping[str, Any]) -> None:
    """Raise VideotuneError if a config names neither a family nor a base model."""
    if not keys.get("base_model_name") and keys.get("family") is None:
        raise VideotuneError(
            "no model given; pass --preset NAME (see `videotune presets list`), --config FILE, or "
            "--set base_model_name=…"
        )


def _note_other_model(
    overrides: Overrides,
    preset: Mapping[str, Any],
    user: Mapping[str, Any],
    spec: ModelSpec,
) -> None:
    """Say that a config's base model is of another kind than that of the preset, whose
    other settings are made for its own.
    """
    own_base = user.get("base_model_name")
    preset_base = preset.get("base_model_name")
    if not own_base or not preset_base or own_base.startswith(ASSET):
        return

    # --base and --set name a model on purpose.
    config = absolute_paths(_config_keys(overrides.config))
    if config.get("base_model_name") != own_base:
        return

    if not _is_of_kind(preset_base, spec):
        note(
            f"note: the base model is {spec.title}, not that of the preset {overrides.preset}: "
            f"a config's own comes before a preset's. For the preset's add --base {preset_base}"
        )


def _is_of_kind(preset_base: str, spec: ModelSpec) -> bool:
    """Return whether the base model of a preset is of the family of ``spec``; of a model
    whose configs do not come with videotune this is assumed.
    """
    if preset_base.startswith(ASSET):
        return False
    folder = published(preset_base)
    if folder is None:
        return True
    return spec_for(None, BasePlace(preset_base, folder)).name == spec.name


def _config_keys(config: Path | Config | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of a config file or object."""
    if config is None:
        return {}
    if isinstance(config, Path) and config.is_file():
        status = config.stat()
        return deepcopy(_read_once(config, status.st_mtime_ns, status.st_size))
    if isinstance(config, Path):
        return read_config(config)
    if isinstance(config, Config):
        keys = config.model_dump(mode="json", exclude_unset=True, context=WITH_SECRETS)
        return checked_keys(keys, "config")
    return checked_keys(dict(config), "config")


@lru_cache(maxsize=4)
def _read_once(path: Path, changed: int, size: int) -> dict[str, Any]:
    """Read a config file as it is now; its warnings are printed only once."""
    return read_config(path)


@lru_cache(maxsize=4)
def _parse_once(sets: tuple[str, ...]) -> dict[str, Any]:
    """Parse the settings of ``--set``; their warnings are printed only once."""
    return parse_sets(sets)


def preset_keys(overrides: Overrides) -> dict[str, Any]:
    """Return the preset's keys, none without a preset."""
    if not overrides.preset:
        return {}
    return absolute_paths(read_preset(overrides.preset))


def with_sets(keys: dict[str, Any], sets: dict[str, Any]) -> dict[str, Any]:
    """Put the settings of ``--set`` on top of a config's keys.

    ``datasets.KEY`` sets a key of the only dataset, ``datasets.N.KEY`` one of the N-th,
    counted from 0.

    Raises VideotuneError if it is not clear which dataset is meant.
    """
    keys = without_epochs_overridden(keys, sets)
    changes = sets.get("datasets")
    if not isinstance(changes, dict):
        return merge(keys, sets)

    rows = keys.get("datasets")
    rows = list(rows) if isinstance(rows, list) else []
    is_numbered = all(
        name.isdecimal() and isinstance(change, dict)
        for name, change in changes.items()
    )
    if not is_numbered:
        if len(rows) != 1:
            remedy = "pass the clips with --data"
            if rows:
                remedy = f"there are {len(rows)} datasets. Name one, such as datasets.0"
            raise VideotuneError(f"--set datasets.{next(iter(changes))}: {remedy}")
        changes = {"0": changes}

    for name, change in changes.items():
        number = int(name)
        if number >= len(rows):
            raise VideotuneError(
                f"--set datasets.{name}: there are {len(rows)} datasets, counted from 0"
            )
        rows[number] = merge(rows[number], change)
    return merge(keys, {**sets, "datasets": rows})


def _base(merged: Mapping[str, Any], *, planning: bool) -> BasePlace:
    """Return the base model that a config names, or for a plan the configs of it that
    come with videotune.
    """
    try:
        return place_of(merged)
    except NotHere:
        name = merged.get("base_parts") or merged["base_model_name"]
        folder = published(name) if planning else None
        if folder is None:
            raise
        note(
            f"note: {name} is not on this machine and the Hub cannot be reached: "
            "its configs that come with videotune are used"
        )
        return BasePlace(merged["base_model_name"], folder)


def _with_found_files(
    overrides: Overrides,
    user: dict[str, Any],
    keys: Mapping[str, Any],
    spec: ModelSpec,
    base: BasePlace,
) -> dict[str, Any]:
    """Return the user's keys with the files that are found in the models folder.

    A folder that was named for an earlier command counts for a base model of the Hub
    whose weights are not on this machine.
    """
    folder = overrides.models_folder
    is_remembered = folder is None
    if folder is None and not has_weights_here(base):
        folder = models_folder.remembered()
    if folder is None:
        return user
    if not folder.is_dir():
        raise VideotuneError(f"--models-folder: no such folder: {folder}")
    folder = folder.absolute()  # a resume may begin in another folder

    parts = lacking_parts(keys, spec)
    found = models_folder.find_files(folder, base.folder, parts, spec)
    chosen = models_folder.choose(found, folder)
    source = "the models folder named before" if is_remembered else "--models-folder"
    for part, path in chosen.items():
        note(f"{part}: {path} ({source})")
    missing = [part for part in parts if part not in chosen]
    if missing and not is_remembered:
        note(
            f"note: {folder} has no file for {', '.join(missing)}: the base model's is used"
        )
    if not is_remembered:
        models_folder.remember(folder)
    return merge(user, keys_of_files(chosen, spec))


def reopened(settings: Mapping[str, Any]) -> tuple[Resolved, ModelSpec, BasePlace]:
    """Resolve settings that name their base model, such as a run's, with the model and
    its place.
    """
    base = place_of(settings)
    spec = spec_for(settings.get("family"), base)
    resolved = resolve(settings, {}, spec)
    return resolved, as_configured(spec, resolved.config), base


def as_configured(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec as the config changes it: with captions read as the authors do, with
    sound, and with connectors that run in the step.
    """
    if config.text_encoder.convention != "diffusers":
        spec = find(spec.name).with_authors_text(spec)
    if config.generate is not None:
        spec = spec.with_sound(config.generate)
    if spec.connectors is not None and _runs_connectors(config):
        spec = spec.with_connectors()
    return spec


def _runs_connectors(config: Config) -> bool:
    """Whether text connectors run in the step: an adapter trains on them, or a LoRA file
    under it or in its samples changes them.
    """
    if config.training_method != "LORA":
        return False
    files = [*config.base_loras, *config.sample.loras]
    return config.trains_connectors or any(map(changes_connectors, files))


def resolve_config(
    overrides: Overrides, *, planning: bool = False
) -> tuple[Resolved, ModelSpec, BasePlace | None]:
    """Resolve a config and the base model that it names.

    Args:
        overrides: what the command is called with.
        planning: no weights will be read, so the configs that come with videotune may
            stand for a base model that is not on this machine.

    Raises:
        VideotuneError: if neither a family nor a base model is given.
    """
    user = user_keys(overrides)
    preset = preset_keys(overrides)
    merged = merge(preset, user)
    for key in ("base_model_name", "base_parts", "family"):
        if not isinstance(merged.get(key), str | None):
            raise VideotuneError(
                f"{key}: takes text, not {shortened(repr(merged[key]))}"
            )

    refuse_no_model(merged)
    base = _base(merged, planning=planning) if merged.get("base_model_name") else None
    family = merged.get("family")
    spec = spec_for(family, base)
    _note_other_model(overrides, preset, user, spec)
    if base is not None:
        user = _with_found_files(overrides, user, merged, spec, base)
    resolved = replace(resolve(user, preset, spec), preset=overrides.preset or None)
    files = own_files(resolved.config, spec)
    if files and base is not None:
        check_own_files(base.folder, files)
    return resolved, as_configured(spec, resolved.config), base
