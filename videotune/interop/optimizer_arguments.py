"""Numbers of another trainer's optimizer become arguments of ours, where it is named by
its class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.config import suggestions
from videotune.config.optimizer_classes import is_class, table, takes
from videotune.config.optimizers import NUMBERS_OF_NAMES
from videotune.interop.conversions import CONVERSIONS
from videotune.interop.translated_key import TranslatedKey

NAME = "optimizer.name"
ARGUMENTS = "optimizer.args"
HAS_NONE = "the optimizer takes no such argument"


def with_arguments(
    rows: Sequence[TranslatedKey], prefixes: Sequence[str]
) -> list[TranslatedKey]:
    """Return the rows with the numbers of a class as its arguments.

    Args:
        rows: the translated keys.
        prefixes: the beginnings of keys that are an optimizer's arguments there.
    """
    name = next((row.ours[NAME] for row in rows if NAME in row.ours), "")
    if not is_class(str(name)):
        return list(rows)

    kinds: Mapping[str, Any] = table().get(name, {}).get("arguments", {})
    values: dict[str, Any] = {}
    for row in rows:
        values |= row.ours
    numbers = _numbers_as_arguments(values, kinds)
    return [_with_argument(row, kinds, numbers, prefixes) for row in rows]


def _numbers_as_arguments(
    values: Mapping[str, Any], kinds: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return by our key of a number the argument of the class, and its value."""
    arguments: dict[str, tuple[str, Any]] = {}
    betas = [values.get(f"optimizer.{key}") for key in ("beta1", "beta2")]
    if "betas" in kinds and None not in betas:
        arguments["optimizer.beta1"] = ("betas", betas)
        arguments["optimizer.beta2"] = ("betas", betas)
    decay = values.get("optimizer.weight_decay")
    if "weight_decay" in kinds and decay is not None:
        arguments["optimizer.weight_decay"] = ("weight_decay", decay)
    return arguments


def _with_argument(
    row: TranslatedKey,
    kinds: Mapping[str, Any],
    numbers: Mapping[str, tuple[str, Any]],
    prefixes: Sequence[str],
) -> TranslatedKey:
    """Return a row with its value as an argument, if it is one."""
    key = suggestions.plain(row.key)
    argument = next(
        (key.removeprefix(prefix) for prefix in prefixes if key.startswith(prefix)), ""
    )
    if argument in kinds and row.theirs is not None:
        value = row.theirs
        if kinds[argument] == "numbers":
            value = CONVERSIONS["numbers"](value, Path())
        if takes(kinds[argument], value):
            ours = {f"{ARGUMENTS}.{argument}": value}
            return replace(row, ours=ours, verdict="translated", note="")

    our_numbers = [f"optimizer.{key}" for key in NUMBERS_OF_NAMES]
    ours = {key: value for key, value in row.ours.items() if key not in our_numbers}
    for key in row.ours:
        if key in numbers:
            argument, value = numbers[key]
            ours[f"{ARGUMENTS}.{argument}"] = value
    if row.ours and not ours:
        return replace(row, ours={}, verdict="none", note=HAS_NONE)
    return replace(row, ours=ours)
