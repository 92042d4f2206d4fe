"""Settings that replace a project's as a whole: those of a preset of one's own, and
another trainer's config.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.config.load import checked_keys
from videotune.config.nested_keys import flatten, merge, unflatten
from videotune.config.resolve import parse
from videotune.errors import VideotuneError
from videotune.presets.shipped import preset_named
from videotune.studio import (
    model_choices,
    plan_server,
    projects,
)
from videotune.studio.form import (
    as_config,
    clip_keys_of,
    format_value,
    preset_keys,
)
from videotune.studio.model_choices import presets
from videotune.studio.projects import (
    MANAGED_KEYS,
    Project,
)
from videotune.studio.web import (
    PageContext,
    render,
)

CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".txt", ".sh")
"""Endings of configs and command lines of trainers."""

MAX_CONFIG_BYTES = 20_000_000
"""Size limit of an uploaded config."""


def import_region(page: PageContext) -> str:
    """Render what another trainer's config becomes, before it is applied."""
    project = page.current_project
    files = sorted(foreign_folder(project).glob("*"))
    if not files:
        return ""

    question = {
        "what": "import",
        "files": [str(path) for path in files],
        "seen": [path.stat().st_mtime for path in files],
        "within": str(page.root) if page.path_rule.is_restricted else None,
    }
    answer = plan_server.request_answer(studio_file(project, "imported"), question)
    return render(
        "setup_import", project=project, files=files, answer=answer, shown=format_value
    )


def studio_file(project: Project, name: str) -> Path:
    """Return the file of an answer that the studio keeps for a project."""
    return project.folder / ".studio" / f"{name}.json"


def foreign_folder(project: Project) -> Path:
    """Return the folder of the uploaded config of another trainer."""
    return project.folder / ".studio" / "theirs"


def apply_settings(page: PageContext, preset: str, keys: Mapping[str, Any]) -> None:
    """Replace the settings of a project.

    Raises:
        VideotuneError: if one of them is invalid, or a path that the user may not name.
    """
    project = page.current_project
    allowed_keys = {
        key: value
        for key, value in flatten(keys).items()
        if key.partition(".")[0] not in MANAGED_KEYS
    }
    nested_keys = unflatten(allowed_keys)
    clip_keys = clip_keys_of(nested_keys.pop("datasets", None))
    if clip_keys:
        nested_keys["datasets"] = clip_keys
    nested_keys = checked_keys(nested_keys, "the settings")
    parse(merge(preset_keys(preset), as_config(nested_keys)))
    page.path_rule.check_config(nested_keys)

    with projects.lock_of(project.folder):
        projects.save_draft(project, nested_keys)
        projects.update(project, preset=preset or None, earlier_values=None)


def take_config(project: Project, path: Path) -> None:
    """Move a config of another trainer to where the page Setup shows what it becomes."""
    folder = foreign_folder(project)
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(path, folder / path.name)


def apply_imported(page: PageContext) -> None:
    """Apply the imported config, with a preset of its base model if there is one."""
    project = page.current_project
    answer = plan_server.read_answer(studio_file(project, "imported"))
    config = answer.get("config")
    if config is None:
        raise VideotuneError("there is no imported config: drop its file on the page")
    base_model = str(config.get("base_model_name"))
    preset = project.preset
    if not preset or presets()[preset_named(preset)]["base"] != base_model:
        card = model_choices.chosen_card(project.facts)
        preset = model_choices.preset_of_model(base_model, card) or preset
    apply_settings(page, preset, config)
