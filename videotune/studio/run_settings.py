"""The settings that a run had, as those of a project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.config.nested_keys import flatten, unflatten
from videotune.reporter.read import items, mapping
from videotune.studio import projects
from videotune.studio.form import clip_keys_of, inherited_values
from videotune.studio.projects import Project
from videotune.studio.status import read_cached


def changed_settings(project: Project, run: Path) -> dict[str, Any]:
    """Return the settings of a run that differ from the project's preset.

    Settings that the studio manages itself are left out.
    """
    config = mapping(read_cached(run / "config.json"))
    preset_values = inherited_values(project.preset)
    origins = mapping(config["origins"])
    excluded = ("datasets", "init_from", *projects.MANAGED_KEYS)

    changed = {}
    for key, value in flatten(mapping(config["settings"])).items():
        is_chosen = origins[key] in ("user", "preset")
        if is_chosen and key not in excluded and value != preset_values.get(key):
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
