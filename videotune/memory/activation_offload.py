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
class Parked:
    """A tensor on the host, and its copy back on the device once that is asked for. Events: behind either copy."""

    host: Tensor
    group: Group
    sent: torch.cuda.Event | None = None
    device: Tensor | None = None
    back: torch.cuda.Event | None = None


@dataclass
class Group:
    """What one block has parked, and the block before it, whose inputs are wanted next in a backward pass."""

    before: Group | None
    entries: list[Parked] = field(default_factory=list)


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

    def hooks(self, words: Iterable[Any]) -> saved_tensors_hooks:
        """While a checkpoint saves these arguments of a block, those that go from block to block are parked."""
        group = self._last = Group(self._last)
        tensors = [word for word in words if isinstance(word, Tensor)]
        goes = iter([
            (i == 0 or any(known() is x for known in self._returned)) and x.is_floating_point() and dense(x)
            for i, x in enumerate(tensors)
        ])  # fmt: skip
        return saved_tensors_hooks(lambda x: self._park(x, group) if next(goes) else x, self._fetch)

    def _park(self, x: Tensor, group: Group) -> Parked:
        x = x.detach()
        host = torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=self._out is not None
        )  # strides too: kernels may go by them
        parked = Parked(host, group)
        group.entries.append(parked)
        self.bytes += host.numel() * host.element_size()
        if self._out is None:
            host.copy_(x)
            return parked
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(x, non_blocking=True)
            x.record_stream(self._out)  # its memory is no one else's before the copy is done
            parked.sent = torch.cuda.Event()
            parked.sent.record(self._out)
        return parked

    def _fetch(self, parked: Parked | Tensor) -> Tensor:
        if isinstance(parked, Tensor):
            return parked
        if self._in is None:
            return parked.host
        self._start(parked.group)
        if parked.group.before is not None:
            self._start(parked.group.before)
            parked.group.before = None
        assert parked.back is not None
        assert parked.device is not None
        torch.cuda.current_stream(self.device).wait_event(parked.back)
        return parked.device

    def _start(self, group: Group) -> None:
        """Start a block's inputs back to the device."""
        assert self._in is not None
        for parked in group.entries:
            if parked.device is None:
                host = parked.host
                parked.device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)
                self._in.wait_stream(torch.cuda.current_stream(self.device))  # its memory may be in use until then
                assert parked.sent is not None
                self._in.wait_event(parked.sent)
                with torch.cuda.stream(self._in):
                    parked.device.copy_(host, non_blocking=True)
                    parked.device.record_stream(self._in)
                    parked.back = torch.cuda.Event()
                    parked.back.record(self._in)
