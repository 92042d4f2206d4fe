"""Inputs of checkpointed blocks wait on the host for their backward pass (``gradient_checkpointing: CPU_OFFLOADED``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from videotune.memory.host_weights import dense


@dataclass
class Offloaded:
    """A tensor on the host, and its copy back on the device once that is asked for. Events: behind either copy."""

    host: Tensor
    group: Group
    sent: torch.cuda.Event | None = None
    device: Tensor | None = None
    back: torch.cuda.Event | None = None


@dataclass
class Group:
    """What one block has on the host, and the block before it, whose inputs are wanted next in a backward pass."""

    before: Group | None
    entries: list[Offloaded] = field(default_factory=list)


class ActivationOffload:
    """What goes from block to block waits on the host; what all blocks share (text, time, positions) stays where it is.

    That is a block's first tensor, and whatever the block before it has returned. On CUDA each way has a stream, ordered
    by events; on the way back the next block's inputs are fetched while a block computes. ``bytes``: sent so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        cuda = device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self._returned: list[ref[Tensor]] = []
        self._last: Group | None = None

    def begin(self) -> None:
        """Before a forward pass of the network."""
        self._returned, self._last = [], None

    def returned(self, out: Any) -> None:
        """A block has returned this."""
        self._returned = [ref(x) for x in (out if isinstance(out, Sequence) else [out]) if isinstance(x, Tensor)]

    def hooks(self, arguments: Iterable[Any]) -> saved_tensors_hooks:
        """While a checkpoint saves these arguments of a block, those that go from block to block are offloaded."""
        group = self._last = Group(self._last)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        goes = iter([
            (i == 0 or any(known() is x for known in self._returned)) and x.is_floating_point() and dense(x)
            for i, x in enumerate(tensors)
        ])  # fmt: skip
        return saved_tensors_hooks(lambda x: self._offload(x, group) if next(goes) else x, self._fetch)

    def _offload(self, x: Tensor, group: Group) -> Offloaded:
        x = x.detach()
        host = torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=self._out is not None
        )  # strides too: kernels may go by them
        waiting = Offloaded(host, group)
        group.entries.append(waiting)
        self.bytes += host.numel() * host.element_size()
        if self._out is None:
            host.copy_(x)
            return waiting
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(x, non_blocking=True)
            x.record_stream(self._out)  # its memory is no one else's before the copy is done
            waiting.sent = torch.cuda.Event()
            waiting.sent.record(self._out)
        return waiting

    def _fetch(self, waiting: Offloaded | Tensor) -> Tensor:
        if isinstance(waiting, Tensor):
            return waiting
        if self._in is None:
            return waiting.host
        self._start(waiting.group)
        if waiting.group.before is not None:
            self._start(waiting.group.before)
            waiting.group.before = None
        assert waiting.back is not None
        assert waiting.device is not None
        torch.cuda.current_stream(self.device).wait_event(waiting.back)
        return waiting.device

    def _start(self, group: Group) -> None:
        """Start a block's inputs back to the device."""
        assert self._in is not None
        for waiting in group.entries:
            if waiting.device is None:
                host = waiting.host
                waiting.device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)
                self._in.wait_stream(torch.cuda.current_stream(self.device))  # its memory may be in use until then
                assert waiting.sent is not None
                self._in.wait_event(waiting.sent)
                with torch.cuda.stream(self._in):
                    waiting.device.copy_(host, non_blocking=True)
                    waiting.device.record_stream(self._in)
                    waiting.back = torch.cuda.Event()
                    waiting.back.record(self._in)
