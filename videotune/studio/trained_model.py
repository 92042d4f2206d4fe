"""Which model a project really trains: that of its preset, unless the settings name
another base model.
"""

from videotune.config.nested_keys import flatten
from videotune.errors import VideotuneError
from videotune.studio import model_choices
from videotune.studio.projects import Project, draft


def replaced_base_model(project: Project) -> str:
    """Return the base model that the settings name in place of the preset's; empty if
    they name none, or the preset's own.
    """
    try:
        base_model = str(flatten(draft(project)).get("base_model_name") or "")
    except VideotuneError:  # the page Setup reports the damaged file
        return ""
    of_preset = model_choices.presets().get(project.preset, {}).get("base", "")
    return base_model if base_model != of_preset else ""


def trained_model(project: Project) -> str:
    """Return the name of what the project trains: its preset, or the base model that the
    settings name in its place; empty if nothing is chosen.
    """
    return replaced_base_model(project) or project.preset


def trains_anywhere(project: Project) -> bool:
    """Return whether the project's model trains on any computer, so that its card does
    not matter.
    """
    base_model = replaced_base_model(project)
    if not base_model:
        return model_choices.runs_anywhere(project.preset)
    return any(
        facts["base"] == base_model and facts["gb"] is None
        for facts in model_choices.presets().values()
    )
