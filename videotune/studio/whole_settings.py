"""Settings that replace a project's as a whole: those of a preset of one's own, and
another trainer's config.
"""

import os
from collections.abc import Mapping, Sequence
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
from videotune.studio.caption_decisions import with_decisions
from videotune.studio.form import (
    as_config,
    clip_keys_of,
    preset_keys,
)
from videotune.studio.import_rows import LEFT, MANAGED, ImportRow, import_rows
from videotune.studio.imported_data import (
    ADD_CLIPS,
    ImportedData,
    foreign_folder,
    imported_data,
    own_clip_keys,
)
from videotune.studio.model_choices import presets
from videotune.studio.projects import (
    MANAGED_KEYS,
    Project,
)
from videotune.studio.records import SourceFacts
from videotune.studio.web import (
    PageContext,
    render,
)
from videotune.text import counted, some

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
    rows = []
    if answer.get("rows") and not answer.get("code"):
        imported = imported_data(page, answer.get("config") or {})
        rows = import_rows(answer, imported)
    return render(
        "setup_import", project=project, files=files, answer=answer, rows=rows
    )


def studio_file(project: Project, name: str) -> Path:
    """Return the file of an answer that the studio keeps for a project."""
    return project.folder / ".studio" / f"{name}.json"


def apply_settings(
    page: PageContext,
    preset: str,
    keys: Mapping[str, Any],
    sources: Sequence[SourceFacts] = (),
) -> None:
    """Replace the settings of a project. What was decided about clips without a caption
    stays, unless the new settings decide it.

    Args:
        page: the request.
        preset: the preset of the project.
        keys: the settings.
        sources: datasets outside of the project to use too.

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
    page.path_rule.check_config(list(sources))

    facts: dict[str, Any] = {"preset": preset or None, "earlier_values": None}
    with projects.editing(project) as current:
        if sources:
            facts["sources"] = with_sources(current, sources)
        projects.save_draft(project, with_decisions(current, nested_keys))
        projects.update(project, **facts)


def take_config(project: Project, path: Path) -> None:
    """Move a config of another trainer to where the page Setup shows what it becomes."""
    folder = foreign_folder(project)
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(path, folder / path.name)


def with_sources(project: Project, sources: Sequence[SourceFacts]) -> list[SourceFacts]:
    """Return the datasets outside of a project with others, which replace those of the
    same path.
    """
    new_paths = {row["path"] for row in sources}
    earlier = project.facts.get("sources", [])
    return [*(row for row in earlier if row["path"] not in new_paths), *sources]


def apply_imported(page: PageContext) -> str:
    """Apply the imported config, with a preset of its base model if there is one.

    Returns:
        What was taken, and what was not.
    """
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

    imported = imported_data(page, config)
    clip_keys = {**own_clip_keys(page, projects.draft(project)), **imported.clip_keys}
    new_keys = {key: value for key, value in config.items() if key != "datasets"}
    new_keys = merge(new_keys, unflatten(imported.run_keys))
    if clip_keys:
        new_keys["datasets"] = clip_keys
    apply_settings(page, preset, new_keys, imported.sources)
    return _taken_text(import_rows(answer, imported), imported)


def has_import(project: Project) -> bool:
    """Return whether a config of another trainer was read, and waits to be applied."""
    files = list(foreign_folder(project).glob("*"))
    answer_file = studio_file(project, "imported")
    if not files or not answer_file.is_file():
        return False
    newest = max(path.stat().st_mtime for path in files)
    if answer_file.stat().st_mtime < newest:
        return False
    answer = plan_server.read_answer(answer_file)
    return not answer.get("code") and answer.get("config") is not None


def _taken_text(rows: Sequence[ImportRow], imported: ImportedData) -> str:
    """Return which keys of an import were taken, and which were not."""
    taken_count = sum(bool(row.taken) for row in rows)
    left = [row.key for row in rows if row.verdict in (LEFT, MANAGED)]
    text = f"{counted(taken_count, 'key')} of the config taken over"
    if imported.sources:
        paths = [row["path"] for row in imported.sources]
        text += f", with the clips of {some(paths, most=2)}"
    if left:
        text += f". Not taken over: {some(list(dict.fromkeys(left)), most=6)}"
    if any(ADD_CLIPS in dataset.reason for dataset in imported.datasets):
        text += f". Next {ADD_CLIPS}"
    return text
