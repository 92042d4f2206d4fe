"""Device memory through which the weights of streamed blocks pass.

The gradients of streamed weights that train take the opposite way, as soon as their
block's backward pass has computed them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.memory.accelerator import copy_stream
from videotune.memory.host_weights import HostSlot, HostWeights, pinned

TORCH = ("2.11", "2.13")
"""Tested versions of torch, because private functions of it are used here."""


def refuse_other_torch(version: str) -> None:
    """Raise VideotuneError for an untested version, which might change a step."""
    if version.rsplit(".", 1)[0] not in TORCH:
        raise VideotuneError(
            f"torch {version}: videotune supports {' or '.join(TORCH)}. "
            "Run pip install 'torch==2.13.*'."
        )


refuse_other_torch(torch.__version__.partition("+")[0])

SLOTS = 2
"""Blocks on the device at a time: one computes while the next one arrives."""


@dataclass
class Slot:
    """Device memory for the weights of one block."""

    flat: Tensor
    """The bytes."""

    holds: int | None = None
    """The block whose weights are in the slot or arriving; None: no valid weights."""

    loaded: torch.Event = field(default_factory=torch.Event)
    """Recorded after the copy that fills the slot, if copies overlap."""

    free: torch.Event = field(default_factory=torch.Event)
    """Recorded after the last computation that read the slot, if copies overlap."""


class DeviceBuffers:
    """The slots, and the tensors of each streamed block.

    A block's tensors point into a slot while the block computes (its stay). At all
    other times they point at a single NaN, so that a read outside the stay shows in
    the loss.

    Weights are copied from the host to the device and never back. On a device with
    streams, copies have their own stream, ordered by events, and the host never waits.
    The next pass starts where the last one ended and reuses what is left in the slots.
    """

    def __init__(
        self,
        host_weights: HostWeights,
        tensors: Sequence[Sequence[Tensor]],
        device: torch.device,
    ) -> None:
        self.host_weights = host_weights
        self.tensors = tensors
        """The network's tensors of each streamed block, in the order of its slots."""

        self.device = device
        self.loads = 0
        """Blocks copied to the device so far."""

        self.gradient_release = GradientRelease(device)

        self._bound: dict[int, list[int]] = {}
        """Versions of the tensors of each block with a stay that has not ended, when it began."""

        self._open: int | None = None
        """Block whose backward stay has not ended."""

        self._nans: dict[torch.dtype, Tensor] = {}
        self._stream = copy_stream(device)

        size = max(end - begin for begin, end in host_weights.spans)
        count = min(SLOTS, len(host_weights.spans))
        self.slots = [
            Slot(torch.empty(size, dtype=torch.uint8, device=device))
            for _ in range(count)
        ]
        if self._stream is not None:
            # Running kernels may still use the memory that the allocator handed out.
            self._stream.wait_stream(torch.accelerator.current_stream(device))
            for slot in self.slots:
                slot.flat.record_stream(self._stream)

    def pairs(self, block: int) -> Iterator[tuple[Tensor, HostSlot]]:
        """Return the tensors of a block, each with its slot on the host."""
        return zip(self.tensors[block], self.host_weights.slots[block], strict=True)

    def begin(self) -> None:
        """End stays and discard outdated weights before a forward pass."""
        self.end_stay()
        self.gradient_release.forget()

        # The optimizer may have updated the host weights.
        if self.host_weights.trains:
            for slot in self.slots:
                slot.holds = None

    @contextmanager
    def forward(self, block: int, backward_follows: bool) -> Iterator[None]:
        """Provide the weights of a block during its forward pass.

        Args:
            block: index of the streamed block.
            backward_follows: the last blocks stay for the backward pass; otherwise the
                first blocks are loaded again at the end, for another forward pass.
        """
        count = len(self.tensors)
        upcoming = range(block, block + len(self.slots))
        if backward_follows or self.host_weights.trains:
            wanted = [i for i in upcoming if i < count]
        else:
            wanted = [i % count for i in upcoming]

        self._bind(block, wanted)
        try:
            yield
        finally:
            self._release(block)

    @contextmanager
    def backward(self, block: int) -> Iterator[None]:
        """Provide the weights of a block from now on, through its backward pass.

        The block is recomputed inside the context, but its backward pass reads the
        weights after the context. The stay therefore lasts until the next block
        begins (autograd runs the last computed block first) or ``end_stay``.
        """
        if self._open is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.end_stay()
        self.gradient_release.next_block()

        wanted = [i for i in range(block, block - len(self.slots), -1) if i >= 0]
        self._bind(block, wanted)
        self._open = block
        yield

    def _end_backward(self) -> None:
        """Finish a backward pass of the network."""
        self.end_stay()
        self.gradient_release.settle()

    def end_stay(self) -> None:
        """End the stay that a backward pass has left."""
        if self._open is not None:
            block = self._open
            self._open = None
            self._release(block)

    def _bind(self, block: int, wanted: Sequence[int]) -> None:
        """Point the block's tensors at its slot.

        Args:
            block: index of the streamed block.
            wanted: the block and the ones that are needed after it, in this order.
        """
        for wanted_block in wanted:
            self._load(wanted_block, wanted)

        slot = self._slot_of(block)
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_event(slot.loaded)

        begin = self.host_weights.spans[block][0]
        for tensor, host_slot in self.pairs(block):
            tensor.data = host_slot.view(slot.flat, host_slot.begin - begin)
        self._bound[block] = [tensor._version for tensor in self.tensors[block]]

    def _load(self, block: int, wanted: Sequence[int]) -> None:
        """Start copying a block to the device.

        Do nothing if it is there, or if every slot has a block that is in use or
        wanted.
        """
        if any(slot.holds == block for slot in self.slots):
            return
        slot = self._replaceable_slot(wanted)
        if slot is None:
            return

        slot.holds = block
        self.loads += 1
        if self._stream is None:
            self._copy(block, slot)
            return

        self._stream.wait_event(slot.free)
        with self._stream:
            self._copy(block, slot)
            slot.loaded.record(self._stream)

    def _replaceable_slot(self, wanted: Sequence[int]) -> Slot | None:
        for slot in self.slots:
            if slot.holds not in self._bound and slot.holds not in wanted:
                return slot
        return None

    def _copy(self, block: int, slot: Slot) -> None:
        begin, end = self.host_weights.spans[block]
        sources = self.host_weights.parts(begin, end)
        targets = slot.flat[: end - begin].split([len(source) for source in sources])
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=self._stream is not None)

    def _release(self, block: int) -> None:
        """End a block's stay.

        Raises VideotuneError if the block changed its weights in place.
        """
        versions = self._bound.pop(block)
        changed = []
        for (tensor, host_slot), version in zip(
            self.pairs(block), versions, strict=True
        ):
            if tensor._version != version:
                changed.append(host_slot.name)

        self.unbind(block)
        slot = self._slot_of(block)
        if self._stream is not None:
            slot.free.record(torch.accelerator.current_stream(self.device))

        if changed:
            raise VideotuneError(
                f"layer_offload_fraction: {changed[0]} is changed by its own block in "
                "the forward pass, and streaming would lose the change. Set it to 0."
            )

    def unbind(self, block: int) -> None:
        """Point each of a block's tensors at a single NaN, expanded to its shape."""
        for tensor, host_slot in self.pairs(block):
            tensor.data = self._nan(host_slot.dtype).expand(host_slot.shape)

    def _nan(self, dtype: torch.dtype) -> Tensor:
        """Return one NaN on the device, or 1 if the dtype has no NaN."""
        if dtype not in self._nans:
            has_nan = dtype.is_floating_point or dtype.is_complex
            value = float("nan") if has_nan else True
            self._nans[dtype] = torch.full((1,), value, device=self.device).to(dtype)
        return self._nans[dtype]

    def _slot_of(self, block: int) -> Slot:
        return next(slot for slot in self.slots if slot.holds == block)


