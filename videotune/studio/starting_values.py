"""The values that a project begins with for its model, as ``videotune init`` writes them."""

from typing import Any

from videotune.config.base_models import starting_keys
from videotune.config.nested_keys import flatten, unflatten
from videotune.studio import projects
from videotune.studio.caption_decisions import with_decisions
from videotune.studio.form import inherited_values
from videotune.studio.projects import Project, draft
from videotune.studio.sound_settings import base_model_of


def starting_values(project: Project) -> dict[str, Any]:
    """Return those of the project's values with which its model begins, by dotted name;
    without those that the user has changed.
    """
    keys = flatten(draft(project))
    model = base_model_of(keys, inherited_values(project.preset))
    return {
        key: value
        for key, value in flatten(starting_keys(model)).items()
        if keys.get(key) == value
    }


def reset(project: Project) -> None:
    """Set all settings back to those with which the project's model begins. What was
    decided about clips without a caption stays.
    """
    model = base_model_of({}, inherited_values(project.preset))
    with projects.lock_of(project.folder):
        keys = with_decisions(project, starting_keys(model))
        projects.save_draft(project, keys)
    projects.update(project, earlier_values=None)


def follow_model(project: Project, preset: str) -> None:
    """Replace the values that the project's model began with by those of a preset's model.

    A value that the user has changed stays.
    """
    with projects.lock_of(project.folder):
        keys = flatten(draft(project))
        model_before = base_model_of(keys, inherited_values(project.preset))
        model = base_model_of(keys, inherited_values(preset))
        if model == model_before:
            return

        new_keys = dict(keys)
        for key, value in flatten(starting_keys(model_before)).items():
            if new_keys.get(key) == value:
                del new_keys[key]
        for key, value in flatten(starting_keys(model)).items():
            new_keys.setdefault(key, value)
        if new_keys != keys:
            projects.save_draft(project, unflatten(new_keys))
