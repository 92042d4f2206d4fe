"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174)."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from videotune.memory.input_checkpoint import InputCheckpoint

OFF = "OFF"
"""Save all activations."""

ON = "ON"
"""Save only the input of each block."""

CPU_OFFLOADED = "CPU_OFFLOADED"
"""Save the input of each block on the host, see ``activation_offload``."""


def checkpoint_blocks(
    net: Any, mode: str, *, draws: bool = True, whole_graph: bool = False
) -> None:
    """Set a diffusers model to OFF or ON; the computed values do not change.

    Args:
        net: the model.
        mode: OFF or ON.
        draws: whether blocks draw random numbers, which must be the same when a block is
            computed again. A CUDA graph cannot ask a generator for its state.
        whole_graph: record the graph of each block, as ``torch.utils.checkpoint`` does,
            which is slower. Compiled blocks need it: without gradients they would run
            uncompiled. So do sharded blocks, whose weights are gathered by the graph.
    """
    assert mode in (OFF, ON), mode
    if mode == OFF:
        net.disable_gradient_checkpointing()
    elif whole_graph:
        net.enable_gradient_checkpointing(
            partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
        )
    else:
        net.enable_gradient_checkpointing(InputCheckpoint(draws=draws))


def checkpoint_text(encoder: Any, mode: str) -> None:
    """Set a transformers model to OFF or ON.

    Its layers recompute only in training mode. Only the layers themselves are set to
    it; the modules inside them stay in evaluation mode, so that dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if mode == ON:
        encoder.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    else:
        encoder.gradient_checkpointing_disable()

    for layer in encoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = mode == ON
