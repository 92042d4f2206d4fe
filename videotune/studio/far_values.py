"""Values of settings that are far from those of the preset, and what that does to a
training.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from videotune.config.usual_rates import TOO_HIGH, TOO_LOW
from videotune.data.remarks import Remark, code_of
from videotune.text import plain

FAR = 10
"""A value that is so many times the usual one is noted."""


COSTLY_KEYS = (
    "steps",
    "epochs",
    "batch_size",
    "gradient_accumulation_steps",
    "video_config.frames",
)
"""Keys whose note also says the time and the disk that the plan has calculated."""

_RATE_NOTES = (TOO_HIGH, TOO_LOW)


FAR_VALUES: dict[str, tuple[str, str]] = {
    "learning_rate": _RATE_NOTES,
    "learning_rate_low": _RATE_NOTES,
    "embedding_learning_rate": _RATE_NOTES,
    "batch_size": ("a step takes so many times as long", ""),
    "lora.rank": ("a large file that copies the clips easily", ""),
    "lora.alpha": ("it works like a higher learning rate", "it hardly learns"),
    "steps": ("the training takes so many times as long", ""),
    "epochs": ("the training takes so many times as long", ""),
    "gradient_accumulation_steps": ("a step takes so many times as long", ""),
    "video_config.frames": ("much more memory and time for each step", ""),
    "max_grad_norm": ("updates are hardly clipped", "updates become very small"),
}
"""What a value far above the usual one does, and one far below it."""


def unusual_values(
    values: Mapping[str, Any], inherited: Mapping[str, Any], costs: str = ""
) -> dict[str, str]:
    """Return a note for each value that is far from the one it replaces, by key.

    Args:
        values: the user's values, by dotted name.
        inherited: the values of the preset, by dotted name.
        costs: the time and disk of the plan, a sentence; empty if they are not known.
    """
    notes = {}
    for key, (high_note, low_note) in FAR_VALUES.items():
        value = values.get(key)
        usual = inherited.get(key)
        if not isinstance(value, int | float) or not isinstance(usual, int | float):
            continue
        if value <= 0 or usual <= 0:
            continue

        if high_note and value >= FAR * usual:
            times = f"{plain(round(value / usual))} times the usual {plain(usual)}"
            notes[key] = f"{times}: {high_note}."
            if costs and key in COSTLY_KEYS:
                notes[key] += f" {costs}"
        elif low_note and value * FAR <= usual:
            notes[key] = (
                f"{usual / value:.3g} times below the usual {usual:g}: {low_note}."
            )
    return notes


def with_usual_of_preset(
    notes: Iterable[str], values: Mapping[str, Any], inherited: Mapping[str, Any]
) -> list[str]:
    """Return the notes of a plan, those on a far learning rate in the words that stand at
    its field, which compare it with the preset's.

    Args:
        notes: the notes, each with its code.
        values: the user's values, by dotted name.
        inherited: the values of the preset, by dotted name.
    """
    words_by_key = unusual_values(values, inherited)
    replaced = []
    for note in notes:
        key = note.partition(" ")[0]
        if code_of(note) == "far_rate" and key in words_by_key:
            note = Remark("far_rate", f"{key} is {words_by_key[key]}")
        replaced.append(note)
    return replaced
