"""CogVideoX 2B, 5B and 1.5 5B (Yang et al. 2024, arXiv 2408.06072): v-prediction, T5 text, a causal video VAE.

From text, and from a first image whose latents stand beside the noisy ones on the channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.models.base import DiffusersModel
from videotune.models.model_files import read_config
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    ModelSpec,
    Networks,
    SampleRequest,
    VideoRules,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

SCHEDULE = (
    "beta_start",
    "beta_end",
    "num_train_timesteps",
    "snr_shift_scale",
    "rescale_betas_zero_snr",
)
"""What the noising path is made of; each from the checkpoint, since the schedulers' own defaults are no checkpoint's."""

NEWER_MOST = 161
NEWER_SHAPE = (81, 768, 1360)
"""Of 1.5, whose configs say neither: the frames of its longest clips, ten seconds, and what its authors sample."""

TOLD = 0.95
"""The share of samples that are told their image, as the authors train image to video."""

LOG_MEAN = -3.0
LOG_STD = 0.5
"""Of the logarithm of the strength of the noise on an image."""

OFS = 2.0
"""What the pipeline tells the offset embedding, which 1.5 I2V alone has."""


class CogVideoX(DiffusersModel):
    """A CogVideoX checkpoint."""

    spec = ModelSpec(
        name="cogvideox",
        aliases=(
            "CogVideoXPipeline",
            "CogVideoXImageToVideoPipeline",
            "cogvideo",
            "cogvideox-2b",
            "cogvideox-5b",
            "cogvideox-5b-i2v",
            "cogvideox1.5",
            "cogvideox1.5-5b",
            "cogvideox1.5-5b-i2v",
        ),
        title="CogVideoX 5B",
        path="v",
        rules=VideoRules(
            frame_step=8,
            frame_rest=1,
            side_multiple=16,
            fps=8.0,
            spatial_stride=8,
            temporal_stride=4,
            most_frames=49,
        ),
        text_tokens=226,
        blocks=("transformer_blocks",),
        lora_targets={
            "attention": (r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",),
            "feed_forward": (r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",),
            "linear": (
                r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
                r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",
            ),
            "all": (r"transformer_blocks\..+",),
        },
        default_resolution=588,
        timestep_shift=1.0,
        sample_steps=50,
        sample_guidance=6.0,
        licence="CogVideoX License",
        timestep_distribution="UNIFORM",
        path_constants={
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "num_train_timesteps": 1000.0,
            "snr_shift_scale": 1.0,
            "rescale_betas_zero_snr": 1.0,
        },
        sample_shape=(49, 480, 720),
        keeps_variance=True,
    )
    tiny_parts = {
        "_class_name": "CogVideoXPipeline",
        "vae": {
            "_class_name": "AutoencoderKLCogVideoX",
            "block_out_channels": [4, 4, 4, 4],
            "norm_num_groups": 2,
            "latent_channels": 4,
            "layers_per_block": 1,
            "scaling_factor": 0.7,
            "invert_scale_latents": False,
        },
        "transformer": {
            "_class_name": "CogVideoXTransformer3DModel",
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "sample_height": 4,
            "sample_width": 6,
        },
        "scheduler": {
            "_class_name": "CogVideoXDDIMScheduler",
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "clip_sample": False,
            "timestep_spacing": "trailing",
            "snr_shift_scale": 1.0,
        },
        "tokenizer": {"_class_name": "letters"},
        "text_encoder": {
            "_class_name": "T5EncoderModel",
            "vocab_size": 98,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
        },
    }
    tiny_variants = {
        "5b": {"transformer": {"use_rotary_positional_embeddings": True}},
        "2b": {"vae": {"scaling_factor": 1.15258426}, "scheduler": {"snr_shift_scale": 3.0}},
        "5b-i2v": {
            "_class_name": "CogVideoXImageToVideoPipeline",
            "transformer": {
                "use_rotary_positional_embeddings": True,
                "in_channels": 8,
                "use_learned_positional_embeddings": True,
                "sample_width": 4,
            },
        },
        "1.5-5b": {
            "vae": {"invert_scale_latents": True},
            "transformer": {
                "sample_height": 40,
                "sample_width": 40,
                "patch_size_t": 2,
                "patch_bias": False,
                "use_rotary_positional_embeddings": True,
            },
        },
        "1.5-5b-i2v": {
            "_class_name": "CogVideoXImageToVideoPipeline",
            "vae": {"invert_scale_latents": True},
            "transformer": {
                "sample_height": 40,
                "sample_width": 40,
                "patch_size_t": 2,
                "patch_bias": False,
                "use_rotary_positional_embeddings": True,
                "in_channels": 8,
                "ofs_embed_dim": 8,
            },
        },
    }
    variants = ("5b", "2b", "5b-i2v", "1.5-5b", "1.5-5b-i2v")
    transformer_class = "CogVideoXTransformer3DModel"
    vae_class = "AutoencoderKLCogVideoX"
    pipelines = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    text_first = True
    comfyui_names = (
        (r"transformer_blocks\.", "blocks."),
        (r"attn1\.to_out\.0", "attn_out"),
        (r"attn1\.to_", ""),
        (r"ff\.net\.0\.proj", "ff_proj"),
        (r"ff\.net\.2", "ff_out"),
    )
    file_names = (
        (
            (r"^transformer_blocks\.", "blocks."),
            (r"\.attn1\.to_out\.0\.", ".attn_out."),
            (r"\.attn1\.to_", "."),
            (r"\.attn1\.", "."),
            (r"\.ff\.net\.0\.proj\.", ".ff_proj."),
            (r"\.ff\.net\.2\.", ".ff_out."),
            (r"^(time|ofs)_embedding\.linear_", r"\1_embedding_linear_"),
        ),
    )
    config_defaults = dict.fromkeys(
        (
            "patch_size_t",
            "ofs_embed_dim",
            "use_rotary_positional_embeddings",
            "use_learned_positional_embeddings",
        )
    )

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint. Raises VideotuneError for one that only looks like one of these."""
        net, vae, latent, image = cls.read_configs(
            folder, lambda vae: 2 * vae["latent_channels"]
        )
        patch_t = net.get("patch_size_t")
        rotary = net.get("use_rotary_positional_embeddings")
        spatial = 2 ** (len(vae["block_out_channels"]) - 1)
        temporal = vae["temporal_compression_ratio"]
        size = net["sample_height"] * spatial, net["sample_width"] * spatial
        # The VAE works on pairs of latent frames behind the first, and a token of 1.5 covers two frames. A learned table of
        # positions fits one length: at another the model would put an untrained one in its place and say nothing.
        learned = bool(net.get("use_learned_positional_embeddings"))
        step, rest = (
            (0, net["sample_frames"]) if learned else (2 * temporal * (patch_t or 1), 1)
        )
        rules = VideoRules(
            step, rest, spatial * net["patch_size"], 16.0 if patch_t else 8.0, spatial, temporal
        )
        if patch_t:  # a sample size is 1.5's largest; that of the older ones is what they were trained on
            rules = replace(rules, most_frames=NEWER_MOST, most_side=min(size))
            shape = NEWER_SHAPE[0], min(NEWER_SHAPE[1], size[0]), min(NEWER_SHAPE[2], size[1])
        else:
            rules = replace(
                rules, most_frames=net["sample_frames"], size=size if learned else None
            )
            shape = net["sample_frames"], *size
        return replace(
            cls.spec,
            title=f"CogVideoX {'1.5 5B' if patch_t else '5B' if rotary else '2B'}{' I2V' if image else ''}",
            rules=rules,
            latent_channels=latent,
            patch=(patch_t or 1, net["patch_size"], net["patch_size"]),
            text_tokens=net["max_text_seq_length"],
            text_width=net["text_embed_dim"],
            image_conditioning="concat" if image else "none",
            default_resolution=f"{size[0]}x{size[1]}"
            if learned
            else round(math.sqrt(shape[1] * shape[2])),
            licence=cls.spec.licence if rotary else "Apache-2.0",
            path_constants=_schedule(folder / "scheduler" / "scheduler_config.json"),
            first_frame=TOLD if image else None,
            image_noise=image,
            sample_shape=shape,
            image_channels=(0, latent if image else 0),
        )

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """ "image" (C,1,H,W), the latents of the first frame as the pipeline scales them, where the checkpoint takes one.

        Noise of a strength of its own is laid on the frame, and a latent drawn, both from ``random``; None: the mean of the
        frame as it is.
        """
        if self.spec.first_frame is None:
            return {}
        vae = self.vae()
        frame = frames[:, :1]
        if random is not None:
            strength = math.exp(LOG_MEAN + LOG_STD * random.standard_normal())
            frame = frame + strength * torch.from_numpy(
                random.standard_normal(tuple(frame.shape), "float32")
            ).to(frame)
        dist = vae.encode(frame[None].to(self.device)).latent_dist
        latent = dist.mean[0].float().cpu()
        if random is not None:
            draw = torch.from_numpy(random.standard_normal(tuple(latent.shape), "float32"))
            latent = latent + dist.std[0].float().cpu() * draw
        scale = vae.config.scaling_factor
        return {"image": latent * (1 / scale if vae.config.invert_scale_latents else scale)}

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """With an image, where the checkpoint takes one."""
        states = super().blank_states(shape)
        (_, rows, columns) = self.spec.rules.latent_size(shape)
        if self.spec.first_frame is not None:
            states["image"] = torch.zeros(self.spec.latent_channels, 1, rows, columns)
        return states

    def raw_latents(self, latents: Tensor) -> Tensor:
        """In the pipeline's order of rounding."""
        return 1 / self.vae().config.scaling_factor * latents

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """The network is told the integer timestep, and an image where it takes one.

        Where a token covers two frames, a noisy copy of the first clean frame stands in front and is taken off again.
        """
        from videotune.diffusion.loss import timestep_index  # imports torch

        rules = self.spec.rules
        front = self._front(x_t.shape[2])
        frames, rows, columns = x_t.shape[2:]
        height = rows * rules.spatial_stride
        width = columns * rules.spatial_stride
        self.check_shape((frames - 1) * rules.temporal_stride + 1, height, width)
        if front:
            clean = self._path(t).alpha * batch.x0[:, :, :1]
            x_t = torch.cat([clean + _scattered(x_t[:, :, :1] - clean), x_t], dim=2)
        states = x_t.to(self.dtype)
        if self.spec.first_frame is not None:
            states = torch.cat(
                [states, self._image(batch.conditioning, frames + front).to(states)], dim=1
            )
        out = net(
            hidden_states=states.transpose(1, 2),
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            timestep=timestep_index(t, int(self.spec.path_constants["num_train_timesteps"])),
            ofs=None if self._net.ofs_embed_dim is None else states.new_full((1,), OFS),
            image_rotary_emb=self._rotary(height, width, frames + front, x_t.device),
            return_dict=False,
        )
        return out[0].transpose(1, 2)[:, :, front:].float()

    @cached_property
    def _net(self) -> SimpleNamespace:
        """The transformer's config by its attributes, as the pipeline reads it."""
        return SimpleNamespace(**{**self.config_defaults, **self.config})

    @cached_property
    def _path(self) -> Any:
        """The noising path."""
        from videotune.diffusion.loss import objective  # imports torch
        from videotune.diffusion.timesteps import TimestepSampler

        return objective("v", self.spec.path_constants, TimestepSampler()).path

    def _front(self, frames: int) -> int:
        """How many latent frames must stand in front of so many, for tokens to cover them all."""
        return -frames % self.spec.patch[0]

    def _rotary(self, height: int, width: int, frames: int, device: torch.device) -> Any:
        """The rotary embedding that the pipeline would hand over, or None where the model has another."""
        if not self._net.use_rotary_positional_embeddings:
            return None
        stride = self.spec.rules.spatial_stride
        shell = SimpleNamespace(config=self._net)
        part = SimpleNamespace(vae_scale_factor_spatial=stride, transformer=shell)
        return self.pipeline_class()._prepare_rotary_positional_embeddings(
            part, height, width, frames, device
        )

    def _image(self, conditioning: Conditioning, frames: int) -> Tensor:
        """An image's latents at the first of so many frames, zeros after it, (B,C,F,H,W).

        Where a frame stands in front of the clip's own, the image is there, as in the pipeline.
        """
        if "image" not in conditioning.extras:
            raise VideotuneError(f"{self.spec.title} continues an image, and none was given")
        image = conditioning.extras["image"]
        return torch.cat(
            [image, image.new_zeros(*image.shape[:2], frames - 1, *image.shape[3:])], dim=2
        )

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Some checkpoints have learned the positions of one shape, and 1.5 has a largest."""
        stride = self.spec.rules.spatial_stride
        net = self._net
        shape = net.sample_frames, net.sample_height * stride, net.sample_width * stride
        if net.use_learned_positional_embeddings and (frames, height, width) != shape:
            size = f"{shape[1]}x{shape[2]}"
            raise VideotuneError(
                f"{self.spec.title} knows {shape[0]} frames of {size} alone; these are {frames} of {height}x{width}. "
                f'Set video_config.frames={shape[0]} and resolution="{size}".'
            )
        if net.patch_size_t is not None and (height > shape[1] or width > shape[2]):
            most = f"at most {shape[1]}x{shape[2]} pixels; these are {height}x{width}"
            raise VideotuneError(f"{self.spec.title} takes {most}. Set a lower resolution.")

    def token_frames(self, hidden_states: Tensor, **_: Any) -> int:
        """A frame of 1.5 is a pair of latent frames; frames come before channels."""
        return hidden_states.shape[1] // self.spec.patch[0]

    def scheduler(self, shift: float | None) -> Any:
        """Raises VideotuneError for a ``shift``: a schedule of v-prediction is the one that the model was trained on."""
        if shift is not None:
            raise VideotuneError(
                f"sample.shift: {self.spec.title} has no shift to set; leave it out"
            )
        return super().scheduler(shift)

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """``conditioning.extras["image"]`` (B,C,1,H,W) goes on from an image, where the checkpoint takes one."""
        shape = request.shape
        self.check_shape(shape.frames, shape.height, shape.width)
        pipe = self.pipeline(nets, request.shift)
        words = {}
        if self.spec.first_frame is not None:
            pipe.prepare_latents = self._prepare_latents(
                pipe, conditioning
            )  # it has the true image
            words["image"] = torch.zeros(len(conditioning.text), 3, shape.height, shape.width)
        latents = self.run_pipeline(pipe, conditioning, unconditional, request, **words)
        front = self._front(self.spec.rules.latent_size(shape)[0])
        return latents.transpose(1, 2)[:, :, front:].float()

    def _prepare_latents(
        self, pipe: Any, conditioning: Conditioning
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """What stands in for the image pipeline's ``prepare_latents``: the same noise, and an image encoded before."""

        def prepare(
            _: Tensor, num: int, channels: int, frames: int, height: int, width: int, dtype: Any, device: Any,
            generators: Sequence[torch.Generator], latents: None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            size = (
                channels,
                1,
                height // pipe.vae_scale_factor_spatial,
                width // pipe.vae_scale_factor_spatial,
            )
            for generator in generators:  # the pipeline draws the image's latents first
                torch.randn(size, generator=generator)
            noise = diffusers.CogVideoXPipeline.prepare_latents(
                pipe, num, channels, frames, height, width, dtype, device, generators, latents
            )
            return noise, self._image(conditioning, noise.shape[1]).transpose(1, 2).to(
                device, dtype
            )

        return prepare

    def fingerprints(self) -> dict[str, str]:
        """The same VAE keeps more of a clip where the checkpoint takes an image."""
        prints = super().fingerprints()
        return (
            prints
            if self.spec.first_frame is None
            else prints | {"vae": f"{prints['vae']}-image"}
        )


def _schedule(path: Path) -> dict[str, float]:
    """What the scheduler's config says of the noising path.

    Raises VideotuneError where it is silent or names another kind of path.
    """
    config = read_config(path)
    missing = [name for name in SCHEDULE if config.get(name) is None]
    if missing:
        raise VideotuneError(
            f"{path} does not say {', '.join(missing)}; take the file that comes with the checkpoint"
        )
    wanted = {
        "prediction_type": "v_prediction",
        "beta_schedule": "scaled_linear",
        "trained_betas": None,
    }
    for name, value in wanted.items():
        if config.get(name) != value:
            raise VideotuneError(
                f"{path}: {name} is {config.get(name)!r}; CogVideoX is trained with {value!r}"
            )
    return {name: float(config[name]) for name in SCHEDULE}


def _scattered(noise: Tensor) -> Tensor:
    """The noise (B,C,1,H,W) of a frame laid out anew: none stays in place, and neighbours come from far apart.

    The pipeline begins with noise of its own in the frame in front of a clip. Here that noise is the first frame's own at
    other places: as good as independent, and no draw is needed that only the host could make.
    """
    flat = noise.flatten(1)
    size = flat.shape[1]
    step = next(step for step in count(int(size / 1.618) | 1, 2) if math.gcd(step, size) == 1)
    # step is odd and size even, so that i·step + 1 = i has no solution
    places = (torch.arange(size, device=noise.device) * step + 1) % size
    return flat[:, places].view_as(noise)
