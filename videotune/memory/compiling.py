"""Compile the repeated blocks of a network (``compile``), one graph per kind."""

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from videotune.errors import VideotuneError
from videotune.files import user_cache

RECOMPILE_LIMIT = 32
"""Maximum number of graphs per kind of block; torch runs further shapes uncompiled."""


def no_compiler() -> str | None:
    """Return why torch cannot compile on this machine, or None if it can."""
    compilers = [os.environ.get("CXX"), "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        return "torch finds no C++ compiler, such as g++"
    if torch.accelerator.is_available() and find_spec("triton") is None:
        return "triton is not installed"
    return None


def compile_blocks(net: nn.Module, paths: Sequence[str]) -> None:
    """Compile the blocks at their first passes with gradients; cache the code on disk.

    Call this before the network is streamed, so that moving weights and inputs stays
    outside the graphs. Passes without gradients (previews, validation, the base model's
    prediction) stay uncompiled, because each would need one more graph. The first shape
    has its own graph; all other shapes share one.

    Args:
        paths: module paths of the lists of blocks.

    Raises:
        VideotuneError: if there is no compiler.
    """
    reason = no_compiler()
    if reason:
        raise VideotuneError(f"compile: {reason}. Set it to false.")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch itself sets the variable to a temporary folder.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache() / "inductor")

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for path in paths:
        for block in net.get_submodule(path).children():
            block.forward = _compile_with_gradients(block.forward)


def _compile_with_gradients(uncompiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled only while gradients are enabled."""
    compiled = torch.compile(uncompiled)

    @functools.wraps(uncompiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        return uncompiled(*args, **kwargs)

    return forward


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
