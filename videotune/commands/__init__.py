"""One file a command: a function that composes the packages below and returns what the command line prints.

A module is imported at its first use, since `--help` must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from videotune.lazy import gc_paused

if TYPE_CHECKING:
    from videotune.commands import autopsy as autopsy
    from videotune.commands import cache as cache
    from videotune.commands import caption as caption
    from videotune.commands import check as check
    from videotune.commands import compare as compare
    from videotune.commands import demo as demo
    from videotune.commands import doctor as doctor
    from videotune.commands import export as export
    from videotune.commands import import_config as import_config
    from videotune.commands import lora as lora
    from videotune.commands import plan as plan
    from videotune.commands import publish as publish
    from videotune.commands import report as report
    from videotune.commands import sample as sample
    from videotune.commands import self_test as self_test
    from videotune.commands import train as train
    from videotune.commands import wait as wait


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    with gc_paused():
        return import_module(f"{__name__}.{name}")
