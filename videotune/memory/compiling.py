"""Compile the repeated blocks of a network (``compile``), one graph per kind."""

import functools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from videotune.errors import VideotuneError
from videotune.files import user_cache
from videotune.memory.checkpointing import OFF, checkpoint_arguments

RECOMPILE_LIMIT = 32
"""Maximum number of graphs per kind of block; torch runs further shapes uncompiled."""

MOST_CHARACTERS = 240
"""Length to which an error of the compiler is cut."""


def no_compiler() -> str | None:
    """Return why torch cannot compile on this machine, or None if it can."""
    compilers = [os.environ.get("CXX"), "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        return "torch finds no C++ compiler, such as g++"
    if torch.accelerator.is_available() and find_spec("triton") is None:
        return "triton is not installed"
    return None


class CompileClock:
    """Counts the seconds in which this process compiles, forward and backward graphs."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def is_compiling(self) -> bool:
        """Whether the process compiles at the moment."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        since = self._since
        return self._seconds + (0.0 if since is None else time.perf_counter() - since)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count within a block."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._begin)
            callback_handler.remove_end_callback(self._end)

    def _begin(self, _: Any) -> None:
        self._since = time.perf_counter()

    def _end(self, _: Any) -> None:
        self._seconds = self.seconds
        self._since = None


class CompiledBlocks:
    """The compiled blocks of a run's networks, and whether their code is used.

    Blocks are compiled at their first passes with gradients, and the code is cached on
    disk. Passes without gradients (previews, validation, the base model's prediction)
    stay uncompiled, because each would need one more graph. The first shape has its own
    graph; all other shapes share one.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        """Why blocks are no longer compiled. None: they are."""
        self.kinds: set[str] = set()
        """Class names of the blocks."""
        self.clock = CompileClock()
        self._codes: dict[type[nn.Module], CodeType] = {}
        _prepare_compiler()

    def add(
        self,
        net: nn.Module,
        paths: Sequence[str],
        checkpointing: str,
        *,
        draws: bool = True,
    ) -> None:
        """Compile the blocks of a network.

        Call this before the network is streamed, so that moving weights and inputs
        stays outside the graphs.

        Args:
            net: the network.
            paths: module paths of the lists of blocks.
            checkpointing: what the graphs recompute: OFF, ON or ATTENTION_SAVED. A
                compiled graph recomputes less than a block that runs twice, because
                nothing needs the block's output again.
            draws: whether blocks draw random numbers.
        """
        arguments: dict[str, Any] = {}
        if checkpointing != OFF:
            arguments = checkpoint_arguments(checkpointing, draws=draws)
        blocks: list[nn.Module] = []
        for path in paths:
            blocks.extend(net.get_submodule(path).children())
        for block in blocks:
            self.kinds.add(type(block).__name__)
            block.forward = self._compile(block, arguments)

        if arguments:
            enable: Any = net.enable_gradient_checkpointing
            enable(functools.partial(_checkpoint_others, set(blocks), arguments))

    def _compile(
        self, block: nn.Module, arguments: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return a forward function that runs compiled only while gradients are
        enabled.

        Args:
            block: the block.
            arguments: of torch's checkpoint. Empty: nothing is recomputed.
        """
        plain = block.forward
        uncompiled = plain
        if arguments:
            uncompiled = self._checkpointed(block, arguments)
        compiled = torch.compile(uncompiled)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            if self.failure is not None:
                return uncompiled(*args, **kwargs)
            return compiled(*args, **kwargs)

        return forward

    def _checkpointed(
        self, block: nn.Module, arguments: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return the block's forward function with checkpointing inside of it."""
        plain = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, **arguments, **kwargs)

        # torch remembers by code and name which shapes have changed, so each kind of
        # block needs code of its own.
        kind = type(block)
        code = forward.__code__.replace(co_name=kind.__name__)
        forward.__code__ = self._codes.setdefault(kind, code)
        return forward

    @contextmanager
    def given_up(self, reason: str) -> Iterator[None]:
        """Run the blocks uncompiled, and from now on if nothing fails here.

        If it fails too, the error is the model's own, and the compiler is not blamed.
        """
        self.failure = reason
        try:
            yield
        except BaseException:
            self.failure = None
            raise


def compile_blocks(
    net: nn.Module, paths: Sequence[str], checkpointing: str = OFF
) -> CompiledBlocks:
    """Compile the blocks of one network, see ``CompiledBlocks.add``."""
    compiled = CompiledBlocks()
    compiled.add(net, paths, checkpointing)
    return compiled


def describe_failure(error: Exception) -> str:
    """Return an error of the compiler in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = [f"{type(error).__name__}:", *lines[:1]]
    if words[-1].endswith(":"):
        words += lines[1:2]
    return " ".join(words)[:MOST_CHARACTERS]


def _prepare_compiler() -> None:
    """Set where the compiler caches its code, and how much it compiles.

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


def _checkpoint_others(
    compiled: Collection[nn.Module],
    arguments: Mapping[str, Any],
    module: nn.Module,
    *args: Any,
) -> Any:
    """Run a module that the network checkpoints: its graph does that, or it is done
    here.
    """
    if module in compiled:
        return module(*args)
    return checkpoint(module, *args, **arguments)


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
