"""Prompts from a file: a line each, with options as musubi-tuner writes them, or a JSON or YAML list."""

import re
from pathlib import Path
from typing import Any

from videotune.config.load import config_text, parsed
from videotune.errors import VideotuneError

ENDINGS = (".txt", ".json", ".yaml", ".yml")

FLAGS = {
    "w": ("width", int), "h": ("height", int), "f": ("frames", int), "d": ("seed", int), "s": ("steps", int),
    "l": ("guidance", float), "g": ("guidance", float), "fs": ("shift", float), "n": ("negative", str),
}  # fmt: skip
"""musubi-tuner's options of a line (its docs/sampling_during_training.md), and the keys of a prompt that they are here."""


def resolve_prompts(value: Any) -> Any:
    """What ``samples`` says: the prompts of the file where it names one, else the value itself."""
    if not (
        isinstance(value, str) and value.endswith(ENDINGS) and len(value.splitlines()) == 1
    ):
        return value
    path = Path(value).expanduser()
    text = config_text(path)
    if path.suffix != ".txt":
        found = parsed(text, path)
    else:
        lines = (
            (number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)
        )
        found = [
            parse_prompt(line, f"{path}:{number}")
            for number, line in lines
            if line and not line.startswith("#")
        ]
    if not isinstance(found, list) or not found:
        raise VideotuneError(
            f"samples: {path} holds no list of prompts: write one a line into a .txt file"
        )
    return found


def parse_prompt(line: str, place: str) -> str | dict[str, Any]:
    """A line as ``samples`` takes it: text alone, or a prompt with settings of its own.

    Raises VideotuneError that names the ``place`` for an option that there is not, or a value that is none.
    """
    prompt, *options = re.split(r"\s--(?=[a-z]+\s)", f" {line} ")
    found: dict[str, Any] = {}
    if not prompt.strip():
        raise VideotuneError(f"{place}: there is no prompt before the options")
    for option in options:
        name, _, text = option.strip().partition(" ")
        if name not in FLAGS:
            there = " ".join(f"--{flag}" for flag in FLAGS)
            more = (
                " (a preview begins with the first frame of a clip by itself)"
                if name in ("i", "ei")
                else ""
            )
            raise VideotuneError(
                f"{place}: --{name} is no option of a prompt{more}; there are {there}"
            )
        key, kind = FLAGS[name]
        try:
            found[key] = kind(text.strip())
        except ValueError as error:
            raise VideotuneError(f"{place}: --{name} {text.strip()!r} is no number") from error
    if ("width" in found) != ("height" in found):
        raise VideotuneError(f"{place}: --w and --h go together")
    if "width" in found:
        found["resolution"] = f"{found.pop('height')}x{found.pop('width')}"
    return {"prompt": prompt.strip()} | found if found else prompt.strip()
