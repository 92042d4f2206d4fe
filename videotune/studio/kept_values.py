"""The user's own values after a change of the model: which of them belong to the earlier
one.
"""

from dataclasses import dataclass
from functools import cache

from videotune.config.nested_keys import flatten
from videotune.presets.shipped import read_preset
from videotune.studio import projects
from videotune.studio.far_values import unusual_values
from videotune.studio.form import fields, format_value, inherited_values, set_key
from videotune.studio.model_choices import presets
from videotune.studio.projects import Project, draft
from videotune.studio.records import EarlierValue
from videotune.studio.starting_values import starting_values


@dataclass(frozen=True)
class KeptValue:
    """A value that was set for an earlier model, and is not the present one's."""

    key: str
    name: str
    """Its name on the page Setup."""

    value: str
    usual: str
    """The present model's own value; empty if it is automatic."""

    note: str
    """What the value does if it is far from the usual one; empty if it is not."""


def values_before_change(project: Project) -> dict[str, EarlierValue] | None:
    """Return the user's values with the preset for which each was set, to be kept when
    the preset changes; None if there are none.
    """
    if not project.preset:
        return None
    earlier_values = project.facts.get("earlier_values", {})
    values: dict[str, EarlierValue] = {}
    starting = starting_values(project)
    for key, value in flatten(draft(project)).items():
        if key in starting:
            continue
        earlier = earlier_values.get(key)
        if earlier is not None and earlier["value"] == value:
            values[key] = earlier
        else:
            values[key] = {"preset": project.preset, "value": value}
    return values or None


def kept_values(project: Project) -> list[KeptValue]:
    """Return the values that were set for an earlier model and that the user has neither
    changed nor confirmed since.
    """
    earlier_values = project.facts.get("earlier_values", {})
    if not earlier_values:
        return []

    values = flatten(draft(project))
    usual = inherited_values(project.preset)
    notes = unusual_values(values, usual)
    rows = []
    for field in fields():
        earlier = earlier_values.get(field.key)
        if earlier is None or values.get(field.key) != earlier["value"]:
            continue
        is_usual = values[field.key] == usual.get(field.key)
        if not is_usual and _is_of_another_model(
            field.key, earlier["preset"], project.preset
        ):
            row = KeptValue(
                key=field.key,
                name=field.name,
                value=format_value(values[field.key]),
                usual=format_value(usual.get(field.key)),
                note=notes.get(field.key, ""),
            )
            rows.append(row)
    return rows


def _is_of_another_model(key: str, earlier_preset: str, preset: str) -> bool:
    """Return whether a value belongs to the model for which it was set.

    For another model it does if presets set its key. For another size of the same model
    it does only if the two presets set it differently.
    """
    if earlier_preset == preset:
        return False
    if earlier_preset not in presets():  # it came with another version of the studio
        return True
    if preset not in presets():
        return False
    if presets()[earlier_preset]["base"] != presets()[preset]["base"]:
        return key in _keys_of_presets()
    earlier_value = inherited_values(earlier_preset).get(key)
    return bool(earlier_value != inherited_values(preset).get(key))


@cache
def _keys_of_presets() -> frozenset[str]:
    """Return the keys that presets set: their values depend on the model."""
    keys: set[str] = set()
    for name in presets():
        keys.update(flatten(read_preset(name)))
    return frozenset(keys)


def confirm_values(project: Project) -> None:
    """Keep the user's values for the present model."""
    projects.update(project, earlier_values=None)


def use_usual_values(project: Project) -> None:
    """Replace the values that were set for an earlier model by the present one's.

    Raises:
        VideotuneError: if the other settings are not valid without one of them.
    """
    with projects.lock_of(project.folder):
        keys = draft(project)
        for row in kept_values(project):
            keys = set_key(keys, row.key, "", project.preset)
        projects.save_draft(project, keys)
    projects.update(project, earlier_values=None)
