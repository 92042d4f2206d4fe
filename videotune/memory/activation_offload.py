"""Keep the inputs of checkpointed blocks on the host until their backward pass."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from videotune.memory.accelerator import copy_stream
from videotune.memory.host_weights import dense, pinned

AHEAD = 2
"""Blocks whose inputs may be in flight to or from the host at the same time.

The device holds the inputs of no other block.
"""


@dataclass
class HostBuffer:
    """A reusable piece of host memory, pinned if the device has copy streams."""

    flat: Tensor
    """The bytes."""

    read: torch.Event | None = None
    """Recorded after the last copy from the buffer; wait for it before writing."""


@dataclass(eq=False)
class Offloaded:
    """A tensor on the host, which autograd saves in place of the device's tensor."""

    host: Tensor
    buffer: HostBuffer

    blocks: "OffloadedBlocks"
    """The offloaded tensors of this forward pass, one list per block."""

    block: int
    """Index in ``blocks`` of the block that saved this tensor."""

    sent: torch.Event = field(default_factory=torch.Event)
    """Recorded after the copy to the host."""

    device: Tensor | None = None
    """The copy back on the device, until autograd unpacks it."""

    back: torch.Event | None = None
    """Recorded after the copy back to the device; None before that copy started."""


OffloadedBlocks = list[list[ref[Offloaded]]]
"""The offloaded tensors of a forward pass, one list per block."""

