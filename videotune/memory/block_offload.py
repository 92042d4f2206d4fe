"""Blocks whose weights, or whose inputs, wait on the host: ``layer_offload_fraction`` and CPU_OFFLOADED are one mechanism.

A block of which something waits is computed as in gradient checkpointing: its graph keeps nothing, and when its backward
pass comes, its inputs and weights are fetched and it is computed again. The graph is autograd's own, node for node, so every
gradient is summed in the same order as without, and is the same to the bit.
"""

import inspect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from videotune.errors import VideotuneError
from videotune.memory.accelerator import copy_stream, overlaps
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF
from videotune.memory.device_buffers import DeviceBuffers
from videotune.memory.host_memory import refuse_if_short
from videotune.memory.host_weights import HostWeights, dense, pinned


class BlockOffload:
    """A network of which blocks wait on the host.

    ``streamed``: which blocks, by their number in the order of the paths. ``buffers``: their way to the device (None: no
    block is streamed). ``host_weights``: their weights. ``activation_offload``: where inputs wait (None: they do not).
    """

    def __init__(self, net: nn.Module, device: torch.device, streamed: Sequence[int]) -> None:
        self.net = net
        self.device = device
        self.streamed = tuple(streamed)
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
                    context_fn=lambda: (
                        self._window(place, turns=True),
                        self._window(place, again=True),
                    ),
                    **given.kwargs,
                )
            if offload is not None:
                offload.returned(out)
            return out

        block.forward = forward

    def _window(
        self, place: int | None, turns: bool = False, again: bool = False
    ) -> AbstractContextManager[None]:
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
) -> BlockOffload:
    """Move a network to the device, but for the weights of this ``fraction`` of its blocks, which stay on the host.

    ``checkpointing`` (OFF, ON or CPU_OFFLOADED) is what the other blocks do; streamed ones are always computed again.
    ``net`` lies on the CPU, mapped from its files at best, with what trains in it; ``paths`` are module paths of lists of
    blocks. ``resident`` (an adapter's parameters) stay on the device, as does what stands in several places of the network.
    Weights that train have gradients and updates on the host: see ``BlockOffload.parameters``. ``host_weights``: of another
    network of this shape, in place of this one's. ``echo`` is told what could not be done as it should.

    Raises VideotuneError where the host has no room, or a block cannot be streamed.
    """
    blocks = [
        (f"{path}.{name}", block)
        for path in paths
        for name, block in net.get_submodule(path).named_children()
    ]
    chosen = spread(len(blocks), fraction)
    streams = BlockOffload(net, device, chosen)
    if checkpointing == CPU_OFFLOADED:
        streams.activation_offload = ActivationOffload(device)
    if chosen:
        alone = _alone(net, resident)
        named = [_streamable(*blocks[i], alone) for i in chosen]
        if host_weights is None:
            host_weights = HostWeights(named, overlaps(device), echo)
            what = f"layer_offload_fraction: {len(chosen)} of {len(blocks)} blocks on the host"
            refuse_if_short(host_weights.size, what)
        _move_in(streams, host_weights, named)
    streamed = (
        {id(tensor) for tensors in streams.buffers.tensors for tensor in tensors}
        if streams.buffers
        else set()
    )
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
    places = (
        x
        for module in net.modules()
        for x in (*module._parameters.values(), *module._buffers.values())
    )
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
        raise VideotuneError(
            f"layer_offload_fraction: {path} has no weights of its own to stream: set it to 0"
        )
    return found


def _move_in(
    streams: BlockOffload, host_weights: HostWeights, named: Sequence[Mapping[str, Tensor]]
) -> None:
    """Move the weights to the host, block by block, so that none is there twice, and make their device buffers."""
    found = [[(entry.name, entry.shape) for entry in entries] for entries in host_weights.slots]
    wanted = [
        [(name, tuple(tensor.shape)) for name, tensor in block.items()] for block in named
    ]
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


AHEAD = 2
"""Blocks whose inputs are on their way to the host, or back from it, at a time: the device holds those of no others."""


@dataclass
class HostBuffer:
    """Bytes on the host, pinned where copies overlap. ``read``: behind the last copy from it; nothing is written before."""

    flat: Tensor
    read: torch.Event | None = None


@dataclass(eq=False)
class Offloaded:
    """A tensor on the host, which autograd keeps in place of the one on the device, and its copy back while that is wanted.

    ``blocks``: what each block of the pass has on the host; this tensor is of number ``block``. Events: behind either copy.
    """

    host: Tensor
    buffer: HostBuffer
    blocks: "list[list[ref[Offloaded]]]"
    block: int
    sent: torch.Event = field(default_factory=torch.Event)
    device: Tensor | None = None
    back: torch.Event | None = None


