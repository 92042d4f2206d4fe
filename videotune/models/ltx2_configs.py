"""Read and check the configs of an LTX-2 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.models.model_files import read_config

TEXT_ENCODERS = (
    "Gemma3ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
"""Gemma 3 of LTX-2 and LTX-2.3, and LTX-2.5's own Gemma 4."""

CONNECTORS = "connectors"
"""Folder of the networks between Gemma and the transformer."""


def version_of(net: Mapping[str, Any]) -> str:
    """Return the version that a transformer's config shows."""
    if net.get("use_prompt_embeddings", True):
        return "2"
    return "2.3" if net.get("ff_bias", True) else "2.5"


def text_encoder_class(folder: Path) -> str:
    """Return the class of the text encoder.

    Raises:
        VideotuneError: if it is none of ``TEXT_ENCODERS``.
    """
    index = read_config(folder / "model_index.json")
    _, name = index["text_encoder"]
    if name not in TEXT_ENCODERS:
        raise VideotuneError(
            f"{folder / 'model_index.json'}: text_encoder is a {name}; "
            f"LTX-2 reads {' or '.join(TEXT_ENCODERS)}"
        )
    return str(name)


def strides_of(folder: Path, vae: Mapping[str, Any]) -> tuple[int, int]:
    """Return the pixels and frames of a latent.

    Raises:
        VideotuneError: if the config does not say them; diffusers would derive others
            than those of its layers.
    """
    path = folder / "vae" / "config.json"
    strides = []
    for key in ("spatial_compression_ratio", "temporal_compression_ratio"):
        stride = vae.get(key)
        if not isinstance(stride, int):
            raise VideotuneError(
                f"{path} lacks {key!r}: take the file that comes with the checkpoint"
            )
        strides.append(stride)
    if vae.get("timestep_conditioning"):
        raise VideotuneError(
            f"{path}: timestep_conditioning is true; no published LTX-2 has such a VAE"
        )
    return strides[0], strides[1]


def connector_widths(
    folder: Path, connectors: Mapping[str, Any], net: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the numbers of a text state for a video token and for a sound token.

    Raises:
        VideotuneError: if the connectors have no registers, or do not fit the
            transformer.
    """
    widths = []
    for kind, key in (
        ("video", "cross_attention_dim"),
        ("audio", "audio_cross_attention_dim"),
    ):
        prefix = f"{kind}_connector_"
        width = (
            connectors[f"{prefix}num_attention_heads"]
            * connectors[f"{prefix}attention_head_dim"]
        )

        expected = net[key]
        if net.get("use_prompt_embeddings", True):
            expected = net["caption_channels"]
        if width != expected:
            raise VideotuneError(
                f"{folder} mixes two models: its connectors give {width} numbers a text token of "
                f"{kind}, its transformer takes {expected}. Take both parts from one checkpoint."
            )

        if not connectors.get(f"{prefix}num_learnable_registers"):
            raise VideotuneError(
                f"{folder / CONNECTORS / 'config.json'}: {prefix}num_learnable_registers is not set; "
                "no published LTX-2 goes without registers"
            )

        widths.append(width)
    return widths[0], widths[1]
