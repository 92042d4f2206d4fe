"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): keep a block's input, compute the rest again in backward."""

from typing import Any

OFF = "OFF"
ON = "ON"
CPU_OFFLOADED = "CPU_OFFLOADED"
"""Keep all activations; each block's input alone; and that on the host (``videotune/memory/block_offload.py``)."""


def checkpoint_blocks(net: Any, mode: str) -> None:
    """Set a diffusers model to keep all activations (OFF) or each block's input alone (ON); the numbers are the same."""
    assert mode in (OFF, ON), mode
    if mode == ON:
        net.enable_gradient_checkpointing()
    else:
        net.disable_gradient_checkpointing()


def checkpoint_text(encoder: Any, mode: str) -> None:
    """The same for a model of transformers, whose layers recompute in training alone.

    Only the layers are told that they train: what is in them stays in evaluation, so that nothing is dropped out.
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