class ActivationOffload:
    """Offloads a block's first tensor and what the block before it returned; what all blocks share stays on the device.

    On a device with streams each direction has one, ordered by events, and the host waits for nothing. The tensor on the
    device is kept until its copy is done: the compute stream waits where more than ``AHEAD`` blocks' tensors are being
    copied. In the backward pass the next block's inputs are fetched while a block computes. A host buffer is used again
    as soon as no graph refers to it. ``bytes``: copied to the host so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._out = copy_stream(device)
        self._in = copy_stream(device)
        self._returned: list[ref[Tensor]] = []
        self._blocks: list[list[ref[Offloaded]]] = []
        self._free: list[HostBuffer] = []
        self._leaving: deque[tuple[int, Tensor, torch.Event]] = deque()
        self._coming: list[Tensor] = []

    def begin(self) -> None:
        """Before a forward pass of the network: what another one has left, which may have been broken off, is over."""
        if self._out is not None and self._in is not None:
            now = torch.accelerator.current_stream(self.device)
            now.wait_stream(self._out)
            now.wait_stream(self._in)
        self._leaving.clear()
        self._coming.clear()
        self._returned = []
        self._blocks = []

    def returned(self, out: Any) -> None:
        """A block has returned this."""
        self._returned = [
            ref(x)
            for x in (out if isinstance(out, Sequence) else [out])
            if isinstance(x, Tensor)
        ]

    def hooks(self, arguments: Iterable[Any]) -> saved_tensors_hooks:
        """While a checkpoint saves these arguments of a block, those that go from block to block are offloaded."""
        self._blocks.append([])
        self._let_go(len(self._blocks) - AHEAD)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        blocks = self._blocks
        goes = {
            _bytes_of(x)
            for i, x in enumerate(tensors)
            if (i == 0 or any(known() is x for known in self._returned))
            and x.is_floating_point()
            and dense(x)
        }  # by what they are: a checkpoint may save other tensors too, in any order
        return saved_tensors_hooks(
            lambda x: self._offload(x, blocks) if _bytes_of(x) in goes else x, self._fetch
        )

    def _let_go(self, block: int) -> None:
        """Keep no tensor of the blocks before this one any longer; computation waits until their copies are done."""
        while self._leaving and self._leaving[0][0] < block:
            torch.accelerator.current_stream(self.device).wait_event(self._leaving[0][2])
            self._leaving.popleft()

    def _offload(self, x: Tensor, blocks: list[list[ref[Offloaded]]]) -> Offloaded:
        x = x.detach()
        number = len(blocks) - 1
        buffer = self._take(x.nbytes)
        # strides too: kernels may go by them
        host = buffer.flat[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())
        waiting = Offloaded(host, buffer, blocks, number)
        blocks[number].append(ref(waiting))
        finalize(waiting, self._free.append, buffer).atexit = False
        self.bytes += x.nbytes
        if self._out is None:
            waiting.host.copy_(x)
            return waiting
        self._out.wait_stream(torch.accelerator.current_stream(self.device))
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
        with self._out:
            waiting.host.copy_(x, non_blocking=True)
        waiting.sent = self._out.record_event()
        self._leaving.append((number, x, waiting.sent))
        return waiting

    def _take(self, size: int) -> HostBuffer:
        """The smallest free buffer of so many bytes; where there is none a new one, in place of one that is too small."""
        fit = [i for i, one in enumerate(self._free) if one.flat.nbytes >= size]
        if fit:
            return self._free.pop(min(fit, key=lambda i: self._free[i].flat.nbytes))
        if self._free:
            self._free.pop()
        make = torch.empty if self._out is None else pinned
        return HostBuffer(make((size,), dtype=torch.uint8))

    def _fetch(self, waiting: Offloaded | Tensor) -> Tensor:
        if isinstance(waiting, Tensor):
            return waiting
        if self._in is None:
            return waiting.host.to(self.device, copy=True)
        self._let_go(len(waiting.blocks))
        if waiting.device is None:
            self._start(waiting)
        for known in (
            *waiting.blocks[waiting.block],
            *waiting.blocks[max(waiting.block - AHEAD + 1, 0)],
        ):
            other = known()
            if other is not None and other.back is None:
                self._start(other)
        assert waiting.back is not None
        assert waiting.device is not None
        torch.accelerator.current_stream(self.device).wait_event(waiting.back)
        found = waiting.device  # whoever asked keeps it
        waiting.device = None
        self._coming = [one for one in self._coming if one is not found]
        return found

    def _start(self, waiting: Offloaded) -> None:
        """Start a tensor back to the device."""
        assert self._in is not None
        host = waiting.host
        waiting.device = torch.empty_strided(
            host.shape, host.stride(), dtype=host.dtype, device=self.device
        )
        # kept until the copy is done, also where the graph is deleted before
        self._coming.append(waiting.device)
        self._in.wait_stream(
            torch.accelerator.current_stream(self.device)
        )  # its memory may be in use until then
        self._in.wait_event(waiting.sent)
        with self._in:
            waiting.device.copy_(host, non_blocking=True)
        waiting.back = waiting.buffer.read = self._in.record_event()


def _bytes_of(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Which bytes a tensor shows, and how: equal for a tensor and what autograd makes of it to keep it."""
    return x.data_ptr(), tuple(x.shape), x.stride()
