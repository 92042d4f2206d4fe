"""Read prompts from a file.

A text file has one prompt per line, with options as in musubi-tuner; a JSON or YAML
file has a list.
"""

import re
from pathlib import Path
from typing import Any

from videotune.config.load import config_text, parsed
from videotune.errors import VideotuneError

ENDINGS = (".txt", ".json", ".yaml", ".yml")

FLAGS = {
    "w": ("width", int),
    "h": ("height", int),
    "f": ("frames", int),
    "d": ("seed", int),
    "s": ("steps", int),
    "l": ("guidance", float),
    "g": ("guidance", float),
    "fs": ("shift", float),
    "n": ("negative", str),
    "i": ("image", str),
    "ei": ("last_frame", str),
}
"""Options of musubi-tuner (docs/sampling_during_training.md) and our keys."""


def resolve_prompts(value: Any) -> Any:
    """Return the value of ``samples``; if it names a file, the prompts of the file.

    Raises:
        VideotuneError: if the file has no prompts or a line is not valid.
    """
    is_file = isinstance(value, str) and value.endswith(ENDINGS)
    if not is_file or len(value.splitlines()) != 1:
        return value

    path = Path(value).expanduser()
    text = config_text(path)
    if path.suffix == ".txt":
        prompts = _parse_lines(text, path)
    else:
        prompts = parsed(text, path)
    if not isinstance(prompts, list) or not prompts:
        raise VideotuneError(
            f"samples: {path} has no list of prompts. Write one per line into a .txt file."
        )
    return prompts


def _parse_lines(text: str, path: Path) -> list[str | dict[str, Any]]:
    """Parse the lines of a text file, without blank lines and comments."""
    prompts = []
    for line_number, raw_line in enumerate(text.splitlines(), start=1):
        line = raw_line.strip()
        if line and not line.startswith("#"):
            prompts.append(parse_prompt(line, f"{path}:{line_number}"))
    return prompts


def parse_prompt(line: str, location: str) -> str | dict[str, Any]:
    """Parse a line into an entry of ``samples``.

    Args:
        line: the prompt and its options.
        location: file and line number for messages.

    Returns:
        The prompt, or a mapping with its settings if it has options.

    Raises:
        VideotuneError: if an option is unknown or its value is not valid.
    """
    prompt, *options = re.split(r"\s--(?=[a-z]+\s)", f" {line} ")
    prompt = prompt.strip()
    if not prompt:
        raise VideotuneError(
            f"{location}: there is no prompt before the options. Add one."
        )

    settings: dict[str, Any] = {}
    for option in options:
        key, value = _parse_option(option, location)
        settings[key] = value
    if ("width" in settings) != ("height" in settings):
        raise VideotuneError(f"{location}: --w and --h must be given together.")
    if "width" in settings:
        height = settings.pop("height")
        settings["resolution"] = f"{height}x{settings.pop('width')}"
    return {"prompt": prompt} | settings if settings else prompt


def _parse_option(option: str, location: str) -> tuple[str, Any]:
    """Parse "flag value" into a key and a value."""
    flag, _, text = option.strip().partition(" ")
    if flag not in FLAGS:
        flags = " ".join(f"--{known_flag}" for known_flag in FLAGS)
        raise VideotuneError(
            f"{location}: --{flag} is not an option of a prompt. Use one of: {flags}."
        )

    key, convert = FLAGS[flag]
    text = text.strip()
    try:
        return key, convert(text)
    except ValueError as error:
        raise VideotuneError(
            f"{location}: --{flag} {text!r} is not a number."
        ) from error
