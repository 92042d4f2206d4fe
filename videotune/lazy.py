"""Libraries that are imported at first use, as objects with the library's names.

A family's file has its spec, which is read without torch, and its networks. With these
objects it needs no import inside a function. Type checkers see the modules themselves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

freeze_imports = False
"""Exclude from garbage collection what exists once diffusers is imported.

The command line sets it: searching these objects takes a tenth of the time to the first
step. Within another program its objects may have to be freed.
"""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection for a block of imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


if TYPE_CHECKING:
    import av as av
    import av.stream
    import av.video.reformatter as av_reformatter
    import diffusers as diffusers
    import huggingface_hub as huggingface_hub
    import openai as openai
    import psutil as psutil
    import pyarrow as pyarrow
    import pyarrow.parquet as pyarrow_parquet
    import safetensors.torch as safetensors_torch
    import scipy.special as scipy_special
    import torch as torch
    import torch.distributed.fsdp as fsdp
    import transformers as transformers
else:

    def _attribute(module: str, name: str) -> Any:
        """Return a module's attribute, or its submodule of this name."""
        library = import_module(module)
        if not hasattr(library, name) and not name.startswith("_"):
            with suppress(ModuleNotFoundError):
                return import_module(f"{module}.{name}")
        return getattr(library, name)

    class _LazyModule:
        """A module that is imported when one of its names is used for the first time."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            is_first = self._name not in sys.modules
            with gc_paused():
                value = _attribute(self._name, name)
            self.__dict__[name] = value
            if is_first and freeze_imports and self._name == "diffusers":
                gc.freeze()
            return value

    av = _LazyModule("av")
    av_reformatter = _LazyModule("av.video.reformatter")
    diffusers = _LazyModule("diffusers")
    huggingface_hub = _LazyModule("huggingface_hub")
    openai = _LazyModule("openai")
    psutil = _LazyModule("psutil")
    pyarrow = _LazyModule("pyarrow")
    pyarrow_parquet = _LazyModule("pyarrow.parquet")
    safetensors_torch = _LazyModule("safetensors.torch")
    scipy_special = _LazyModule("scipy.special")
    torch = _LazyModule("torch")
    fsdp = _LazyModule("torch.distributed.fsdp")
    transformers = _LazyModule("transformers")
