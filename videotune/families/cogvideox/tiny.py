"""Tiny random CogVideoX checkpoints in the real layout, and what a perfect transformer would say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.cogvideox.facts import SPEC
from videotune.types import FamilySpec

if TYPE_CHECKING:
    from torch import Tensor


def oracle(x0: Tensor, spec: FamilySpec = SPEC) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,F,H,W): v = (alpha·x_t - x0) / sigma, told k.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it.
    """
    from videotune.diffusion.objective import objective
    from videotune.diffusion.timesteps import Timesteps

    path, num_timesteps = (
        objective("v", spec.path_constants, Timesteps()).path,
        spec.path_constants["num_train_timesteps"],
    )

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        at = path(timestep.float() / (num_timesteps - 1))
        front = x0[:, :, :1].expand(-1, -1, hidden_states.shape[1] - x0.shape[2], -1, -1)
        clean = _torch().cat([front, x0], dim=2).transpose(1, 2)
        return (at.alpha * hidden_states[:, :, : x0.shape[1]] - clean) / at.sigma

    return answer


OLDER = {"sample_height": 4, "sample_width": 6}
NEWER = {"sample_height": 40, "sample_width": 40, "patch_size_t": 2, "patch_bias": False}
ROTARY = {"use_rotary_positional_embeddings": True}

TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "5b": OLDER | ROTARY,
    "2b": OLDER,
    "5b-i2v": OLDER | ROTARY | {"use_learned_positional_embeddings": True, "sample_width": 4},
    "1.5-5b": NEWER | ROTARY,
    "1.5-5b-i2v": NEWER | ROTARY | {"ofs_embed_dim": 8},
}
"""What sets each checkpoint's transformer apart."""

VARIANTS = tuple(TRANSFORMERS)
"""The checkpoints that ``tiny`` can write."""


def tiny(folder: Path, seed: int = 0, variant: str = VARIANTS[0]) -> Path:
    """Write a random checkpoint of some 55,000 parameters in the real layout, and return its folder."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    from videotune.families.tiny import letters_tokenizer

    torch, image = _torch(), variant.endswith("i2v")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(4, 4, 4, 4), norm_num_groups=2, latent_channels=4, layers_per_block=1,
            scaling_factor=1.15258426 if variant == "2b" else 0.7, invert_scale_latents=variant.startswith("1.5"),
        )  # fmt: skip
        net = diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=8 if image else 4, out_channels=4, num_layers=2,
            time_embed_dim=8, text_embed_dim=16, **TRANSFORMERS[variant],
        )  # fmt: skip
        tokenizer = letters_tokenizer()
        encoder = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
            )
        )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False, timestep_spacing="trailing",
        snr_shift_scale=3.0 if variant == "2b" else 1.0,
    )  # fmt: skip
    pipeline = diffusers.CogVideoXImageToVideoPipeline if image else diffusers.CogVideoXPipeline
    pipeline(tokenizer, encoder, vae, net, scheduler).save_pretrained(folder)
    return folder


def _torch() -> Any:
    import torch

    return torch
