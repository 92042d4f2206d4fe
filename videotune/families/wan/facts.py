"""What is true of a Wan checkpoint, read from its own configs without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.families.find import read_config
from videotune.families.wan.nets import TARGETS, clip_numbers
from videotune.types import Expert, FamilySpec, VideoRules

SIZES = {(1536, 30): "1.3B", (3072, 30): "5B", (5120, 40): "14B"}
"""(width, blocks) of the published transformers."""

FOLDERS = {"transformer": "transformer", "high": "transformer", "low": "transformer_2"}
"""Where each expert lies: in diffusers' layout the first transformer is the one for high noise."""

SPEC = FamilySpec(
    name="wan",
    aliases=("WanPipeline", "WanImageToVideoPipeline", "wan2.1", "wan2.2", "wan21", "wan22", "WAN_2_2", "WAN_2_1"),
    title="Wan 2.1 T2V",
    path="flow",
    rules=VideoRules(4, 1, 16, 16.0, 8, 4),
    latent_channels=16,
    patch=(1, 2, 2),
    text_tokens=512,
    text_width=4096,
    given="none",
    experts=(Expert("transformer"),),
    blocks=("blocks",),
    lora_targets=TARGETS,
    default_resolution=480,
    timestep_distribution="LOGIT_NORMAL",
    timestep_shift=3.0,
    sample_steps=30,
    sample_guidance=5.0,
    fp16_safe=False,
    licence="Apache-2.0",
)


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    The shift of training is 3 for 2.1, as its schedulers say and its authors draw at 480p. For 2.2 it is 5, at which its
    authors draw TI2V-5B and I2V-A14B; they draw T2V-A14B at 12, which would leave the expert for low noise under a third
    of the draws, and diffusers at 3. Raises VideotuneError for a Wan checkpoint that is none of those at the top.
    """
    index = read_config(folder / "model_index.json")
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    spatial, temporal = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
    patch, from_both = tuple(net["patch_size"]), bool(index.get("expand_timesteps"))
    from_image = net["in_channels"] == 2 * vae["z_dim"] + temporal  # noise, the mask of what is given, the image
    if not from_image and net["in_channels"] != vae["z_dim"]:
        raise VideotuneError(
            f"{folder}: its transformer takes {net['in_channels']} channels, and its VAE's latents have {vae['z_dim']}: "
            "neither text-to-video nor image-to-video Wan. Are both of one checkpoint?"
        )
    if net.get("pos_embed_seq_len") is not None:
        raise VideotuneError(f"{folder}: a Wan checkpoint for first and last frames (FLF2V) cannot be trained")
    experts = _experts(folder, index)
    newer = from_both or len(experts) > 1
    size = SIZES.get((net["num_attention_heads"] * net["attention_head_dim"], net["num_layers"]), "")
    size = f"A{size}" if size and len(experts) > 1 else size
    title = f"Wan {'2.2' if newer else '2.1'} {'TI2V' if from_both else 'I2V' if from_image else 'T2V'} {size}".rstrip()
    fps = 24.0 if from_both else 16.0
    return replace(
        SPEC,
        title=title,
        rules=VideoRules(temporal, 1, spatial * patch[1], fps, spatial, temporal),
        latent_channels=vae["z_dim"],
        patch=patch,
        text_width=net["text_dim"],
        given="concat" if from_image else "replace" if from_both else "none",
        first_frame=1.0 if from_image else 0.0 if from_both else None,
        experts=experts,
        timestep_shift=5.0 if newer else SPEC.timestep_shift,
        sample_guidance=SPEC.sample_guidance if len(experts) == 1 else 3.5 if from_image else 4.0,
        conditioning_channels=(net["in_channels"] - vae["z_dim"], 0),
        conditioning_states=0
        if net.get("image_dim") is None
        else clip_numbers(folder / "image_encoder" / "config.json"),
    )


def _experts(folder: Path, index: Mapping[str, Any]) -> tuple[Expert, ...]:
    """One denoiser, or in A14B the one for t from the boundary up and the one for t below it."""
    boundary, second = index.get("boundary_ratio"), (folder / "transformer_2").is_dir()
    if boundary is None and not second:
        return SPEC.experts
    if boundary is None or not second:
        missing = "boundary_ratio in its model_index.json" if second else "transformer_2/"
        raise VideotuneError(f"{folder}: a Wan checkpoint with two experts (A14B) needs {missing}")
    return Expert("high", float(boundary), 1.0), Expert("low", 0.0, float(boundary))
