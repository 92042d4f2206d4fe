"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): keep a block's input, compute the rest again in backward."""

from __future__ import annotations

from typing import Any

OFF, ON, CPU_OFFLOADED = "OFF", "ON", "CPU_OFFLOADED"
"""Keep all activations; each block's input alone; and that on the host (``videotune/memory/offload.py``)."""


def checkpoint_blocks(net: Any, mode: str) -> None:
    """Set a diffusers model to keep all activations (OFF) or each block's input alone (ON); the numbers are the same."""
    assert mode in (OFF, ON), mode
    if mode == ON:
        net.enable_gradient_checkpointing()
    else:
        net.disable_gradient_checkpointing()
