"""What a mistyped command line meant: a setting given as an option, the name that another
program has for an option, a path with a space.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

SAMPLING_COMMANDS = ("sample", "compare")
"""Commands that take only the settings that act in drawing a video."""

FOREIGN_SETTINGS = "autopsy"
"""The command whose --set takes keys of another trainer."""

OTHER_NAMES = {
    "gpu": "--card",
    "vram-gb": "--vram",
    "dataset": "--data",
    "model": "--base",
    "output": "--out",
    "output-dir": "--out",
    "out-dir": "--out",
    "validation": "--held-out",
    "val": "--held-out",
}
"""Words that users try for an option, and that option."""


def usage_error_text(error: Any, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line, and what was meant if that is plain.

    Args:
        error: the parser's exception.
        arguments: the command line without the program's name.
    """
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "videotune")
    text = error.format_message()
    option = getattr(error, "option_name", None)
    if option is not None and context is not None:
        meant = _meant_option(option, arguments, context)
        if meant:
            return f"{meant}  See `{command} --help`."
    if text.startswith("Got unexpected extra argument"):
        text += _unquoted_path(arguments)
    return f"{text}  See `{command} --help`."


def _options_of(command: Any) -> set[str]:
    options: set[str] = set()
    for parameter in command.params:
        options.update(getattr(parameter, "opts", ()))
    return options


def _meant_option(option: str, arguments: Sequence[str], context: Any) -> str:
    """Return what an unknown option meant; empty if that is not plain."""
    options = _options_of(context.command)
    name = option.lstrip("-")
    other_name = OTHER_NAMES.get(name)
    if other_name in options:
        return f"No such option: {option}; did you mean {other_name}?"
    if "--set" not in options or context.info_name == FOREIGN_SETTINGS:
        return ""

    keys = _settings_of(context.info_name)
    key = name.replace("-", "_")
    # A key of a section may be given without the section, if no other has its name.
    named = [key_path for key_path in keys if key_path == key]
    named = named or [
        key_path for key_path in keys if key_path.rpartition(".")[2] == key
    ]
    if named:
        settings = " or ".join(
            f"--set {key_path}={_value_of(option, arguments)}" for key_path in named[:3]
        )
        return f"{key} is a setting: {settings}"

    near = difflib.get_close_matches(key, keys, 1, 0.8)
    if near and not difflib.get_close_matches(option, sorted(options), 1, 0.8):
        setting = f"--set {near[0]}={_value_of(option, arguments)}"
        return (
            f"No such option: {option}; did you mean the setting {near[0]}: {setting}?"
        )
    return ""


def _settings_of(command: str) -> list[str]:
    """Return the settings that act in a command."""
    from videotune.config.applies import acts_in_samples
    from videotune.config.schema import leaves

    if command in SAMPLING_COMMANDS:
        return [key for key in leaves() if acts_in_samples(key)]
    return list(leaves())


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Return the value that the command line gives an option."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != option:
            continue
        if equals:
            return value
        if index + 1 < len(arguments) and not arguments[index + 1].startswith("--"):
            return arguments[index + 1]
        return "true"
    return "VALUE"


def _unquoted_path(arguments: Sequence[str]) -> str:
    """Return the advice to quote a path, if two arguments of the command line are one."""
    from pathlib import Path

    for first, second in pairwise(arguments):
        path = f"{first} {second}"
        is_path = Path(path).exists() and not Path(first).exists()
        if is_path:
            return f'. Put a path with a space in quotation marks: "{path}"'
    return ". Put a path with a space in quotation marks"
