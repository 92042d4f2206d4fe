"""Weights that another trainer's config names and that are not on this machine."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.interop import files_here

_FILE_CONVERSIONS = ("weights", "part file", "part files", "low expert", "high expert")
"""Conversions of the path of weights; a file that does not exist is left out."""

_LOCAL_PATH = re.compile(r"\.{0,2}[/\\]|[A-Za-z]:[/\\]|.*\.(safetensors|pth|pt|bin)$")
"""A path on a machine, and no id of the Hub."""


def is_missing_file(value: Any, rule: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a value names weights on a machine that are not on this one."""
    conversion = rule.get("as")
    names_weights = "base" in rule or (
        isinstance(conversion, str) and conversion in _FILE_CONVERSIONS
    )
    is_path = isinstance(value, str) and _LOCAL_PATH.match(value) is not None
    return names_weights and is_path and not files_here.exists(folder / value)


def replacement_note(rule: Mapping[str, Any], base: Mapping[str, str]) -> str:
    """Say what is taken instead of weights that are not on this machine."""
    if rule.get("as") in ("part file", "part files"):
        return "it is not here, so the base model's own is taken"
    if "base_model_name" not in base:
        return "it is not here; set base_model_name"
    name = base["base_model_name"]
    origin = "" if files_here.exists(Path(name)) else " from the Hub"
    return f"it is not here, so the weights of {name}{origin} are taken"


def with_missing_file(
    verdict: str, notes: list[str], rule: Mapping[str, Any], base: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Return the verdict and notes of a key whose file is not on this machine."""
    note = replacement_note(rule, base)
    if verdict == "differs":
        return verdict, [*notes, note]
    return "missing", [note, *notes[1:]]
