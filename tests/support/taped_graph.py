"""A CUDA graph's stand-in on any device: a tape of the operations of a pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from videotune.trainer import loop
from videotune.trainer.captured_passes import CapturedPasses

aten = torch.ops.aten
NOT_IN_A_GRAPH = {
    aten._local_scalar_dense.default: "the host reads a number of the device",
    aten.nonzero.default: "the host waits for a size",
    aten.masked_select.default: "the host waits for a size",
}
LIFTED = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Operation:
    """An operation with the tensors that it reads and those that it wrote."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any


class Recorder(TorchDispatchMode):
    """Writes operations to a tape and refuses what no graph can hold."""

    def __init__(self, tape: list[Operation]) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        reason = NOT_IN_A_GRAPH.get(function)
        if function in LIFTED and args[0].ndim:  # a single number is part of a kernel
            reason = "a tensor is made of the host's numbers"
        reads_mask = function is aten.index.Tensor and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if reason or reads_mask:
            raise RuntimeError(f"{function}: {reason or 'the host waits for a size'}")
        result = function(*args, **(kwargs or {}))
        if _crosses(args, result):
            raise RuntimeError(f"{function}: numbers go between host and device")
        self.tape.append(Operation(function, args, kwargs or {}, result))
        return result


def _crosses(arguments: Any, result: Any) -> bool:
    """Return whether an operation has tensors of two devices, numbers left out."""
    leaves = tree_flatten((arguments, result))[0]
    devices = {x.device.type for x in leaves if isinstance(x, Tensor) and x.ndim}
    return len(devices) > 1


class TapedGraph:
    """Repeats the operations of a pass on the memory that they had.

    Like a CUDA graph it repeats nothing that the host did: numbers that the host put into
    an operation stay those of the captured pass, and so does the tensors' memory. Unlike
    one it has run once when it has been captured.
    """

    def __init__(self) -> None:
        self._tape: list[Operation] = []

    def capture(self, run: Callable[[], None], pool: object) -> None:
        with Recorder(self._tape):
            run()

    @torch.no_grad()
    def replay(self) -> None:
        for operation in self._tape:
            result = operation.function(*operation.arguments, **operation.keywords)
            _write(operation.result, result)

    @staticmethod
    def new_pool() -> object:
        return object()


def _write(kept: Any, new: Any) -> None:
    """Put new results where the captured ones are."""
    for target, value in zip(tree_flatten(kept)[0], tree_flatten(new)[0], strict=True):
        if isinstance(target, Tensor) and target.data_ptr() != value.data_ptr():
            target.detach().copy_(value)


@contextmanager
def taped() -> Iterator[list[CapturedPasses]]:
    """Runs within capture their passes on tapes, on a device that is said to have graphs."""
    made: list[CapturedPasses] = []

    def on_tapes() -> CapturedPasses:
        made.append(CapturedPasses(TapedGraph))
        return made[-1]

    with (
        patch.object(loop, "no_cuda_graphs", lambda device: None),
        patch.object(loop, "CapturedPasses", on_tapes),
    ):
        yield made
