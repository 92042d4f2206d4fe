"""One file a command: a function that composes the packages below and returns what the command line prints.

A module is imported at its first use, since `--help` must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from videotune.lazy import gc_paused

if TYPE_CHECKING:
    from videotune.commands import (  # noqa: I001
        autopsy as autopsy, cache as cache, caption as caption, check as check, compare as compare,
        demo as demo, doctor as doctor, export as export, import_config as import_config, lora as lora,
        plan as plan, publish as publish, report as report, sample as sample, self_test as self_test,
        train as train, wait as wait,
    )  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    with gc_paused():
        return import_module(f"{__name__}.{name}")
