"""torch, diffusers, transformers, huggingface_hub, openai, av, psutil, scipy.special as objects, imported at first use.

A family's file has its spec, which is read without torch, and its networks: with these names it needs no import inside a
function. Type checkers see the modules themselves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

freeze_imports = False
"""Set by the command line: what lives when diffusers is there, before any network is, is never searched for cycles again.

A tenth of the time to the first step goes into such searches. Not within another program, whose objects may end.
"""


@contextmanager
def gc_paused() -> Iterator[None]:
    """No search for cycles among what is imported within this block."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


if TYPE_CHECKING:
    import av as av
    import av.stream
    import av.video.reformatter as av_reformatter
    import diffusers as diffusers
    import huggingface_hub as huggingface_hub
    import openai as openai
    import psutil as psutil
    import scipy.special as scipy_special
    import torch as torch
    import transformers as transformers
else:

    class _LazyModule:
        """A module that is imported when one of its names is asked for; that name is an attribute from then on."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            first = self._name not in sys.modules
            with gc_paused():
                found = self.__dict__[name] = getattr(import_module(self._name), name)
            if first and freeze_imports and self._name == "diffusers":
                gc.freeze()
            return found

    av, diffusers, huggingface_hub, openai, psutil, torch, transformers = map(
        _LazyModule,
        ("av", "diffusers", "huggingface_hub", "openai", "psutil", "torch", "transformers"),
    )
    av_reformatter = _LazyModule("av.video.reformatter")
    scipy_special = _LazyModule("scipy.special")
