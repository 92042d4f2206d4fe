"""What of the form belongs to sound: settings that only some models have, and the files
that a preview is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from videotune.studio import model_choices
from videotune.studio.form import Field, fields
from videotune.studio.projects import texts

SOUND_GROUP = "Sound"
"""The group of the settings that only models with sound have, in texts.json."""


def base_model_of(own: Mapping[str, Any], inherited: Mapping[str, Any]) -> str:
    """Return the base model that a project's settings name.

    Args:
        own: the user's values, by dotted name.
        inherited: the values of the preset, by dotted name.
    """
    return str(own.get("base_model_name") or inherited.get("base_model_name"))


def shown_fields(own: Mapping[str, Any], base_model: str) -> dict[str, Field]:
    """Return the fields to show, by key: those of sound only if the model makes sound, is
    not known, or the user has set them.
    """
    has_no_sound = model_choices.makes_sound(base_model) is False
    keys_of_sound = texts()["groups"][SOUND_GROUP]
    return {
        field.key: field
        for field in fields()
        if not has_no_sound or field.key not in keys_of_sound or field.key in own
    }


@dataclass(frozen=True)
class PromptFile:
    """A file that a preview may be given beside its prompt."""

    key: str

    action: str
    """Words of the button that chooses it."""

    effect: str
    """What the preview does with it, followed by the file's name."""

    is_offered: bool


def prompt_files(takes: Sequence[str] | None, generate: Any) -> dict[str, PromptFile]:
    """Return the files of a prompt by key, also those that are not offered.

    Args:
        takes: types of the conditions that the model takes. None: not known, so that all
            are offered.
        generate: the value of ``generate``.
    """
    generated = [generate] if isinstance(generate, str) else generate
    has_conditioning_sound = generated == ["video"]
    has_conditioning_video = generated == ["sound"]
    words_by_key = dict(texts()["prompt_files"])
    if has_conditioning_video:
        words_by_key |= texts()["prompt_files_of_sound"]

    files = {}
    for key, (condition, action, effect) in words_by_key.items():
        if condition == "given_sound":
            is_offered = has_conditioning_sound
        elif condition == "given_video" or has_conditioning_video:
            is_offered = condition == "given_video"
        else:
            is_offered = takes is None or condition in takes
        files[key] = PromptFile(key, action, effect, is_offered)
    return files
