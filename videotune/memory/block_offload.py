"""Stream the weights of some blocks from the host (``layer_offload_fraction``).

The same wrapper of a block also offloads its inputs (checkpointing CPU_OFFLOADED, see
``activation_offload``). A wrapped block is computed as in gradient checkpointing: its
graph saves only the inputs. In the backward pass the inputs and weights are fetched and
the block is recomputed. The graph is autograd's own, node for node, so every gradient
is summed in the same order as without offloading and is bitwise equal. (With IN_PARTS the
block is one node, see ``input_checkpoint``.)
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from videotune.errors import VideotuneError
from videotune.memory.accelerator import has_streams
from videotune.memory.activation_offload import ActivationOffload
from videotune.memory.checkpointing import (
    IN_PARTS,
    INPUTS_ON_HOST,
    OFF,
    part_arguments,
)
from videotune.memory.device_buffers import DeviceBuffers
from videotune.memory.host_memory import refuse_if_short
from videotune.memory.host_weights import HostWeights, dense
from videotune.memory.input_checkpoint import BlockContexts, InputCheckpoint
from videotune.memory.part_checkpoint import compute_in_parts


class BlockOffload:
    """A network whose blocks keep weights or inputs on the host."""

    def __init__(
        self, net: nn.Module, device: torch.device, streamed: Sequence[int]
    ) -> None:
        self.net = net
        self.device = device

        self.streamed = tuple(streamed)
        """Indices of the streamed blocks, counted over all lists of blocks."""

        self.buffers: DeviceBuffers | None = None
        """The device memory that streamed weights pass through; None: no streaming."""

        self.host_weights: HostWeights | None = None
        """The streamed weights; None: no streaming."""

        self.activation_offload: ActivationOffload | None = None
        """Offloads the inputs of blocks; None: they stay on the device."""

        self.input_checkpoint: InputCheckpoint | None = None
        """Calls the blocks if they are computed again in parts. None: torch's checkpoint
        does, whose graph is autograd's own.
        """

    def parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimizer can update, by name.

        A streamed parameter is replaced by its counterpart on the host.
        """
        host_parameters: Mapping[str, nn.Parameter] = {}
        if self.host_weights is not None:
            host_parameters = self.host_weights.parameters
        return {
            name: host_parameters.get(name, parameter)
            for name, parameter in named.items()
        }

    def _begin(self, *_: Any) -> None:
        """Reset the buffers before each forward pass of the network."""
        if self.buffers is not None:
            self.buffers.begin()
        if self.activation_offload is not None:
            self.activation_offload.begin()

    def _wrap(self, block: nn.Module, index: int | None) -> None:
        """Replace a block's forward by one that fetches its weights and checkpoints it.

        Args:
            index: the block's index among the streamed ones; None: it is resident.
        """
        block_forward: Callable[..., Any] = block.forward
        signature = inspect.signature(block_forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Pass arguments by position: the inputs to offload are found by it.
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()

            if not torch.is_grad_enabled():
                with self._forward_context(index, backward_follows=False):
                    return block_forward(*bound.args, **bound.kwargs)

            compute = partial(block_forward, **bound.kwargs)
            offload = self.activation_offload
            with nullcontext() if offload is None else offload.hooks(bound.args):
                output = self._checkpointed(block, index, compute, bound.args)
            if offload is not None:
                offload.returned(output)
            return output

        block.forward = forward

    def _checkpointed(
        self,
        block: nn.Module,
        index: int | None,
        compute: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        """Compute a block so that its graph saves only the inputs."""
        contexts = BlockContexts(
            first=lambda: self._forward_context(index, backward_follows=True),
            again=lambda: self._backward_context(index),
        )
        if self.input_checkpoint is not None:
            return self.input_checkpoint.run(block, compute, args, contexts)
        return checkpoint(
            compute,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contexts.first(), contexts.again()),
        )

    def _forward_context(
        self, index: int | None, *, backward_follows: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which the block's weights are on the device."""
        if index is None or self.buffers is None:
            return nullcontext()
        return self.buffers.forward(index, backward_follows)

    def _backward_context(self, index: int | None) -> AbstractContextManager[None]:
        """Return a context for recomputing the block in the backward pass."""
        if index is None or self.buffers is None:
            return nullcontext()
        return self.buffers.backward(index)


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
    """Move a network to the device, except the weights of a fraction of its blocks.

    Those stay on the host and are streamed. Tensors that appear at several places of
    the network stay on the device. Weights that train have their gradients and updates
    on the host: see ``BlockOffload.parameters``.

    Args:
        net: the network on the CPU, preferably memory-mapped from its files, including
            the parameters that train.
        paths: module paths of the lists of blocks.
        device: where the network computes.
        fraction: share of the blocks to stream, 0 to 1.
        checkpointing: OFF, ON, CPU_OFFLOADED or IN_PARTS for the other blocks; streamed
            blocks are always recomputed.
        resident: parameters that stay on the device, such as those of an adapter.
        host_weights: weights to stream in place of this network's, from another network
            of the same shape.
        echo: receives warnings.

    Raises:
        DoesNotFit: if the host has too little free memory.
        VideotuneError: if a block cannot be streamed.
    """
    blocks: list[tuple[str, nn.Module]] = []
    for path in paths:
        for name, block in net.get_submodule(path).named_children():
            blocks.append((f"{path}.{name}", block))

    streamed_blocks = spread(len(blocks), fraction)
    offload = BlockOffload(net, device, streamed_blocks)
    if checkpointing in INPUTS_ON_HOST:
        offload.activation_offload = ActivationOffload(device)
    if checkpointing == IN_PARTS:
        compute_in_parts(net, paths, part_arguments())
        offload.input_checkpoint = InputCheckpoint()

    if streamed_blocks:
        movable = _movable_tensors(net, resident)
        block_tensors = [_streamable(*blocks[i], movable) for i in streamed_blocks]
        if host_weights is None:
            host_weights = HostWeights(block_tensors, has_streams(device), echo)
            count = f"{len(streamed_blocks)} of {len(blocks)} blocks"
            refuse_if_short(
                host_weights.size, f"layer_offload_fraction: {count} on the host"
            )
        _move_to_host(offload, host_weights, block_tensors)

    _move_to_device(offload)

    buffer_indices = {number: index for index, number in enumerate(streamed_blocks)}
    for number, (_, block) in enumerate(blocks):
        if number in buffer_indices or checkpointing != OFF:
            offload._wrap(block, buffer_indices.get(number))
    net.register_forward_pre_hook(offload._begin)
    owner = net.get_submodule(paths[0].rpartition(".")[0])
    if owner is not net:
        # It may run before the network itself, as text connectors do.
        owner.register_forward_pre_hook(offload._begin)
    return offload


def spread(count: int, fraction: float) -> list[int]:
    """Return the indices of the streamed blocks, spread evenly over all ``count``.

    Resident blocks between two streamed ones give the transfer time. At least one block
    is streamed unless the fraction is 0.
    """
    at_least = 1 if fraction and count else 0
    streamed = max(round(count * fraction), at_least)
    return [(2 * i + 1) * count // (2 * streamed) for i in range(streamed)]


def _movable_tensors(net: nn.Module, resident: Collection[nn.Parameter]) -> set[int]:
    """Return the ids of the tensors that appear once and may leave the device."""
    resident_ids = {id(parameter) for parameter in resident}

    uses: Counter[int] = Counter()
    for module in net.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                uses[id(tensor)] += 1

    return {
        tensor_id
        for tensor_id, count in uses.items()
        if count == 1 and tensor_id not in resident_ids
    }


def _streamable(
    path: str, block: nn.Module, movable: Collection[int]
) -> dict[str, Tensor]:
    """Return the tensors of a block to stream, by their names in the network."""
    tensors = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if id(tensor) not in movable or not dense(tensor):
            continue
        if type(tensor) not in (nn.Parameter, Tensor):
            raise VideotuneError(
                f"layer_offload_fraction: {path}.{name} is a {type(tensor).__name__}, "
                "whose bytes cannot be streamed. Set it to 0."
            )
        tensors[f"{path}.{name}"] = tensor

    if not tensors:
        raise VideotuneError(
            f"layer_offload_fraction: {path} has no weights to stream. Set it to 0."
        )
    return tensors


def _move_to_host(
    offload: BlockOffload,
    host_weights: HostWeights,
    block_tensors: Sequence[Mapping[str, Tensor]],
) -> None:
    """Move the streamed weights to the host and allocate their device buffers.

    Blocks move one by one, so that the host never has all weights twice.
    """
    for slots, named in zip(host_weights.slots, block_tensors, strict=True):
        stored_shapes = [(slot.name, slot.shape) for slot in slots]
        shapes = [(name, tuple(tensor.shape)) for name, tensor in named.items()]
        assert stored_shapes == shapes, "weights of another network"

    tensors = [list(named.values()) for named in block_tensors]
    offload.host_weights = host_weights
    offload.buffers = DeviceBuffers(host_weights, tensors, offload.device)

    for block in range(len(tensors)):
        if not host_weights.filled(block):
            for tensor, slot in offload.buffers.pairs(block):
                host_weights.store(slot, tensor)
        offload.buffers.unbind(block)

    for named in block_tensors:
        for name, tensor in named.items():
            if name in host_weights.parameters:
                assert isinstance(tensor, nn.Parameter)
                host_parameter = host_weights.parameters[name]
                offload.buffers.gradient_release.watch(tensor, host_parameter)


def _move_to_device(offload: BlockOffload) -> None:
    """Move every tensor that is not streamed to the device."""
    streamed_ids: set[int] = set()
    if offload.buffers is not None:
        for tensors in offload.buffers.tensors:
            streamed_ids.update(id(tensor) for tensor in tensors)

    for tensor in (*offload.net.parameters(), *offload.net.buffers()):
        if id(tensor) not in streamed_ids:
            tensor.data = tensor.data.to(offload.device)