@dataclass
class Sent:
    """Gradients of one block that are being copied to the host."""

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Each host parameter with its pinned gradient."""

    arrived: torch.Event = field(default_factory=torch.Event)
    """Recorded after the last copy."""


class GradientRelease:
    """Move gradients from the network to the parameters on the host.

    They are added there in their own dtype, as autograd would. On a device with streams
    they are copied on a separate stream. The host waits for a block's gradients two
    blocks later, and for the last ones at the end of the backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = copy_stream(device)
        self._in_flight: deque[Sent] = deque()
        self._watches = False

    def watch(self, parameter: nn.Parameter, host: nn.Parameter) -> None:
        """Accumulate the gradients of ``parameter`` in ``host`` from now on."""

        def release(parameter: Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            self._send(gradient, host)

        parameter.register_post_accumulate_grad_hook(release)
        self._watches = True

    def _send(self, gradient: Tensor, host: nn.Parameter) -> None:
        """Copy a gradient to the host, asynchronously if the device has streams."""
        if self._stream is None:
            _accumulate(host, gradient.to(host.device))
            return

        if not self._in_flight:
            self._in_flight.append(Sent())
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        staged = pinned(gradient.shape, gradient.dtype)
        with self._stream:
            staged.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
            sent = self._in_flight[-1]
            sent.gradients.append((host, staged))
            sent.arrived.record(self._stream)

    def forget(self) -> None:
        """Discard gradients in flight, which belong to an interrupted backward pass."""
        self._in_flight.clear()

    def next_block(self) -> None:
        """Begin another block's backward pass.

        All gradients but those of the last block have had time to arrive and are added.
        """
        if self._stream is not None and self._watches:
            self.settle(keep=1)
            self._in_flight.append(Sent())

    def settle(self, keep: int = 0) -> None:
        """Wait for gradients in flight and add them; skip the last ``keep`` blocks."""
        while len(self._in_flight) > keep:
            sent = self._in_flight.popleft()
            if sent.gradients:
                sent.arrived.synchronize()
            for host, staged in sent.gradients:
                # Clone to pageable memory: pinned memory is only for copies in flight.
                _accumulate(host, staged.clone())


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
