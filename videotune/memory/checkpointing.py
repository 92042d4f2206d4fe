"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from videotune.memory.input_checkpoint import InputCheckpoint
from videotune.memory.part_checkpoint import compute_in_parts, compute_whole

OFF = "OFF"
"""Save all activations."""

ON = "ON"
"""Save only the input of each block."""

ATTENTION_SAVED = "ATTENTION_SAVED"
"""Save the input of each block and what attention returns, which is not computed again."""

CPU_OFFLOADED = "CPU_OFFLOADED"
"""Save the input of each block on the host, see ``activation_offload``."""

IN_PARTS = "IN_PARTS"
"""Save the input of each block on the host, and compute a block again part by part, see
``part_checkpoint``."""

INPUTS_ON_HOST = (CPU_OFFLOADED, IN_PARTS)
"""Modes in which the inputs of blocks wait on the host."""


def checkpoint_blocks(
    net: Any,
    mode: str,
    paths: Sequence[str] = (),
    *,
    draws: bool = True,
    whole_graph: bool = False,
) -> None:
    """Set a diffusers model to a mode of checkpointing. Saved tensors stay on the device,
    and the computed values do not change.

    Args:
        net: the model.
        mode: OFF, ON, ATTENTION_SAVED, or IN_PARTS with the inputs on the device.
        paths: module paths of the lists of blocks, for IN_PARTS, also to undo it.
        draws: whether blocks draw random numbers, which must be the same when a block is
            computed again. A CUDA graph cannot ask a generator for its state.
        whole_graph: with ON, record the graph of each block, as ``torch.utils.checkpoint`` does,
            which is slower. Compiled blocks need it: without gradients they would run
            uncompiled. So do sharded blocks, whose weights are gathered by the graph.
    """
    assert mode in (OFF, ON, ATTENTION_SAVED, IN_PARTS), mode
    compute_whole(net, paths)
    if mode == OFF:
        net.disable_gradient_checkpointing()
        return
    if mode == IN_PARTS:
        # Under torch's checkpoint, what parts save would stay from the first pass on.
        assert not whole_graph, "in parts there is no graph of a whole block"
        compute_in_parts(net, paths, part_arguments(draws=draws))
        net.enable_gradient_checkpointing(InputCheckpoint(draws=draws))
        return
    if mode == ON and not whole_graph:
        net.enable_gradient_checkpointing(InputCheckpoint(draws=draws))
        return
    arguments = checkpoint_arguments(mode, draws=draws)
    net.enable_gradient_checkpointing(partial(checkpoint, **arguments))


def checkpoint_arguments(mode: str, *, draws: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of torch's checkpoint for ON or ATTENTION_SAVED."""
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if mode == ATTENTION_SAVED:
        arguments["context_fn"] = partial(
            create_selective_checkpoint_contexts, _save_attention
        )
    return arguments


def part_arguments(*, draws: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of torch's checkpoint for the parts of a block."""
    return checkpoint_arguments(ATTENTION_SAVED, draws=draws)


def _save_attention(_: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's policy for an operation of a block: attention is saved.

    The kernels of all back ends are one operation each, such as
    aten::_scaled_dot_product_flash_attention or flash_attn::_flash_attn_forward.
    """
    name = operation.name()
    is_attention = "attention" in name or "attn" in name
    if is_attention and "backward" not in name:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_text(encoder: Any, mode: str) -> None:
    """Set a transformers model to OFF, or to ON (also for ATTENTION_SAVED).

    Its layers recompute only in training mode. Only the layers themselves are set to
    it; the modules inside them stay in evaluation mode, so that dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    recomputes = mode in (ON, ATTENTION_SAVED)
    if recomputes:
        encoder.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    else:
        encoder.gradient_checkpointing_disable()

    for layer in encoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = recomputes
