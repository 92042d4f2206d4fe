"""What is true of a CogVideoX checkpoint, read from its configs without torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.families.find import read_config
from videotune.types import Expert, FamilySpec, VideoRules

ATTENTION = (r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",)
FEED_FORWARD = (r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",)

SCHEDULE = ("beta_start", "beta_end", "num_train_timesteps", "snr_shift_scale", "rescale_betas_zero_snr")
"""What the noising path is made of; each from the checkpoint, since the schedulers' own defaults are no checkpoint's."""

SPEC = FamilySpec(
    name="cogvideox",
    aliases=(
        "CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "cogvideo", "cogvideox-2b", "cogvideox-5b",
        "cogvideox-5b-i2v", "cogvideox1.5", "cogvideox1.5-5b", "cogvideox1.5-5b-i2v",
    ),
    title="CogVideoX 5B",
    path="v",
    rules=VideoRules(8, 1, 16, 8.0, 8, 4, most_frames=49),
    latent_channels=16,
    patch=(1, 2, 2),
    text_tokens=226,
    text_width=4096,
    given="none",
    experts=(Expert("transformer"),),
    blocks=("transformer_blocks",),
    lora_targets={
        "attention": ATTENTION,
        "feed_forward": FEED_FORWARD,
        "linear": ATTENTION + FEED_FORWARD,
        "all": (r"transformer_blocks\..+",),
    },
    default_resolution=588,  # the area of 480x720
    timestep_distribution="UNIFORM",
    timestep_shift=1.0,
    sample_steps=50,
    sample_guidance=6.0,
    fp16_safe=False,
    licence="CogVideoX License",
    path_constants=dict(zip(SCHEDULE, (0.00085, 0.012, 1000.0, 1.0, 1.0), strict=True)),
    sample_shape=(49, 480, 720),
    keeps_variance=True,
)  # fmt: skip

NEWER_MOST, NEWER_SHAPE = 161, (81, 768, 1360)
"""Of 1.5, whose configs say neither: the frames of its longest clips, ten seconds, and what its authors draw by default."""

TOLD = 0.95
"""The share of samples that are told their image, as the authors train image to video."""


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    Raises VideotuneError for a checkpoint that only looks like one of these.
    """
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    latent, channels = vae["latent_channels"], net["in_channels"]
    if channels not in (latent, 2 * latent):
        raise VideotuneError(
            f"{folder}: its transformer reads {channels} channels, neither {latent} (from text) nor {2 * latent} (from an "
            "image): it is a variant of CogVideoX that videotune does not know"
        )
    image, patch_t, rotary = channels != latent, net.get("patch_size_t"), net.get("use_rotary_positional_embeddings")
    spatial, temporal = 2 ** (len(vae["block_out_channels"]) - 1), vae["temporal_compression_ratio"]
    size = net["sample_height"] * spatial, net["sample_width"] * spatial
    # The VAE works on pairs of latent frames behind the first, and a token of 1.5 covers two frames. A learned table of
    # positions fits one length: at another the model would put an untrained one in its place and say nothing.
    step, rest = 2 * temporal * (patch_t or 1), 1
    learned = bool(net.get("use_learned_positional_embeddings"))
    if learned:
        step, rest = 0, net["sample_frames"]
    rules = VideoRules(step, rest, spatial * net["patch_size"], 16.0 if patch_t else 8.0, spatial, temporal)
    # a sample size is 1.5's largest; that of the older ones is what they were trained on
    longest = replace(rules, most_frames=NEWER_MOST, most_side=min(size))
    rules = longest if patch_t else replace(rules, most_frames=net["sample_frames"], size=size if learned else None)
    newest = (NEWER_SHAPE[0], min(NEWER_SHAPE[1], size[0]), min(NEWER_SHAPE[2], size[1]))
    shape = newest if patch_t else (net["sample_frames"], *size)
    area = shape[1] * shape[2]
    return replace(
        SPEC,
        title=f"CogVideoX {'1.5 5B' if patch_t else '5B' if rotary else '2B'}{' I2V' if image else ''}",
        rules=rules,
        latent_channels=latent,
        patch=(patch_t or 1, net["patch_size"], net["patch_size"]),
        text_tokens=net["max_text_seq_length"],
        text_width=net["text_embed_dim"],
        given="concat" if image else "none",
        default_resolution=f"{size[0]}x{size[1]}" if learned else round(math.sqrt(area)),
        fp16_safe=not rotary,  # 2B was trained in it
        licence=SPEC.licence if rotary else "Apache-2.0",
        path_constants=_schedule(folder / "scheduler" / "scheduler_config.json"),
        first_frame=TOLD if image else None,
        image_noise=image,
        sample_shape=shape,
        conditioning_channels=(0, latent if image else 0),
    )


def _schedule(path: Path) -> dict[str, float]:
    """What the scheduler's config says of the noising path.

    Raises VideotuneError where it is silent or names another kind of path.
    """
    config = read_config(path)
    missing = [name for name in SCHEDULE if config.get(name) is None]
    if missing:
        raise VideotuneError(f"{path} does not say {', '.join(missing)}; take the file that comes with the checkpoint")
    wanted = {"prediction_type": "v_prediction", "beta_schedule": "scaled_linear", "trained_betas": None}
    for name, value in wanted.items():
        if config.get(name) != value:
            raise VideotuneError(f"{path}: {name} is {config.get(name)!r}; CogVideoX is trained with {value!r}")
    return {name: float(config[name]) for name in SCHEDULE}
