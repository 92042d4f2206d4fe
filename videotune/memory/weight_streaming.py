"""Blocks whose weights, or whose inputs, wait on the host: ``layer_offload_fraction`` and CPU_OFFLOADED are one mechanism.

A block of which something waits is computed as in gradient checkpointing: its graph keeps nothing, and when its backward
pass comes, its inputs and weights are fetched and it is computed again. The graph is autograd's own, node for node, so every
gradient is summed in the same order as without, and is the same to the bit.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from videotune.errors import VideotuneError
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF
from videotune.memory.device_buffers import DeviceBuffers
from videotune.memory.host_memory import refuse_if_short
from videotune.memory.host_weights import HostWeights, dense


class Streams:
    """A network of which blocks wait on the host.

    ``streamed``: which blocks, by their number in the order of the paths. ``buffers``: their way to the device (None: no
    block is streamed). ``host_weights``: their weights. ``activation_offload``: where inputs wait (None: they do not).
    """

    def __init__(self, net: nn.Module, device: torch.device, streamed: Sequence[int]) -> None:
        self.net, self.device, self.streamed = net, device, tuple(streamed)
        self.buffers: DeviceBuffers | None = None
        self.host_weights: HostWeights | None = None
        self.activation_offload: ActivationOffload | None = None

    def parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The network's parameters by name, streamed ones as they are on the host: what an optimizer can update."""
        on_host = self.host_weights.parameters if self.host_weights is not None else {}
        return {name: on_host.get(name, parameter) for name, parameter in named.items()}

    def _begin(self, *_: Any) -> None:
        """Before each forward pass of the network."""
        if self.buffers is not None:
            self.buffers.begin()
        if self.activation_offload is not None:
            self.activation_offload.begin()

    def _wrap(self, block: nn.Module, place: int | None) -> None:
        """Compute a block with its weights there, and again in the backward pass. ``place``: among the streamed ones."""
        own: Callable[..., Any] = block.forward
        signature = inspect.signature(own)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()  # arguments by position: inputs are found by it
            if not torch.is_grad_enabled():
                with self._window(place):
                    return own(*given.args, **given.kwargs)
            offload = self.activation_offload
            with nullcontext() if offload is None else offload.hooks(given.args):
                out = checkpoint(
                    own,
                    *given.args,
                    use_reentrant=False,
                    context_fn=lambda: (self._window(place, turns=True), self._window(place, again=True)),
                    **given.kwargs,
                )
            if offload is not None:
                offload.returned(out)
            return out

        block.forward = forward

    def _window(self, place: int | None, turns: bool = False, again: bool = False) -> AbstractContextManager[None]:
        if place is None or self.buffers is None:
            return nullcontext()
        return self.buffers.backward(place) if again else self.buffers.forward(place, turns)


def stream_blocks(
    net: nn.Module,
    paths: Sequence[str],
    device: torch.device,
    fraction: float,
    checkpointing: str = OFF,
    resident: Collection[nn.Parameter] = (),
    host_weights: HostWeights | None = None,
    echo: Callable[[str], None] = print,
) -> Streams:
    """Move a network to the device, but for the weights of this ``fraction`` of its blocks, which stay on the host.

    ``checkpointing`` (OFF, ON or CPU_OFFLOADED) is what the other blocks do; streamed ones are always computed again.
    ``net`` lies on the CPU, mapped from its files at best, with what trains in it; ``paths`` are module paths of lists of
    blocks. ``resident`` (an adapter's parameters) stay on the device, as does what stands in several places of the network.
    Weights that train have gradients and updates on the host: see ``Streams.parameters``. ``host_weights``: of another
    network of this shape, in place of this one's. ``echo`` is told what could not be done as it should.

    Raises VideotuneError where the host has no room, or a block cannot be streamed.
    """
    blocks = [(f"{path}.{name}", block) for path in paths for name, block in net.get_submodule(path).named_children()]
    chosen = spread(len(blocks), fraction)
    streams = Streams(net, device, chosen)
    if checkpointing == CPU_OFFLOADED:
        streams.activation_offload = ActivationOffload(device)
    if chosen:
        alone = _alone(net, resident)
        named = [_streamable(*blocks[i], alone) for i in chosen]
        if host_weights is None:
            host_weights = HostWeights(named, device.type == "cuda", echo)
            what = f"layer_offload_fraction: {len(chosen)} of {len(blocks)} blocks on the host"
            refuse_if_short(host_weights.size, what)
        _move_in(streams, host_weights, named)
    streamed = {id(tensor) for tensors in streams.buffers.tensors for tensor in tensors} if streams.buffers else set()
    for tensor in (*net.parameters(), *net.buffers()):
        if id(tensor) not in streamed:
            tensor.data = tensor.data.to(device)
    places = {number: place for place, number in enumerate(chosen)}
    for number, (_, block) in enumerate(blocks):
        if number in places or checkpointing != OFF:
            streams._wrap(block, places.get(number))
    net.register_forward_pre_hook(streams._begin)
    return streams


