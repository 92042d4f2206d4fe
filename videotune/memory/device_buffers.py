"""A few places on the device through which the weights of streamed blocks pass, each in time for its block.

Gradients of streamed weights that train go the other way, as soon as their block's backward pass has made them.
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
"""The versions of torch whose internal names, such as the engine's callbacks below, were checked."""


def refuse_other_torch(version: str) -> None:
    """Raises VideotuneError for a version that was not checked, where a step might silently be another."""
    if version.rsplit(".", 1)[0] not in TORCH:
        raise VideotuneError(
            f"torch {version}: videotune takes {' or '.join(TORCH)}: pip install 'torch==2.13.*'"
        )


refuse_other_torch(torch.__version__.partition("+")[0])

SLOTS = 2
"""Places on the device: one block computes, the next one arrives."""


@dataclass
class Slot:
    """A place on the device. ``holds`` the block whose weights are there or on their way; None: nothing of use.

    Where copies overlap, ``loaded`` is behind the copy that fills it, ``free`` behind the last computation that read it.
    """

    flat: Tensor
    holds: int | None = None
    loaded: torch.Event = field(default_factory=torch.Event)
    free: torch.Event = field(default_factory=torch.Event)


class DeviceBuffers:
    """Slots, and the tensors of each streamed block, which point into a slot while their block computes.

    At all other times they point at a single NaN, so that a weight that is read outside its window cannot go unnoticed.
    Weights go from the host to the device and never back. On a device with streams they have one of their own, ordered by
    events: the host waits for nothing. What the last pass has left in the slots is used by the next one, which turns round
    at its end.
    """

    def __init__(
        self,
        host_weights: HostWeights,
        tensors: Sequence[Sequence[Tensor]],
        device: torch.device,
    ) -> None:
        self.host_weights = host_weights
        self.tensors = tensors
        self.device = device
        self.loads = 0
        self.gradient_release = GradientRelease(device)
        self._bound: dict[
            int, list[int]
        ] = {}  # block -> versions of its tensors when its window began
        self._open: int | None = None
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._stream = copy_stream(device)
        size = max(end - begin for begin, end in host_weights.spans)
        count = min(SLOTS, len(host_weights.spans))
        self.slots = [
            Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(count)
        ]
        if self._stream is not None:
            # its memory may have been another's until now
            self._stream.wait_stream(torch.accelerator.current_stream(device))
            for slot in self.slots:
                slot.flat.record_stream(self._stream)

    def pairs(self, block: int) -> Iterator[tuple[Tensor, HostSlot]]:
        """The tensors of a block, each with its place on the host."""
        return zip(self.tensors[block], self.host_weights.slots[block], strict=True)

    def begin(self) -> None:
        """Before a forward pass of the network: no window is open, and what an optimizer may have changed is forgotten."""
        self.rest()
        self.gradient_release.forget()
        if self.host_weights.trains:
            for slot in self.slots:
                slot.holds = None

    @contextmanager
    def forward(self, block: int, turns: bool) -> Iterator[None]:
        """The weights of a block are there. ``turns``: a backward pass follows; else another forward pass may."""
        count = len(self.tensors)
        ahead = range(block, block + len(self.slots))
        ends = turns or self.host_weights.trains
        self._bind(
            block, [i for i in ahead if i < count] if ends else [i % count for i in ahead]
        )
        try:
            yield
        finally:
            self._release(block)

    @contextmanager
    def backward(self, block: int) -> Iterator[None]:
        """The weights of a block are there from now on, until another block's are needed or ``rest`` is called.

        What is computed again within keeps views of them, which the block's backward pass reads behind it. It is over when
        the next block begins: autograd runs what was computed last first.
        """
        if self._open is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self.rest()
        self.gradient_release.next_block()
        self._bind(block, [i for i in range(block, block - len(self.slots), -1) if i >= 0])
        self._open = block
        yield

    def _end(self) -> None:
        """A backward pass is over."""
        self.rest()
        self.gradient_release.settle()

    def rest(self) -> None:
        """Close the window that a backward pass has left open."""
        if self._open is not None:
            block = self._open
            self._open = None
            self._release(block)

    def _bind(self, block: int, wanted: Sequence[int]) -> None:
        """Point the block's tensors at its slot; ``wanted``: it, and what will be needed after it, in this order."""
        for other in wanted:
            self._load(other, wanted)
        slot = self._slot_of(block)
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_event(slot.loaded)
        begin = self.host_weights.spans[block][0]
        for tensor, entry in self.pairs(block):
            tensor.data = entry.view(slot.flat, entry.begin - begin)
        self._bound[block] = [tensor._version for tensor in self.tensors[block]]

    def _load(self, block: int, wanted: Sequence[int]) -> None:
        """Start a block's way to the device, unless it is there, or every slot has something that is wanted sooner."""
        if any(slot.holds == block for slot in self.slots):
            return
        slot = next(
            (s for s in self.slots if s.holds not in self._bound and s.holds not in wanted),
            None,
        )
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

    def _copy(self, block: int, slot: Slot) -> None:
        begin, end = self.host_weights.spans[block]
        parts = self.host_weights.parts(begin, end)
        for part, values in zip(
            parts, slot.flat[: end - begin].split([len(part) for part in parts]), strict=True
        ):
            values.copy_(part, non_blocking=self._stream is not None)

    def _release(self, block: int) -> None:
        now = zip(self.pairs(block), self._bound.pop(block), strict=True)
        changed = [entry.name for (tensor, entry), version in now if tensor._version != version]
        self.unbind(block)
        slot = self._slot_of(block)
        if self._stream is not None:
            slot.free.record(torch.accelerator.current_stream(self.device))
        if changed:
            raise VideotuneError(
                f"layer_offload_fraction: {changed[0]} is changed by its own block while it computes, which would be lost "
                "with the weights: set it to 0"
            )

    def unbind(self, block: int) -> None:
        """Point a block's tensors at a single NaN each, in their own shapes."""
        for tensor, entry in self.pairs(block):
            tensor.data = self._nan(entry.dtype).expand(entry.shape)

    def _nan(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._nothing:
            value = float("nan") if dtype.is_floating_point or dtype.is_complex else True
            self._nothing[dtype] = torch.full((1,), value, device=self.device).to(dtype)
        return self._nothing[dtype]

    def _slot_of(self, block: int) -> Slot:
        return next(slot for slot in self.slots if slot.holds == block)


@dataclass
class Sent:
    """Gradients on their way to the host; ``arrived`` is behind the last of them."""

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    arrived: torch.Event = field(default_factory=torch.Event)


class GradientRelease:
    """Adds the network's gradients to those of the parameters on the host, in their own dtype, as autograd would.

    On a device with streams they are copied on one of their own; the host waits for a block's while the next one but one
    computes, and for the last ones at the end of the backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = copy_stream(device)
        self._under_way: deque[Sent] = deque()
        self._watches = False

    def watch(self, parameter: nn.Parameter, host: nn.Parameter) -> None:
        """From now on what autograd accumulates for the one is the other's gradient."""

        def release(parameter: Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            if self._stream is None:
                _add(host, gradient.to(host.device))
                return
            if not self._under_way:
                self._under_way.append(Sent())
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
            staged = pinned(gradient.shape, gradient.dtype)
            with self._stream:
                staged.copy_(gradient, non_blocking=True)
                gradient.record_stream(self._stream)
                sent = self._under_way[-1]
                sent.gradients.append((host, staged))
                sent.arrived.record(self._stream)

        parameter.register_post_accumulate_grad_hook(release)
        self._watches = True

    def forget(self) -> None:
        """What is still under way is of a backward pass that was broken off."""
        self._under_way.clear()

    def next_block(self) -> None:
        """Another block's backward pass begins: those before the last one have had time to arrive."""
        if self._stream is not None and self._watches:
            self.settle(keep=1)
            self._under_way.append(Sent())

    def settle(self, keep: int = 0) -> None:
        """Every gradient has arrived, but for those of so many blocks."""
        while len(self._under_way) > keep:
            sent = self._under_way.popleft()
            if sent.gradients:
                sent.arrived.synchronize()
            for host, staged in sent.gradients:
                _add(host, staged.clone())  # pageable: pinned memory is for what is under way


def _add(host: nn.Parameter, gradient: Tensor) -> None:
    if host.grad is None:
        host.grad = gradient
    else:
        host.grad.add_(gradient)
