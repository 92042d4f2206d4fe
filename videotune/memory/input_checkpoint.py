"""Gradient checkpointing that keeps only a block's inputs, without hooks.

``torch.utils.checkpoint`` records the block's whole graph and calls two Python
functions for each tensor in it. Here the first pass records nothing: the block is one
node of the graph. Its backward pass computes the block again, and then the gradients
within it.

The gradients are those of ``torch.utils.checkpoint`` to the bit, if no gradient enters
the blocks from outside. A tensor that several blocks read (text, time) would get one
sum from each block, where autograd adds the parts of all blocks one by one. Such passes
go through ``torch.utils.checkpoint``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.random import fork_rng
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from videotune.memory.part_checkpoint import computing_again

Checkpoint = Callable[..., Any]
"""What diffusers calls with a block and its arguments."""


@dataclass(frozen=True)
class BlockContexts:
    """What is around a block while it computes, such as its weights on the device."""

    first: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for the first time."""
    again: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for the time in the backward pass, which ends after that."""


class InputCheckpoint:
    """Call the blocks of one network so that only their inputs are kept."""

    def __init__(self, *, draws: bool = True) -> None:
        """``draws``: whether blocks draw random numbers."""
        self._draws = draws
        self._called: set[int] = set()
        """Ids of the blocks of this forward pass."""

        self._exact: dict[type[nn.Module], bool] = {}
        """Whether the gradients of a class of blocks are exact here, in this pass."""

        self._returned: list[ref[Tensor]] = []
        """Tensors that the last block returned."""

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Return the block's output; without gradients, just call the block."""
        return self.run(block, block, args, BlockContexts())

    def run(
        self,
        block: nn.Module,
        compute: Callable[..., Any],
        args: Sequence[Any],
        contexts: BlockContexts,
    ) -> Any:
        """Return a block's output.

        Args:
            block: the block.
            compute: what computes it; the block itself, if nothing wraps it.
            args: its arguments.
            contexts: what must be around it while it computes.
        """
        leaves, spec = tree_flatten(tuple(args))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with_gradient = [tensor for tensor in tensors if tensor.requires_grad]

        if not self._is_exact(block, tensors, with_gradient):
            output = checkpoint(
                compute,
                *args,
                use_reentrant=False,
                preserve_rng_state=self._draws,
                context_fn=lambda: (contexts.first(), contexts.again()),
            )
        elif with_gradient or _trains(block):
            call = _Call(compute, contexts, spec, leaves, draws=self._draws)
            output = call.outputs(tensors, needs_anchor=not with_gradient)
        else:
            with contexts.first():
                output = compute(*args)

        returned = tree_flatten(output)[0]
        self._returned = [ref(leaf) for leaf in returned if isinstance(leaf, Tensor)]
        return output

    def _is_exact(
        self,
        block: nn.Module,
        tensors: Sequence[Tensor],
        with_gradient: Sequence[Tensor],
    ) -> bool:
        """Return whether a block's gradients would be summed as autograd does.

        Only the first block of each class is looked at; its answer is that of all later ones
        in this pass. With a LoRA and frozen weights it is always yes: the first block gets
        nothing with a gradient, a later one only what the block before it returned.

        What the first block of a class gets with a gradient must be its first tensor, or
        what the block before it returned if its arguments begin with that: other tensors
        are read by several blocks.

        The very first block of the pass must get nothing with a gradient: no block has
        returned anything yet, so it would come from outside, where others may read it.
        """
        # A block that is called again begins another pass.
        if id(block) in self._called:
            self._called.clear()
            self._exact.clear()
        is_first_of_all = not self._called
        self._called.add(id(block))

        kind = type(block)
        if is_first_of_all:
            self._exact[kind] = not with_gradient
        elif kind not in self._exact:
            passed_on = tensors[:1]
            if self._begin_with_returned(tensors):
                passed_on = tensors[: len(self._returned)]
            passed_ids = {id(tensor) for tensor in passed_on}
            self._exact[kind] = all(id(x) in passed_ids for x in with_gradient)
        return self._exact[kind]

    def _begin_with_returned(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the arguments begin with what the last block returned."""
        pairs = zip(self._returned, tensors, strict=False)
        return all(returned() is tensor for returned, tensor in pairs)


def _trains(block: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in block.parameters())


class _Call:
    """A block's call with all but the tensors among its arguments."""

    def __init__(
        self,
        compute_block: Callable[..., Any],
        contexts: BlockContexts,
        spec: TreeSpec,
        leaves: list[Any],
        *,
        draws: bool,
    ) -> None:
        self._compute_block = compute_block
        self._contexts = contexts
        self._spec = spec
        # The graph keeps the tensors: here each leaves a gap.
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._draws = draws
        self._surroundings: _Surroundings | None = None
        self._output_spec: TreeSpec | None = None

    def outputs(self, tensors: Sequence[Tensor], *, needs_anchor: bool) -> Any:
        """Return what the block returns, as outputs of one node of the graph."""
        # A node without an input that has a gradient would not be recorded.
        anchor = None
        if needs_anchor:
            anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
        outputs = _InputsOnly.apply(self, anchor, *tensors)
        assert self._output_spec is not None
        return tree_unflatten(outputs, self._output_spec)

    def first(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Compute the block and return its outputs in a row."""
        self._surroundings = _Surroundings.now(tensors, draws=self._draws)
        with self._contexts.first():
            outputs, self._output_spec = tree_flatten(self._compute(tensors))
        return tuple(outputs)

    def again(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Compute the block as the first time, but with a graph."""
        assert self._surroundings is not None
        with (
            self._contexts.again(),
            self._surroundings.restored(),
            torch.enable_grad(),
            computing_again(),
        ):
            return tree_flatten(self._compute(tensors))[0]

    def _compute(self, tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        leaves = []
        for is_tensor, other in zip(self._is_tensor, self._others, strict=True):
            leaves.append(next(remaining) if is_tensor else other)
        return self._compute_block(*tree_unflatten(leaves, self._spec))


class _InputsOnly(torch.autograd.Function):
    """A block as one node: forward records no graph, backward computes it again."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, _anchor: Tensor | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return call.first(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = []
        needs_gradient = ctx.needs_input_grad[2:]
        for tensor, needed in zip(ctx.saved_tensors, needs_gradient, strict=True):
            inputs.append(tensor.detach().requires_grad_() if needed else tensor)

        # Edges of the graph in place of the outputs, whose memory is free from here on.
        edges = []
        edge_gradients = []
        outputs = ctx.call.again(inputs)
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                edges.append(get_gradient_edge(output))
                edge_gradients.append(gradient)
        del outputs, output, gradient

        # The weights' gradients are added up where autograd has them, with their hooks.
        torch.autograd.backward(edges, edge_gradients)
        input_gradients = []
        for tensor, needed in zip(inputs, needs_gradient, strict=True):
            input_gradients.append(tensor.grad if needed else None)
        return (None, None, *input_gradients)


@dataclass(frozen=True)
class _Surroundings:
    """What a block's result depends on beside its arguments: the states of the random
    generators and autocast.
    """

    device_type: str
    cpu_state: Tensor | None
    """None: blocks draw nothing."""
    devices: list[int]
    device_states: list[Tensor]
    autocasts: list[tuple[str, torch.dtype, bool]]
    """Device type, dtype and whether autocast is on."""
    autocast_cache: bool

    @staticmethod
    def now(tensors: Sequence[Tensor], *, draws: bool) -> "_Surroundings":
        """Return the present state."""
        device_type = tensors[0].device.type
        devices: list[int] = []
        device_states: list[Tensor] = []
        if draws and device_type != "cpu" and _initialized(device_type):
            devices, device_states = get_device_states(*tensors)

        autocasts = []
        for kind in dict.fromkeys((device_type, "cpu")):
            if torch.amp.is_autocast_available(kind):
                dtype = torch.get_autocast_dtype(kind)
                autocasts.append((kind, dtype, torch.is_autocast_enabled(kind)))
        return _Surroundings(
            device_type=device_type,
            cpu_state=torch.get_rng_state() if draws else None,
            devices=devices,
            device_states=device_states,
            autocasts=autocasts,
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    def restored(self) -> ExitStack:
        """Return a context in which the state is that of before."""
        stack = ExitStack()
        if self.cpu_state is not None:
            # It restores the states of these devices and of the CPU at its end.
            kind = self.device_type
            stack.enter_context(fork_rng(devices=self.devices, device_type=kind))
            torch.set_rng_state(self.cpu_state)
            if self.devices:
                set_device_states(self.devices, self.device_states, device_type=kind)

        for device_type, dtype, enabled in self.autocasts:
            autocast = torch.amp.autocast(
                device_type, dtype, enabled, cache_enabled=self.autocast_cache
            )
            stack.enter_context(autocast)
        return stack


def _initialized(device_type: str) -> bool:
    """Return whether a device type is in use: it may be that of fake tensors."""
    return bool(getattr(torch.get_device_module(device_type), "_initialized", True))
