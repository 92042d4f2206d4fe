"""Tiny random LTX-Video checkpoints in the real layout, and what a perfect transformer would say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.types import FamilySpec

OLDER = {
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, True, False),
}
UPWARDS = {
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
}
VAES: Mapping[str, Mapping[str, Any]] = {
    "0.9.0": OLDER | {"decoder_block_out_channels": (8, 8, 8, 8), "decoder_layers_per_block": (1, 1, 1, 1, 1)},
    "0.9.1": OLDER | UPWARDS | {"decoder_inject_noise": (True, True, True, False)},
    "0.9.7": UPWARDS
    | {
        "block_out_channels": (4, 8, 8, 16, 16),
        "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
        "layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, True, True),
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        "decoder_inject_noise": (False, False, False, False),
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    },
}
"""What sets each version's VAE apart: a decoder that is told a timestep, one that draws noise, another encoder."""

VARIANTS = tuple(VAES)
"""The checkpoints that ``tiny`` can write."""


def tiny(folder: Path, seed: int = 0, variant: str = VARIANTS[0]) -> Path:
    """Write a random checkpoint of some 100,000 parameters in the real layout, and return its folder."""
    import diffusers
    import torch
    from transformers import T5Config, T5EncoderModel

    from videotune.families.tiny import letters_tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKLLTXVideo(latent_channels=4, **VAES[variant])
        vae.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.0, 0.3]))
        vae.latents_std.copy_(torch.tensor([0.5, 1.2, 0.8, 1.0]))
        net = diffusers.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            num_layers=2, caption_channels=16,
        )  # fmt: skip
        tokenizer = letters_tokenizer()
        encoder = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
            )
        )
    newer = variant == "0.9.7"
    dynamic = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
    dynamic |= {"base_image_seq_len": 1024, "max_image_seq_len": 4096}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**({} if newer else dynamic))
    pipeline = diffusers.LTXConditionPipeline if newer else diffusers.LTXPipeline
    pipeline(scheduler, vae, encoder, tokenizer, net).save_pretrained(folder)
    return folder


def unpacked(tokens: Tensor, size: tuple[int, int, int]) -> Tensor:
    """What the transformer is fed (B,F·H·W,C) -> latents (B,C,F,H,W), (F,H,W) being ``size``; tests look at them so."""
    return tokens.transpose(1, 2).unflatten(2, size)


def oracle(x0: Tensor, spec: FamilySpec | None = None) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,F,H,W): v = (x_t - x0) / t in tokens, told 1000 t.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it. Where a
    token is told 0 its v is 0. ``spec`` is for families whose path hangs on the checkpoint.
    """
    clean = x0.flatten(2).transpose(1, 2)

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        t = (timestep.float() / 1000).view(len(hidden_states), -1, 1)
        return ((hidden_states - clean) / t.clamp(min=1e-9)).where(t > 0, t.new_zeros(()))

    return answer
