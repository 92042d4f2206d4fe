"""Bytes that a step would hold, by part and phase: the real code, run on tensors that have shapes and no memory.

The tensors lie on a fake *CPU*. A fake CUDA device ends the process where torch was built without CUDA, and "meta" takes
attention's path of plain matrices; the CPU's fused attention keeps what CUDA's keeps, its output and a float32 number a row.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from videotune.files import Count, Number

PIECE = 512
"""CUDA's caching allocator hands memory out in multiples of so many bytes."""

Parts = Mapping[str, Count]
"""Bytes by part."""


@dataclass(frozen=True)
class Reading:
    """Of each phase the bytes of each part at the moment when most were held; and the floating-point operations done."""

    phases: Mapping[str, Parts]
    flops: Number

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return max(sum(parts.values()) for parts in self.phases.values())


class Ledger(TorchDispatchMode):
    """While entered, counts the bytes of live storages. What nobody has named is "activations".

    torch's own MemTracker cannot: it puts a hook on every parameter, which a frozen one refuses.
    """

    def __init__(self, piece: int = PIECE) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        self.phases: dict[str, dict[str, int]] = {}
        self.flops = 0.0
        self._piece, self._phase, self._most = piece, "", -1
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._rows: dict[int, tuple[str, int]] = {}
        self._next = 0

    def phase(self, name: str) -> None:
        """What is held from now on belongs to this phase."""
        self._phase = name
        self._most = sum(self.phases[name].values()) if name in self.phases else -1
        self._look()

    def name(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """The storages of these tensors belong to a part, whether they were seen before or not."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._add(storage, part)
                continue
            row = self._known[storage]
            before, size = self._rows[row]
            self._rows[row] = (part, size)
            self.held[before] -= size
            self.held[part] += size
        self._look()

    def reading(self) -> Reading:
        """What was seen so far."""
        return Reading({name: dict(parts) for name, parts in self.phases.items()}, self.flops)

    def _add(self, storage: Any, part: str) -> None:
        size = -(-storage.nbytes() // self._piece) * self._piece
        row, self._next = self._next, self._next + 1
        self._known[storage], self._rows[row] = row, (part, size)
        self.held[part] += size
        weakref.finalize(storage, self._gone, row)

    def _gone(self, row: int) -> None:
        part, size = self._rows.pop(row)
        self.held[part] -= size

    def _look(self) -> None:
        total = sum(self.held.values())
        if self._phase and total > self._most:
            self._most = total
            self.phases[self._phase] = {part: size for part, size in self.held.items() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage not in self._known:
                    self._add(storage, "activations")
        self._look()
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""torch's own counts, of matrix products, convolutions and attention; FlopCounterMode itself keeps activations alive."""


def to_fake(net: nn.Module, mode: FakeTensorMode) -> dict[int, nn.Parameter]:
    """Put a fake tensor in the place of each parameter and buffer, of the same shape and dtype, on the fake CPU.

    Returns the new parameters by the ``id`` of the old ones.
    """
    done: dict[int, nn.Parameter] = {}
    before = [*net.parameters(), *net.buffers()]  # kept alive: an id says nothing of what is gone
    shared: dict[int, Tensor] = {}
    for module in net.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in done:  # one that stands in two places stays one
                done[id(parameter)] = nn.Parameter(empty_like(parameter, mode), requires_grad=parameter.requires_grad)
            module._parameters[name] = done[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                if id(buffer) not in shared:
                    shared[id(buffer)] = empty_like(buffer, mode)
                module._buffers[name] = shared[id(buffer)]
    assert len(done) + len(shared) == len(before)
    return done


def empty_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of the same shape and dtype on the fake CPU."""
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fake_mode() -> FakeTensorMode:
    """The mode under which a step runs without memory; real tensors that it meets (constants, tables) are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)
