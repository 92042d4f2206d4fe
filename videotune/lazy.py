"""torch, diffusers, transformers, huggingface_hub, av and scipy.special as objects that are imported at their first use.

A family's file has its spec, which is read without torch, and its networks: with these names it needs no import inside a
function. Type checkers see the modules themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import av as av
    import av.stream
    import av.video.reformatter as av_reformatter
    import diffusers as diffusers
    import huggingface_hub as huggingface_hub
    import scipy.special as scipy_special
    import torch as torch
    import transformers as transformers
else:

    class _LazyModule:
        """A module that is imported when one of its names is asked for; that name is an attribute from then on."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = self.__dict__[name] = getattr(import_module(self._name), name)
            return found

    av, diffusers, huggingface_hub, torch, transformers = map(
        _LazyModule, ("av", "diffusers", "huggingface_hub", "torch", "transformers")
    )
    av_reformatter, scipy_special = _LazyModule("av.video.reformatter"), _LazyModule("scipy.special")
