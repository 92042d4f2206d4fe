"""Compiling the repeated blocks of a network, one graph for all blocks of a kind: ``compile``."""

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
"""Graphs of a kind of block at the most: further shapes are computed without compiling, as torch does it."""


def no_compiler() -> str | None:
    """What torch lacks on this machine to compile with, in words; None: nothing."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        return "torch finds no C++ compiler, such as g++"
    if torch.accelerator.is_available() and find_spec("triton") is None:
        return "triton is not installed"
    return None


def compile_blocks(net: nn.Module, paths: Sequence[str]) -> None:
    """Have the blocks compiled at their first passes with gradients; ``paths``: of their lists. Code is kept for later runs.

    Before the network is streamed, so that what moves weights and inputs stays outside of what is compiled. Passes without
    gradients (previews, validation, the base model's own prediction) stay as they are: each would need one more graph. The
    first shape has a graph of its own, all others share one. Raises VideotuneError where there is no compiler.
    """
    if why := no_compiler():
        raise VideotuneError(f"compile: {why}: set it to false")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch itself sets it to a temporary folder
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache() / "inductor")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for path in paths:
        for block in net.get_submodule(path).children():
            block.forward = _with_gradients(block.forward)


def _with_gradients(own: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(own)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else own)(*args, **kwargs)

    return forward


def compiled_graphs() -> int:
    """How many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