Bytes = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides of a tensor."""


class ActivationOffload:
    """Offload a block's first tensor and the tensors that the previous block returned.

    Tensors that all blocks share stay on the device.

    On a device with streams, each direction has its own stream, ordered by events, and
    the host never waits. The device's tensor is kept until its copy is done: the
    compute stream waits when more than ``AHEAD`` blocks' tensors are being copied. In
    the backward pass, the next block's inputs are fetched while a block computes. A
    host buffer is reused as soon as no graph refers to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        """Bytes copied to the host so far."""

        self._out = copy_stream(device)
        self._in = copy_stream(device)
        self._returned: list[ref[Tensor]] = []
        self._blocks: OffloadedBlocks = []
        self._free: list[HostBuffer] = []
        self._leaving: deque[tuple[int, Tensor, torch.Event]] = deque()
        self._coming: list[Tensor] = []

    def begin(self) -> None:
        """Reset before a forward pass; the last pass may have been interrupted."""
        if self._out is not None and self._in is not None:
            compute_stream = self._compute_stream()
            compute_stream.wait_stream(self._out)
            compute_stream.wait_stream(self._in)
        self._leaving.clear()
        self._coming.clear()
        self._returned = []
        self._blocks = []

    def returned(self, output: Any) -> None:
        """Record the output of a block, which is the input of the next one."""
        values = output if isinstance(output, Sequence) else [output]
        self._returned = []
        for value in values:
            if isinstance(value, Tensor):
                self._returned.append(ref(value))

    def hooks(self, arguments: Iterable[Any]) -> saved_tensors_hooks:
        """Return autograd hooks that offload the arguments that a checkpoint saves.

        Only the tensors that pass from block to block are offloaded.
        """
        blocks = self._blocks
        blocks.append([])
        first_in_flight = len(blocks) - AHEAD
        self._wait_for_sent(first_in_flight)

        # Match by address: a checkpoint may save other tensors too, in any order.
        offloadable: set[Bytes] = set()
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        for index, x in enumerate(tensors):
            is_first = index == 0
            moves_between_blocks = is_first or self._was_returned(x)
            if moves_between_blocks and x.is_floating_point() and dense(x):
                offloadable.add(_bytes_of(x))

        def pack(x: Tensor) -> Offloaded | Tensor:
            if _bytes_of(x) in offloadable:
                return self._offload(x, blocks)
            return x

        return saved_tensors_hooks(pack, self._fetch)

    def _was_returned(self, x: Tensor) -> bool:
        return any(returned() is x for returned in self._returned)

    def _wait_for_sent(self, block: int) -> None:
        """Drop the device tensors of the blocks before ``block``.

        The compute stream waits until they are copied to the host.
        """
        while self._leaving:
            leaving_block, _, sent = self._leaving[0]
            if leaving_block >= block:
                return
            self._compute_stream().wait_event(sent)
            self._leaving.popleft()

    def _compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _offload(self, x: Tensor, blocks: OffloadedBlocks) -> Offloaded:
        """Start a tensor's copy to the host and return its host side."""
        x = x.detach()
        block = len(blocks) - 1
        buffer = self._take_buffer(x.nbytes)

        # The same strides: a kernel may depend on the memory order.
        numbers = buffer.flat[: x.nbytes].view(x.dtype)
        host = numbers.as_strided(x.shape, x.stride())
        offloaded = Offloaded(host=host, buffer=buffer, blocks=blocks, block=block)
        blocks[block].append(ref(offloaded))
        release = finalize(offloaded, self._free.append, buffer)
        release.atexit = False
        self.bytes += x.nbytes

        if self._out is None:
            offloaded.host.copy_(x)
            return offloaded

        self._out.wait_stream(self._compute_stream())
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
        with self._out:
            offloaded.host.copy_(x, non_blocking=True)
        offloaded.sent = self._out.record_event()
        self._leaving.append((block, x, offloaded.sent))
        return offloaded

    def _take_buffer(self, size: int) -> HostBuffer:
        """Return the smallest free buffer of at least ``size`` bytes.

        If there is none, allocate one; it replaces a free buffer that is too small.
        """
        free_sizes = [buffer.flat.nbytes for buffer in self._free]
        fitting = [index for index, free in enumerate(free_sizes) if free >= size]
        if fitting:
            smallest = min(fitting, key=free_sizes.__getitem__)
            return self._free.pop(smallest)

        if self._free:
            self._free.pop()
        allocate = torch.empty if self._out is None else pinned
        return HostBuffer(allocate((size,), dtype=torch.uint8))

    def _fetch(self, saved: Offloaded | Tensor) -> Tensor:
        """Return a saved tensor on the device, and start the next block's fetches."""
        if isinstance(saved, Tensor):
            return saved
        if self._in is None:
            return saved.host.to(self.device, copy=True)

        self._wait_for_sent(len(saved.blocks))
        if saved.device is None:
            self._start_fetch(saved)

        # Prefetch this block's other tensors and those of the next backward block.
        prefetch_block = max(saved.block - AHEAD + 1, 0)
        tensors_of_block = saved.blocks[saved.block]
        tensors_to_prefetch = saved.blocks[prefetch_block]
        for reference in (*tensors_of_block, *tensors_to_prefetch):
            offloaded = reference()
            if offloaded is not None and offloaded.back is None:
                self._start_fetch(offloaded)

        assert saved.back is not None
        assert saved.device is not None
        self._compute_stream().wait_event(saved.back)

        # From here on the caller holds the only reference.
        fetched = saved.device
        saved.device = None
        self._coming = [tensor for tensor in self._coming if tensor is not fetched]
        return fetched

    def _start_fetch(self, offloaded: Offloaded) -> None:
        """Start a tensor's copy back to the device."""
        assert self._in is not None
        host = offloaded.host
        offloaded.device = torch.empty_strided(
            host.shape, host.stride(), dtype=host.dtype, device=self.device
        )
        # Hold it until the copy is done, even if the graph is deleted earlier.
        self._coming.append(offloaded.device)

        # The allocator may have handed out memory that running kernels still use.
        self._in.wait_stream(self._compute_stream())
        self._in.wait_event(offloaded.sent)
        with self._in:
            offloaded.device.copy_(host, non_blocking=True)
        event = self._in.record_event()
        offloaded.back = event
        offloaded.buffer.read = event


def _bytes_of(x: Tensor) -> Bytes:
    """Return the address, shape and strides of a tensor.

    They are equal for a tensor and for the alias of it that autograd saves.
    """
    shape = tuple(x.shape)
    return x.data_ptr(), shape, x.stride()
