"""Count the bytes of live tensors by part and phase, and the operations, while code
runs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from videotune.files import Count, Number

PIECE = 512
"""CUDA's caching allocator allocates multiples of this number of bytes."""

CountsByPart = Mapping[str, Count]
"""Bytes by part."""

KEPT = "kept"
"""The moment of a step between its forward and its backward pass."""

FIRST = "first block"
PASSES = ("forward", "backward", FIRST)
"""Phases of a micro-batch.

"backward" is that of everything after the blocks and of the last block, FIRST that of
the first block and everything before it. The blocks between them are interpolated.
"""


AFTER_PASSES = ("optimizer", "end")
"""Phases after all micro-batches."""

FREE = {
    "_record_function_enter_new",
    "_record_function_exit",
    "_unsafe_view",
    "alias",
    "detach",
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
"""Operations that start no kernel, beside views."""

MATRICES = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_int_mm",
    "_scaled_mm",
    "convolution",
}
"""Products of matrices, forward; the names of those backward end in "_backward"."""

EIGHT_BIT = {"_int_mm", "_scaled_mm"}
"""Products of eight-bit numbers."""

ATTENTION = "scaled_dot_product"
"""A part of the names of attention."""


@dataclass(frozen=True)
class Work:
    """What some code computed and moved."""

    flops: Number
    """Floating-point operations of matrix products, convolutions and attention."""
    attention: Number = 0
    """Those of attention."""
    moved: Number = 0
    """Bytes of the inputs and outputs of all other operations."""
    operations: Number = 0
    """Kernels that the host started in forward and backward passes."""
    eight_bit: Number = 0
    """Floating-point operations of products of eight-bit numbers."""

    def plus(self, added: Work, times: float = 1) -> Work:
        """Return this work plus ``times`` another."""
        return Work(
            flops=self.flops + times * added.flops,
            attention=self.attention + times * added.attention,
            moved=self.moved + times * added.moved,
            operations=self.operations + times * added.operations,
            eight_bit=self.eight_bit + times * added.eight_bit,
        )

    def shared(self, parts: int) -> Work:
        """Return a part of this work; the host starts as many kernels."""
        return Work(
            flops=self.flops / parts,
            attention=self.attention / parts,
            moved=self.moved / parts,
            operations=self.operations,
            eight_bit=self.eight_bit / parts,
        )


@dataclass(frozen=True)
class Reading:
    """What some code held and computed."""

    phases: Mapping[str, CountsByPart]
    """Bytes by part at the largest moment of each phase."""
    work: Work

    def extrapolated(self, first: Reading, second: Reading, times: float) -> Reading:
        """Return this reading plus ``times`` the difference from ``first`` to
        ``second``.

        Each phase is extrapolated by itself: the maximum of several lines is not a
        line.
        """
        phases = {}
        for phase, parts in self.phases.items():
            difference = plus(second.phases[phase], first.phases[phase], -1)
            phases[phase] = plus(parts, difference, times)
        difference_of_work = second.work.plus(first.work, -1)
        return Reading(phases, self.work.plus(difference_of_work, times))


def plus(parts: CountsByPart, added: CountsByPart, times: float = 1) -> dict[str, int]:
    """Return ``parts`` plus ``times`` the bytes of ``added``, part by part, in order."""
    total = {}
    for part in sorted({*parts, *added}):
        total[part] = parts.get(part, 0) + round(added.get(part, 0) * times)
    return total


class Ledger(TorchDispatchMode):
    """While entered, count the bytes of live storages.

    Unnamed tensors are "activations".

    torch's MemTracker cannot do this: it hooks every parameter, which frozen ones
    refuse.
    """

    def __init__(self, piece: int = PIECE) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        """Bytes at this moment, by part."""
        self.phases: dict[str, dict[str, int]] = {}
        self.flops = 0.0
        self.attention = 0.0
        self.eight_bit = 0.0
        self.moved = 0
        self.operations: Counter[str] = Counter()
        """Kernels, by phase."""
        self._piece = piece
        self._phase = ""
        self._most = -1
        self._entries: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """[part, bytes] by storage."""

    def phase(self, *names: str) -> None:
        """Count the following moments for the last of these phases, and this one for
        each.
        """
        for self._phase in names:
            known = self.phases.get(self._phase)
            self._most = -1 if known is None else sum(known.values())
            self._record_largest()

    def name(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Count the storages of these tensors for a part, also if they were counted
        before.
        """
        for tensor in tensors:
            if tensor is None:
                continue
            entry = self._entry(tensor.untyped_storage(), part)
            self.held[entry[0]] -= entry[1]
            self.held[part] += entry[1]
            entry[0] = part
        self._record_largest()

    def reading(self) -> Reading:
        """Return what was counted so far."""
        phases = {name: dict(parts) for name, parts in self.phases.items()}
        after = sum(self.operations[phase] for phase in AFTER_PASSES)
        in_passes = self.operations.total() - after
        work = Work(
            flops=self.flops,
            attention=self.attention,
            moved=self.moved,
            operations=in_passes,
            eight_bit=self.eight_bit,
        )
        return Reading(phases, work)

    def _entry(self, storage: Any, part: str) -> list[Any]:
        """Return the entry of a storage; a new one belongs to ``part``."""
        if storage not in self._entries:
            size = -(-storage.nbytes() // self._piece) * self._piece
            entry = [part, size]
            self._entries[storage] = entry
            self.held[part] += size
            weakref.finalize(storage, self._forget, entry)
        return self._entries[storage]

    def _forget(self, entry: list[Any]) -> None:
        self.held[entry[0]] -= entry[1]

    def _record_largest(self) -> None:
        total = sum(self.held.values())
        if self._phase and total > self._most:
            self._most = total
            parts = {part: size for part, size in self.held.items() if size}
            self.phases[self._phase] = parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._entry(leaf.untyped_storage(), "activations")
        self._record_largest()

        # Attention whose output no loss reads gets no gradient, and computes nothing.
        is_without_gradient = bool(args) and args[0] is None
        name = func._overloadpacket.__name__
        if not (func.is_view or name in FREE or is_without_gradient):
            self.count_operation(func, name, args, kwargs, out)
        return out

    def count_operation(
        self, func: Any, name: str, args: Any, kwargs: Any, out: Any
    ) -> None:
        """Count an operation that starts a kernel, its products or its bytes."""
        self.operations[self._phase] += 1
        is_attention = ATTENTION in name
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
            self.flops += flops
            self.attention += flops if is_attention else 0
            self.eight_bit += flops if name in EIGHT_BIT else 0

        if not is_attention and name.removesuffix("_backward") not in MATRICES:
            leaves = tree_leaves((args, kwargs, out))
            tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
            self.moved += sum(tensor.nbytes for tensor in tensors.values())


def _flop_counts() -> dict[Any, Callable[..., float]]:
    """Return torch's counts of matrix products, convolutions and attention, by
    operation.

    FlopCounterMode itself keeps activations alive. The registry lacks the CPU's
    attention and integers.
    """
    counts: dict[Any, Callable[..., float]] = dict(flop_registry)
    attention = "_scaled_dot_product_flash_attention"
    for direction in ("", "_backward"):
        on_cpu = getattr(torch.ops.aten, f"{attention}_for_cpu{direction}")
        counts[on_cpu] = flop_registry[
            getattr(torch.ops.aten, f"{attention}{direction}")
        ]
    # products of integers, as others
    counts[torch.ops.aten._int_mm] = flop_registry[torch.ops.aten.mm]
    counts[torch.ops.aten.addmm_] = flop_registry[torch.ops.aten.addmm]
    return counts


_FLOPS = _flop_counts()
