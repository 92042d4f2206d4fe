"""Compute a block again part by part (``gradient_checkpointing: IN_PARTS``).

Gradient checkpointing keeps the inputs of blocks, and computes a block again when its
backward pass comes. All that the block then saves exists at once, and with long videos
it is the largest thing on the card. Here each large part of the block (its attentions,
its feed-forward network) saves only its inputs and what attention returns, and computes
the rest once more when its own backward pass comes.

The same operations run on the same numbers, so gradients are equal to the bit. Blocks
that ``input_checkpoint`` leaves to torch's checkpoint are computed again as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

SMALLEST_SHARE = 0.05
"""Share of a block's weights from which on a module in it is one of its large parts."""

WHOLE_FORWARD = "_whole_forward"
"""Attribute of a large part with its own forward."""


_thread = local()


@contextmanager
def computing_again() -> Iterator[None]:
    """Compute a block again within the context, in its backward pass."""
    _thread.is_computing_again = True
    try:
        yield
    finally:
        _thread.is_computing_again = False


def compute_in_parts(
    net: nn.Module, paths: Sequence[str], arguments: dict[str, Any]
) -> None:
    """Let the large parts of all blocks save only their inputs.

    Args:
        net: the network.
        paths: module paths of the lists of blocks.
        arguments: keyword arguments of torch's checkpoint.
    """
    for part in _large_parts(net, paths):
        if not hasattr(part, WHOLE_FORWARD):
            whole_forward = part.forward
            setattr(part, WHOLE_FORWARD, whole_forward)
            part.forward = partial(_forward_in_part, whole_forward, arguments)


def compute_whole(net: nn.Module, paths: Sequence[str]) -> None:
    """Undo ``compute_in_parts``."""
    for part in _large_parts(net, paths):
        if hasattr(part, WHOLE_FORWARD):
            part.forward = getattr(part, WHOLE_FORWARD)
            delattr(part, WHOLE_FORWARD)


def _large_parts(net: nn.Module, paths: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the large parts of all blocks."""
    for path in paths:
        for block in net.get_submodule(path).children():
            smallest = SMALLEST_SHARE * _numbers(block)
            for part in block.children():
                if _numbers(part) >= smallest:
                    yield part


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _forward_in_part(
    whole_forward: Callable[..., Any],
    arguments: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a part; save only its inputs if its backward pass is about to come."""
    if not getattr(_thread, "is_computing_again", False):
        return whole_forward(*args, **kwargs)
    return checkpoint(whole_forward, *args, **arguments, **kwargs)