def spread(count: int, fraction: float) -> list[int]:
    """Which of ``count`` blocks are streamed: this share of them, evenly among the others, and at least one where it is
    not 0. Between two of them, resident ones give the link time."""
    chosen = max(round(count * fraction), 1 if fraction and count else 0)
    return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]


def _alone(net: nn.Module, resident: Collection[nn.Parameter]) -> set[int]:
    """The tensors, by identity, that stand in one place of the network and may leave the device."""
    kept = {id(parameter) for parameter in resident}
    places = (x for module in net.modules() for x in (*module._parameters.values(), *module._buffers.values()))
    seen = Counter(id(tensor) for tensor in places if tensor is not None)
    return {name for name, times in seen.items() if times == 1 and name not in kept}


def _streamable(path: str, block: nn.Module, alone: Collection[int]) -> dict[str, Tensor]:
    """A block's tensors that are streamed, by their names in the network."""
    found = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if id(tensor) in alone and dense(tensor):
            if type(tensor) not in (nn.Parameter, Tensor):
                raise VideotuneError(
                    f"layer_offload_fraction: {path}.{name} is a {type(tensor).__name__}, whose bytes cannot be streamed: "
                    "set it to 0"
                )
            found[f"{path}.{name}"] = tensor
    if not found:
        raise VideotuneError(f"layer_offload_fraction: {path} has no weights of its own to stream: set it to 0")
    return found


def _move_in(streams: Streams, host_weights: HostWeights, named: Sequence[Mapping[str, Tensor]]) -> None:
    """Move the weights to the host, block by block, so that none is there twice, and make their device buffers."""
    found = [[(entry.name, entry.shape) for entry in entries] for entries in host_weights.slots]
    wanted = [[(name, tuple(tensor.shape)) for name, tensor in block.items()] for block in named]
    assert found == wanted, "weights of another network"
    tensors = [list(block.values()) for block in named]
    streams.host_weights = host_weights
    streams.buffers = DeviceBuffers(host_weights, tensors, streams.device)
    for place in range(len(tensors)):
        if not host_weights.filled(place):
            for tensor, entry in streams.buffers.pairs(place):
                host_weights.store(entry, tensor)
        streams.buffers.unbind(place)
    for name, tensor in ((name, tensor) for block in named for name, tensor in block.items()):
        if name in host_weights.parameters:
            assert isinstance(tensor, nn.Parameter)
            streams.buffers.gradient_release.watch(tensor, host_weights.parameters[name])


@dataclass
class Offloaded:
    """A tensor on the host, and its copy back on the device once that is asked for. Events: behind either copy."""

    host: Tensor
    group: "Group"
    sent: torch.cuda.Event | None = None
    device: Tensor | None = None
    back: torch.cuda.Event | None = None


@dataclass
class Group:
    """What one block has on the host, and the block before it, whose inputs are wanted next in a backward pass."""

    before: "Group | None"
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
        pinned = self._out is not None
        # strides too: kernels may go by them
        host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=pinned)
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
