"""What is true of a HunyuanVideo checkpoint, read from its configs without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.families.find import read_config
from videotune.families.text import count_tokens
from videotune.types import Expert, FamilySpec, VideoRules

TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
"""What Llama reads around a caption. A fact of the checkpoint, and the pipeline's own; here for counting without torch."""

CROP = 95
"""Tokens in front of the caption: the pipeline cuts as many states off, whatever they are of."""

WIDTH = 3072
"""Of the published transformer; diffusers' converters from the authors' names know no other."""

SIZES = {(3072, 20, 40): " 13B"}
"""(width, double blocks, single blocks) of the published transformers."""

ATTENTION = (
    r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
    r"single_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v)",
)
FEED_FORWARD = (
    r"transformer_blocks\.\d+\.(ff|ff_context)\.(net\.0\.proj|net\.2)",
    r"single_transformer_blocks\.\d+\.(proj_mlp|proj_out)",
)
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")

SPEC = FamilySpec(
    name="hunyuan_video",
    aliases=("HunyuanVideoPipeline", "hunyuan", "hunyuanvideo", "hunyuan-video", "hunyuan-video-13b"),
    title="HunyuanVideo 13B",
    path="flow",
    rules=VideoRules(4, 1, 16, 24.0, 8, 4),
    latent_channels=16,
    patch=(1, 2, 2),
    text_tokens=256,
    text_width=4096,
    given="none",
    experts=(Expert("transformer"),),
    blocks=("transformer_blocks", "single_transformer_blocks"),
    lora_targets={
        "attention": ATTENTION,
        "feed_forward": FEED_FORWARD,
        "linear": ATTENTION + FEED_FORWARD,
        "all": (r"(single_)?transformer_blocks\..+",),  # also what the timestep modulates by
    },
    default_resolution=544,
    timestep_distribution="LOGIT_NORMAL",
    timestep_shift=7.0,
    sample_steps=50,
    sample_guidance=6.0,
    fp16_safe=False,
    licence="Tencent Hunyuan Community License",
    keeps_variance=True,
    fused={
        "comfyui": (
            ("transformer_blocks", QKV),
            ("transformer_blocks", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
            ("single_transformer_blocks", (*QKV, "proj_mlp")),
        )
    },
)


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    The shift of training stays 7, at which the authors draw, whatever the checkpoint's scheduler says: it is that of a
    draw, and distilled checkpoints have others. Raises VideotuneError for a checkpoint that only looks like one of these.
    """
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    latent, image = vae["latent_channels"], net.get("image_condition_type")
    if image is not None or net["in_channels"] != latent:
        told = (
            f"is told an image ({image})" if image else f"reads {net['in_channels']} channels, its VAE gives {latent}"
        )
        raise VideotuneError(
            f"{folder}: its transformer {told}: of HunyuanVideo videotune trains the checkpoint from text alone"
        )
    patch = (net["patch_size_t"], net["patch_size"], net["patch_size"])
    spatial, temporal = vae["spatial_compression_ratio"], vae["temporal_compression_ratio"]
    width = net["num_attention_heads"] * net["attention_head_dim"]
    return replace(
        SPEC,
        title=f"HunyuanVideo{SIZES.get((width, net['num_layers'], net['num_single_layers']), '')}",
        rules=VideoRules(temporal * patch[0], 1, spatial * patch[1], SPEC.rules.fps, spatial, temporal),
        latent_channels=latent,
        patch=patch,
        text_width=net["text_embed_dim"],
        guidance_embedded=bool(net.get("guidance_embeds")),
    )


def token_lengths(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many of Llama's tokens each caption has, the end mark included, without torch; None without a tokenizer.json."""
    counts = count_tokens(folder / "tokenizer", [TEMPLATE.format(caption) for caption in captions])
    return None if counts is None else [count - CROP for count in counts]
