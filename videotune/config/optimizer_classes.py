"""Optimizers by the name of their class: which there are, and which arguments they take.

The table is written by ``scripts/write_optimizers.py``, which runs the contract of
``trainer/optimizer_contract.py`` on every class. Nothing is imported here, since the
config is read where nothing trains.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.errors import did_you_mean
from videotune.files import read_json

LIBRARIES = ("torch.optim", "pytorch_optimizer", "bitsandbytes.optim")
"""Modules whose classes are listed; a class without its module is looked up in this
order.
"""

SHORT_NAMES = {
    "torch": "torch.optim",
    "pytorch-optimizer": "pytorch_optimizer",
    "bitsandbytes": "bitsandbytes.optim",
}
"""Other names of these modules."""

CLASS_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
"""module:Class."""

NEEDED_FOR_ALL = (
    "build",
    "step",
    "moves",
    "skip",
    "resume",
    "rates",
    "masters",
    "device",
    "average",
)
"""Parts of the contract that every training needs; without one of the others a class
can train, but not everything.
"""

Kind = str | list[str]
"""What an argument takes: "number", "whole", "flag", "text", "numbers", "any", or its
choices.
"""


@lru_cache
def table() -> dict[str, dict[str, Any]]:
    """Return by "module:Class": "arguments" with their kinds, and where there are any
    "required" ones, a default "rate" that multiplies one that the optimizer finds, a
    "flag" that a group of matrices has, and "fails": by part of the contract, why.
    """
    return read_json(Path(__file__).with_name("optimizer_classes.json"))


def usable_classes() -> list[str]:
    """Return the listed classes that can train."""
    return [name for name in table() if not any(failing_parts(name, NEEDED_FOR_ALL))]


def class_named(name: str) -> str | None:
    """Return "module:Class" as it is written, or None if no such class can be meant.

    Of a listed library the class must be listed; the class of another module is looked
    for when it is built.
    """
    module, colon, class_name = name.partition(":")
    if colon:
        module = SHORT_NAMES.get(module, module)
        if module not in LIBRARIES:
            return name if CLASS_NAME.fullmatch(name) else None
        return _listed(module, class_name)

    for library in LIBRARIES:
        listed = _listed(library, name)
        if listed is not None:
            return listed
    return None


def _listed(library: str, class_name: str) -> str | None:
    wanted = f"{library}:{class_name}".lower()
    for name in table():
        if name.lower() == wanted:
            return name
    return None


def is_class(name: str) -> bool:
    """Return whether an optimizer's name is that of a class."""
    return ":" in name


def is_imported(name: str) -> bool:
    """Return whether a class is of a module that is imported only for it.

    Building it runs the code of that module, so a config of a stranger must not name
    it.
    """
    return is_class(name) and name not in table()


def nearest_class(name: str) -> str:
    """Return the end of a sentence on an unknown class: the nearest ones."""
    class_name = name.rpartition(":")[2].lower()
    by_class: dict[str, str] = {}
    for listed in table():
        by_class.setdefault(listed.rpartition(":")[2].lower(), listed)
    close = difflib.get_close_matches(class_name, list(by_class), 2, 0.6)
    return did_you_mean([by_class[match] for match in close])


def argument_faults(name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a listed class; of others nothing is
    known here.
    """
    entry = table().get(name)
    if entry is None:
        return
    kinds: Mapping[str, Kind] = entry["arguments"]
    for key, value in arguments.items():
        if key not in kinds:
            close = difflib.get_close_matches(key, list(kinds), 2, 0.5)
            hint = did_you_mean(close, f"; it takes {', '.join(kinds)}")
            yield f"optimizer.args: {name} has no argument {key!r}{hint}"
        elif not takes(kinds[key], value):
            expected = in_plain_words(kinds[key])
            yield f"optimizer.args: {key} of {name} takes {expected}, not {value!r}"
    for key in entry.get("required", ()):
        if key not in arguments:
            yield f"optimizer.args: {name} needs {key}. Set optimizer.args.{key}"


def has_own_arguments(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are set with which a listed class was not tried."""
    return bool(set(arguments) - set(table().get(name, {}).get("required", ())))


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", _is_number),
    "whole": ("a whole number", _is_whole),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "numbers": ("a list of numbers", _are_numbers),
    "any": ("any value", lambda value: True),
}
"""Each kind in plain words, and its check."""


def takes(kind: Kind, value: Any) -> bool:
    """Return whether an argument of that kind takes a value."""
    if isinstance(kind, list):
        return value in kind
    return CHECKS[kind][1](value)


def in_plain_words(kind: Kind) -> str:
    """Return what an argument takes."""
    if isinstance(kind, list):
        return " or ".join(map(repr, kind))
    return CHECKS[kind][0]


def failing_parts(name: str, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield why a listed class cannot do these parts of the contract."""
    fails = table().get(name, {}).get("fails", {})
    for part in parts:
        if part in fails:
            yield fails[part]
