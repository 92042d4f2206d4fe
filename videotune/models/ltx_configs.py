"""What the configs of an LTX-Video checkpoint say: its version, strides and shift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.models.model_files import read_config

SHIFTS = (1024.0, 0.95, 4096.0, 2.05)
"""(tokens, μ, tokens, μ) of the authors' trainer for all versions, and of schedulers up
to 0.9.1.
"""


def is_095_or_later(folder: Path) -> bool:
    """Return whether a checkpoint is 0.9.5 or later, which needs the pipeline with
    conditions.

    Its VAE shows it even if its model_index.json names the older pipeline; their
    positions in time differ.
    """
    block_types = (
        read_config(folder / "vae" / "config.json").get("down_block_types") or ()
    )
    index = read_config(folder / "model_index.json")
    if index.get("_class_name") == "LTXConditionPipeline":
        return True
    return any("095" in block_type for block_type in block_types)


def stride_of(vae: Mapping[str, Any], axis: str, default_patch: int) -> int:
    """Return how many pixels or frames a latent covers.

    Older configs only have the scalings of the VAE's layers.
    """
    ratio = vae.get(f"{axis}_compression_ratio")
    if ratio is not None:
        return int(ratio)
    patch = vae.get(
        "patch_size" if axis == "spatial" else "patch_size_t", default_patch
    )
    return int(patch * 2 ** sum(vae["spatio_temporal_scaling"]))


def shifts_of(scheduler: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Return how the shift grows with the tokens: the scheduler's rule if it has one."""
    if not scheduler.get("use_dynamic_shifting"):
        return SHIFTS
    low_tokens, low_shift, high_tokens, high_shift = SHIFTS
    return (
        float(scheduler.get("base_image_seq_len", low_tokens)),
        float(scheduler.get("base_shift", low_shift)),
        float(scheduler.get("max_image_seq_len", high_tokens)),
        float(scheduler.get("max_shift", high_shift)),
    )
