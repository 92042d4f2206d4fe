"""Tiny random Wan checkpoints in the real layout, one of each kind, and the transformer that is never wrong: for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("t2v", "i2v", "ti2v", "t2v-a14b", "i2v-a14b")
"""2.1 from text, 2.1 from an image, 2.2 TI2V (5B), 2.2 with two experts from text, and from an image."""


def tiny(folder: Path, seed: int = 0, variant: str = VARIANTS[0]) -> Path:
    """Write a random Wan checkpoint of some 40,000 parameters in the real layout, and return its folder."""
    import torch
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
    from transformers import UMT5Config, UMT5EncoderModel

    from videotune.families.tiny import letters_tokenizer

    assert variant in VARIANTS, f"{variant!r} is none of {', '.join(VARIANTS)}"
    from_image, of_both, two = "i2v" in variant.split("-"), variant == "ti2v", variant.endswith("a14b")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = _vae(of_both)
        net = _transformer(from_image, with_clip=variant == "i2v")
        tokenizer = letters_tokenizer()
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
            )
        )
        parts: dict[str, Any] = {"transformer": net}
        if two:
            boundary = 0.9 if from_image else 0.875
            parts |= {"transformer_2": _transformer(from_image, with_clip=False), "boundary_ratio": boundary}
        if variant == "i2v":
            parts["image_processor"], parts["image_encoder"] = _clip()
    shift = 5.0 if of_both else 3.0
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    pipeline = WanImageToVideoPipeline if from_image else WanPipeline
    if of_both:
        parts["expand_timesteps"] = True
    pipeline(tokenizer, encoder, vae, scheduler, **parts).save_pretrained(folder)
    return folder


def _vae(newer: bool) -> Any:
    """2.1's VAE, or with ``newer`` 2.2's: it takes pixels two by two, and its statistics are not 0 and 1."""
    from diffusers import AutoencoderKLWan

    kind: dict[str, Any] = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    if newer:
        kind = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 4}
        kind |= {"scale_factor_spatial": 16, "scale_factor_temporal": 4}
        kind |= {"latents_mean": [0.1, -0.2, 0.0, 0.3], "latents_std": [0.5, 1.2, 0.8, 1.0]}
    return AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **kind)


def _transformer(from_image: bool, with_clip: bool) -> Any:
    """Two blocks of two heads; from an image it takes noise, the mask and the image's latents."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4 + 4 + 4 if from_image else 4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=128,
        **({"image_dim": 16, "added_kv_proj_dim": 24} if with_clip else {}),
    )


def _clip() -> tuple[Any, Any]:
    """CLIP's preparation of an image and its vision model, for pictures of 32 x 32."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return processor, CLIPVisionModel(config)


def oracle(x0: Tensor, spec: Any = None) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,F,H,W): v = (x_t - x0) / t, told 1000 t.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it. Where a
    token is told 0 its v is 0. Channels behind those of x0 (a mask, an image) are passed over.
    ``spec`` is for families whose path hangs on the checkpoint.
    """

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        x_t, frames = hidden_states[:, : x0.shape[1]], x0.shape[2]
        t = timestep.float() / 1000
        t = t.view(-1, 1, 1, 1, 1) if t.ndim == 1 else t.view(len(t), frames, -1)[:, None, :, :1, None]
        return ((x_t - x0) / t.clamp(min=1e-9)).where(t > 0, t.new_zeros(()))

    return answer
