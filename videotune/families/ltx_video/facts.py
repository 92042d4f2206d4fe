"""What is true of an LTX-Video checkpoint, read from its configs without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.families.find import read_config
from videotune.types import Expert, FamilySpec, VideoRules

_ATTENTION = r"(to_q|to_k|to_v|to_out\.0)"
ATTENTION = (rf"transformer_blocks\.\d+\.attn[12]\.{_ATTENTION}",)
FEED_FORWARD = (r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",)

SIZES = {(2048, 28): "2B", (4096, 48): "13B"}
"""(width, blocks) of the published transformers."""

OLDER_LICENCE, LICENCE = "LTX-Video RAIL-M licence", "LTXV Open Weights License"
"""Up to 0.9.1, and of all 13B; 2B from 0.9.5 on has OpenRAIL-M first, then the latter, and no config tells which."""

MIDDLE = 2560
"""Tokens whose shift stands for all where one number is asked for: half way between the two that the rule names."""

SHIFTS = (1024.0, 0.95, 4096.0, 2.05)
"""(tokens, μ, tokens, μ) of the authors' trainer for every version; the schedulers up to 0.9.1 say the same."""

SPEC = FamilySpec(
    name="ltx_video",
    aliases=(
        "LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline", "ltx", "ltxv", "ltx-video", "LTX_VIDEO",
        "LTXV_2B", "LTXV_13B",
    ),
    title="LTX-Video 0.9.0 2B",
    path="flow",
    rules=VideoRules(8, 1, 32, 25.0, 32, 8, most_frames=257),
    latent_channels=128,
    patch=(1, 1, 1),
    text_tokens=128,
    text_width=4096,
    given="replace",
    experts=(Expert("transformer"),),
    blocks=("transformer_blocks",),
    lora_targets={
        "attention": ATTENTION,
        "self_attention": (rf"transformer_blocks\.\d+\.attn1\.{_ATTENTION}",),
        "cross_attention": (rf"transformer_blocks\.\d+\.attn2\.{_ATTENTION}",),
        "feed_forward": FEED_FORWARD,
        "linear": ATTENTION + FEED_FORWARD,
        "all": (r"transformer_blocks\..+",),
    },
    default_resolution=600,  # the area of 512x704
    timestep_distribution="LOGIT_NORMAL",
    timestep_shift=round(math.exp(SHIFTS[1] + (SHIFTS[3] - SHIFTS[1]) * (MIDDLE - SHIFTS[0]) / 3072), 2),
    sample_steps=50,
    sample_guidance=3.0,
    fp16_safe=False,
    licence=OLDER_LICENCE,
    first_frame=0.1,  # as the authors' trainer has it
    sample_shape=(161, 512, 704),
    keeps_variance=True,
    shift_by_tokens=SHIFTS,
)  # fmt: skip

NEWER_TOKENS = 256
"""Of a caption, as the pipeline of 0.9.5 and newer reads it."""


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    Raises VideotuneError for a checkpoint that only looks like one of these.
    """
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    if (net.get("patch_size", 1), net.get("patch_size_t", 1)) != (1, 1):
        raise VideotuneError(
            f"{folder}: a token of its transformer covers more than one latent; no published LTX-Video does that"
        )
    if net["in_channels"] != vae["latent_channels"]:
        raise VideotuneError(
            f"{folder}: its transformer takes {net['in_channels']} channels, and its VAE's latents have "
            f"{vae['latent_channels']}. Are both of one checkpoint?"
        )
    scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
    size = SIZES.get((net["num_attention_heads"] * net["attention_head_dim"], net["num_layers"]), "")
    spatial, temporal = _stride(vae, "spatial", 4), _stride(vae, "temporal", 1)
    since = newer(folder)
    version = "0.9.5+" if since else "0.9.1" if vae.get("timestep_conditioning") else "0.9.0"
    return replace(
        SPEC,
        title=f"LTX-Video {version} {size}".rstrip(),
        rules=replace(
            SPEC.rules, frame_step=temporal, side_multiple=spatial, spatial_stride=spatial, temporal_stride=temporal
        ),
        latent_channels=vae["latent_channels"],
        text_tokens=NEWER_TOKENS if since else SPEC.text_tokens,
        text_width=net["caption_channels"],
        licence=SPEC.licence if not since else LICENCE if size == "13B" else f"OpenRAIL-M or {LICENCE}",
        shift_by_tokens=_shifts(scheduler),
    )


def newer(folder: Path) -> bool:
    """Whether it is a checkpoint of 0.9.5 or later, which the pipeline with conditions draws from.

    Its VAE tells, where its model_index.json names the older pipeline: positions in time begin otherwise in it.
    """
    kinds = read_config(folder / "vae" / "config.json").get("down_block_types") or ()
    index = read_config(folder / "model_index.json")
    return index.get("_class_name") == "LTXConditionPipeline" or any("095" in kind for kind in kinds)


def _stride(vae: Mapping[str, Any], kind: str, patch: int) -> int:
    """How many pixels or frames a latent covers; older configs have it of the VAE's layers alone."""
    said = vae.get(f"{kind}_compression_ratio")
    own = vae.get("patch_size" if kind == "spatial" else "patch_size_t", patch)
    return int(said if said is not None else own * 2 ** sum(vae["spatio_temporal_scaling"]))


def _shifts(scheduler: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """The rule by which the shift grows with the tokens: the scheduler's own where it has one."""
    if not scheduler.get("use_dynamic_shifting"):
        return SHIFTS
    names = ("base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift")
    first, low, second, high = (float(scheduler.get(name, SHIFTS[i])) for i, name in enumerate(names))
    return first, low, second, high
