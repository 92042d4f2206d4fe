"""Stand-ins for parts of an LTX-2 checkpoint, for plans and pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.lazy import diffusers, torch
from videotune.models.model_files import read_config

if TYPE_CHECKING:
    from torch import nn

    from videotune.model_spec import VideoRules


def rotary_positions(
    config: Mapping[str, Any], rules: VideoRules, modality: str
) -> Any:
    """Return the transformer's module that gives the bounds of tokens; it has no weights.

    Args:
        config: of the transformer.
        rules: strides of the latent grid.
        modality: "video" or "audio".
    """
    module = diffusers.models.transformers.transformer_ltx2
    strides = [rules.temporal_stride, rules.spatial_stride, rules.spatial_stride]
    if modality == "audio":
        strides = [config.get("audio_scale_factor", 4)]
    return module.LTX2AudioVideoRotaryPosEmbed(
        dim=config["attention_head_dim"],
        scale_factors=tuple(strides),
        causal_offset=config.get("causal_offset", 1),
        sampling_rate=config.get("audio_sampling_rate", 16000),
        hop_length=config.get("audio_hop_length", 160),
        modality=modality,
    )


def audio_vae_stand_in(folder: Path, transformer: Mapping[str, Any]) -> Any:
    """Return a stand-in of the sound's VAE, enough for a pipeline to draw its latents.

    Args:
        folder: the checkpoint.
        transformer: the config of its transformer.
    """
    config = read_config(folder / "audio_vae" / "config.json")
    width = transformer.get("audio_in_channels", 128)
    settings = {"sample_rate": 16000, "mel_hop_length": 160, "mel_bins": 64}
    settings |= {name: config[name] for name in settings if name in config}
    settings["latent_channels"] = config["latent_channels"]

    class StandIn:
        """Sizes of the latents of sound, and statistics of 0 and 1."""

        def __init__(self) -> None:
            self.config = diffusers.configuration_utils.FrozenDict(settings)
            # The config does not say these ratios; the class in diffusers does.
            self.mel_compression_ratio = 4
            self.temporal_compression_ratio = 4
            self.latents_mean = torch.zeros(width)
            self.latents_std = torch.ones(width)

    return StandIn()


def with_connectors(encoder: Any, connectors: Any) -> nn.Module:
    """Return a network that runs Gemma and the connectors over a caption, as ``encode``
    does.
    """

    class TextStack(torch.nn.Module):
        """Gemma, the states of all its layers, and the connectors."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self.connectors = connectors

        def get_input_embeddings(self) -> Any:
            return encoder.get_input_embeddings()

        def forward(self, **inputs: Any) -> Any:
            output = encoder(**inputs, output_hidden_states=True)
            states = torch.stack(output.hidden_states, dim=-1).flatten(2, 3)
            mask = inputs.get("attention_mask")
            if mask is None:
                mask = torch.ones_like(inputs["input_ids"])
            return connectors(states, mask)

    return TextStack()
