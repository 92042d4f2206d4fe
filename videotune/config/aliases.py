"""Names that keys had in earlier versions.

Each is read as its new name until version 0.3.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import digest

KEYS = {
    "ruler_after": "validate_every",
    "probe_budget": "sample_metrics.budget",
    "tensorboard": "trackers",
} | {
    f"probe.{key}": f"sample_metrics.{key}"
    for key in ("samples", "steps", "prompts", "encoder")
}
"""Old name -> new name, dotted."""

VALUES: Mapping[str, Mapping[Any, Any]] = {
    "tensorboard": {True: ["tensorboard"], False: []}
}
"""Old name -> old value -> new value, where these differ."""

TARGETS = {"base": True, "clip": False}
"""``datasets.target`` -> ``datasets.prior_preservation``."""


def renamed(
    raw: Mapping[str, Any], where: str, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Return keys by today's names.

    Args:
        raw: keys of a config.
        where: they come from, for messages.
        warn: called with a sentence for each old name.

    Raises:
        VideotuneError: if a key is there under both names.
    """
    keys = copy.deepcopy(dict(raw))
    for old, new in KEYS.items():
        old_section, _, old_name = old.rpartition(".")
        source = keys.get(old_section) if old_section else keys
        if not isinstance(source, dict) or old_name not in source:
            continue

        new_section, _, new_name = new.rpartition(".")
        target = keys.setdefault(new_section, {}) if new_section else keys
        if not isinstance(target, dict) or new_name in target:
            raise VideotuneError(
                f"{where}: {old} is the old name of {new}, and both are there. Leave {old} out"
            )
        value = source.pop(old_name)
        if isinstance(value, bool):
            value = VALUES.get(old, {}).get(value, value)
        target[new_name] = value
        if old_section and not source:
            del keys[old_section]
        warn(f"{where}: {old} is now {new}; the old name is read until version 0.3")

    _move_first_frame(keys, where)
    datasets = keys.get("datasets")
    for dataset in datasets if isinstance(datasets, list) else ():
        if isinstance(dataset, dict) and "target" in dataset:
            _rename_target(dataset, where, warn)
    return keys


def _move_first_frame(keys: dict[str, Any], where: str) -> None:
    """Move the first frame from a config's conditions to ``first_frame_probability``.

    Raises:
        VideotuneError: if both are there.
    """
    conditions = keys.get("conditions")
    if not isinstance(conditions, list):
        return
    first_frames = [
        condition
        for condition in conditions
        if isinstance(condition, dict) and condition.get("type") == "first_frame"
    ]
    if not first_frames:
        return

    if keys.get("first_frame_probability") is not None or len(first_frames) > 1:
        raise VideotuneError(
            f"{where}: conditions: the share of first frames is there twice "
            "(first_frame_probability is short for it). Keep one"
        )
    surplus = first_frames[0].keys() - {"type", "probability"}
    if surplus:
        raise VideotuneError(
            f"{where}: conditions: first_frame does not use {min(surplus)}. Leave it out"
        )
    keys["conditions"] = [item for item in conditions if item is not first_frames[0]]
    keys["first_frame_probability"] = first_frames[0].get("probability", 1.0)


def _rename_target(
    dataset: dict[str, Any], where: str, warn: Callable[[str], None]
) -> None:
    value = dataset.pop("target")
    if value is not None:
        dataset["prior_preservation"] = TARGETS.get(value, value)
        warn(
            f"{where}: datasets.target is now prior_preservation, true for base; it is read until version 0.3"
        )


def renamed_run(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config.json with today's names.

    Its digest is updated, unless it was wrong.
    """
    content = dict(run_config)
    has_right_digest = content.get("digest") == _digest(content)
    for name in ("settings", "asked"):
        if isinstance(content.get(name), Mapping):
            content[name] = renamed(content[name], "config.json", lambda _: None)
    origins = content.get("origins", {})
    content["origins"] = {KEYS.get(key, key): value for key, value in origins.items()}
    if has_right_digest:
        content["digest"] = _digest(content)
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return digest({key: value for key, value in content.items() if key != "digest"})
