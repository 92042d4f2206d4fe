"""The settings that a run had, as those of a project."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videotune.config.nested_keys import flatten, unflatten
from videotune.presets.shipped import read_preset
from videotune.reporter.read import items, mapping
from videotune.studio import projects
from videotune.studio.form import clip_keys_of, inherited_values
from videotune.studio.model_choices import presets
from videotune.studio.projects import Project
from videotune.studio.status import read_cached
from videotune.studio.trained_model import trained_model

KEYS_OF_PROJECT = ("datasets", "init_from", *projects.MANAGED_KEYS)
"""Keys that a project does not take from a run as they are."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, as a project has them."""

    preset: str
    """The preset of its model; empty if no preset has it."""

    keys: dict[str, Any]
    """What the run had otherwise than the preset."""

    model: str
    """The name of what it trained: the preset, or the base model in its place."""


def settings_of_run(project: Project, run: Path) -> RunSettings:
    """Return the settings of a run with the preset of its model, whatever model the
    project has now.
    """
    config = mapping(read_cached(run / "config.json"))
    preset = _preset_of_run(config, project.preset)
    keys = changed_settings(replace_preset(project, preset), run)
    model = str(keys.get("base_model_name") or preset)
    return RunSettings(preset, keys, model)


def describe_use(project: Project, run: Path) -> str:
    """Return what the page Setup takes from a run, as the end of a sentence: "those of
    run-1", and the model if the project has another one now.
    """
    model = settings_of_run(project, run).model
    if not model or model == trained_model(project):
        return f"those of {run.name}"
    return f"those of {run.name}, and its model, {model}"


def replace_preset(project: Project, preset: str) -> Project:
    """Return a project as it would be with another preset; nothing is written."""
    return replace(project, facts={**project.facts, "preset": preset})


def _preset_of_run(config: Mapping[str, Any], present_preset: str) -> str:
    """Return the preset that a run was trained with; empty if no preset has its model."""
    name = config["preset"]
    if isinstance(name, str) and name in presets():
        return name
    return _preset_like_run(config, present_preset)


def _preset_like_run(config: Mapping[str, Any], present_preset: str) -> str:
    """Return the preset that a run without the name of one is most like; empty if no
    preset has its model.

    Runs of earlier versions do not name their preset: it is the one of the run's model
    whose values are the run's, and of equal ones the present one.
    """
    settings = flatten(mapping(config["settings"]))
    origins = mapping(config["origins"])
    candidates = [
        name
        for name, facts in presets().items()
        if facts["base"] == settings.get("base_model_name")
    ]
    names_own_model = origins["base_model_name"] == "user"
    has_preset = "preset" in origins.values()
    if not candidates and names_own_model and has_preset:
        candidates = list(presets())
    if not candidates:
        return ""

    def difference(preset: str) -> tuple[int, bool]:
        return _count_other_values(settings, origins, preset), preset != present_preset

    return min(candidates, key=difference)


def _count_other_values(
    settings: Mapping[str, Any], origins: Mapping[str, Any], preset: str
) -> int:
    """Return how many values a run had otherwise than a preset, of those that neither the
    user nor the plan has set.
    """
    preset_values = inherited_values(preset)
    set_by_preset = flatten(read_preset(preset))
    keys = {*set_by_preset, *origins}
    count = 0
    for key in keys:
        origin = origins.get(key)
        is_replaced = origin in ("user", "plan")
        is_of_preset = origin == "preset" or key in set_by_preset
        if is_replaced or not is_of_preset:
            continue
        count += settings.get(key) != preset_values.get(key)
    return count


def changed_settings(project: Project, run: Path) -> dict[str, Any]:
    """Return the settings of a run that differ from the project's preset.

    Settings that the studio manages itself are left out.
    """
    config = mapping(read_cached(run / "config.json"))
    preset_values = inherited_values(project.preset)
    origins = mapping(config["origins"])
    replaced_values = mapping(config["asked"])

    changed = {}
    for key, frozen_value in flatten(mapping(config["settings"])).items():
        value = replaced_values.get(key, frozen_value)
        is_chosen = origins[key] in ("user", "preset")
        is_own = key not in KEYS_OF_PROJECT
        if is_chosen and is_own and value != preset_values.get(key):
            changed[key] = value

    clip_keys = _clip_keys(project, mapping(config["settings"]))
    if clip_keys:
        changed["datasets"] = clip_keys
    return unflatten(changed)


def _clip_keys(project: Project, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run had for the clips of the project."""
    clips = str(project.folder / projects.CLIPS)
    for row in items(settings.get("datasets")):
        if isinstance(row, Mapping) and row.get("path") == clips:
            return clip_keys_of(row)
    return {}
