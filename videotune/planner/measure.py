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
from torch.utils.flop_counter import flop_registry
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

    def extrapolated(self, one: Reading, other: Reading, times: float) -> Reading:
        """This reading plus ``times`` the difference between two others, phase by phase.

        Phases are extrapolated apart because the maximum of several straight lines is no straight line.
        """
        phases = {}
        for name, parts in self.phases.items():
            before, after = one.phases[name], other.phases[name]
            phases[name] = plus(
                parts, {part: after.get(part, 0) - before.get(part, 0) for part in {*before, *after}}, times
            )
        return Reading(phases, self.flops + (other.flops - one.flops) * times)


def plus(parts: Parts, more: Parts, times: float = 1) -> dict[str, int]:
    """``times`` the bytes of ``more`` added to the bytes of ``parts``, part by part, in alphabetical order."""
    return {part: parts.get(part, 0) + round(more.get(part, 0) * times) for part in sorted({*parts, *more})}


Depths = tuple[tuple[str, int], ...]
"""The number of blocks of each list of blocks, by the list's path."""

FEW, MORE = 2, 4
"""Blocks of a list in the shallow networks. With one block, the first and the last block would be the same."""


def deep(read: Callable[[Depths], Reading], blocks: Mapping[str, int]) -> Reading:
    """The reading of a network with so many ``blocks`` of each list, from a shallow network and one more for each list.

    Blocks of a list are alike, so every number is affine in how many there are. Shallow networks are read as they are.
    """
    few = {path: min(FEW, count) for path, count in blocks.items()}
    result = base = read(tuple(few.items()))
    for path, count in blocks.items():
        more = min(MORE, count)
        if more > few[path]:
            other = read(tuple({**few, path: more}.items()))
            result = result.extrapolated(base, other, (count - few[path]) / (more - few[path]))
    return result


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
        self._entries: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> [part, bytes]

    def phase(self, name: str) -> None:
        """What is held from now on belongs to this phase."""
        self._phase = name
        self._most = sum(self.phases[name].values()) if name in self.phases else -1
        self._look()

    def name(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """The storages of these tensors belong to a part, whether they were seen before or not."""
        for tensor in tensors:
            if tensor is not None:
                entry = self._entry(tensor.untyped_storage(), part)
                self.held[entry[0]] -= entry[1]
                self.held[part] += entry[1]
                entry[0] = part
        self._look()

    def reading(self) -> Reading:
        """What was seen so far."""
        return Reading({name: dict(parts) for name, parts in self.phases.items()}, self.flops)

    def _entry(self, storage: Any, part: str) -> list[Any]:
        """The entry of a storage; it belongs to ``part`` if it was not seen before."""
        if storage not in self._entries:
            self._entries[storage] = entry = [part, -(-storage.nbytes() // self._piece) * self._piece]
            self.held[part] += entry[1]
            weakref.finalize(storage, self._freed, entry)
        return self._entries[storage]

    def _freed(self, entry: list[Any]) -> None:
        self.held[entry[0]] -= entry[1]

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
                self._entry(leaf.untyped_storage(), "activations")
        self._look()
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out


_ATEN = torch.ops.aten
_FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
"""torch's own counts, of matrix products, convolutions and attention; FlopCounterMode itself keeps activations alive."""


def to_fake(net: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Replace each parameter and buffer by a fake tensor of the same shape and dtype on the fake CPU.

    Returns the new tensors by the ``id`` of the old ones; a tensor that stands in two places stays one.
    """
    made: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        own = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if own else fake
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: made[id(tensor)] for name, tensor in tensors.items() if tensor is not None})
    return made


def fake_mode() -> FakeTensorMode:
    """The mode under which a step runs without memory; real tensors that it meets (constants, tables) are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)
