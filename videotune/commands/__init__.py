"""One file a command. A module is imported at its first use, since `--help` must not load torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from videotune.commands import (
        cache,
        check,
        compare,
        dataset,
        demo,
        doctor,
        export,
        options,
        plan,
        presets,
        sample,
        train,
    )

    __all__ = [
        "cache",
        "check",
        "compare",
        "dataset",
        "demo",
        "doctor",
        "export",
        "options",
        "plan",
        "presets",
        "sample",
        "train",
    ]


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    return import_module(f"{__name__}.{name}")
