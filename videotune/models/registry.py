"""The families that there are: each is a class that registers itself, in a module of this package or of another one.

Modules of this package are imported all; another package names its modules as entry points of the group
``videotune.models``. A class is registered when it is defined (``DiffusersModel``) or by ``register``.
"""

import difflib
import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json
from videotune.types import Family

GROUP = "videotune.models"
"""The group of entry points by which other packages name modules with families."""

FAMILIES: dict[str, type[Family]] = {}
"""The classes that were registered, by their families' names."""

Class = TypeVar("Class", bound=type[Family])


def register(cls: Class) -> Class:
    """Add a family, by its ``spec.name``; usable as a decorator. Raises VideotuneError where another one has the name."""
    known = FAMILIES.setdefault(cls.spec.name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise VideotuneError(
            f"two families are named {cls.spec.name!r}: in {known.__module__} and in {cls.__module__}"
        )
    return cls


@cache
def _import_all() -> None:
    """Import the modules that define families; none of them imports torch."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"videotune.models.{module.name}")
    for entry in entry_points(group=GROUP):
        entry.load()


def names() -> list[str]:
    """The names of the families, sorted."""
    _import_all()
    return sorted(FAMILIES)


def find(name: str) -> type[Family]:
    """The family of this name, or of an alias of it.

    Raises VideotuneError with the nearest name.
    """
    wanted = name.strip().lower()
    known = names()
    for own in known:
        if wanted in {own, *(alias.lower() for alias in FAMILIES[own].spec.aliases)}:
            return FAMILIES[own]
    near = difflib.get_close_matches(wanted, known, 1, 0.4)
    raise VideotuneError(
        f"there is no family {name!r}{did_you_mean(near)}  Families: {', '.join(known)}."
    )


def facts(family: str) -> dict[str, Any]:
    """What the family's JSON file beside its code says: "spec", "key_names" of other layouts, and "tiny" checkpoints."""
    return read_json(Path(__file__).with_name(f"{family}.json"))
