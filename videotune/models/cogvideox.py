"""CogVideoX 2B, 5B and 1.5 5B (Yang et al. 2024, arXiv 2408.06072).

v-prediction, T5 text, and a causal video VAE. From text, and from a first image, whose
latents are extra input channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models import cogvideox_tiny
from videotune.models.base import DiffusersModel
from videotune.models.frame_in_front import scattered
from videotune.models.model_files import read_config
from videotune.types import Batch, ClipShape, Conditioning, Networks, SampleRequest

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
"""Constants of the noise path, read from the checkpoint: the schedulers' defaults fit
none.
"""

NEWER_MOST_FRAMES = 161
"""Frames of 1.5's longest clips, ten seconds; no config has it."""

NEWER_SHAPE = (81, 768, 1360)
"""(frames, height, width) that 1.5's authors sample; no config has it."""

FIRST_FRAME_SHARE = 0.95
"""Share of samples that are conditioned on their image when the authors train
image-to-video."""

LOG_MEAN = -3.0
"""Mean of the logarithm of the noise strength on an image."""

LOG_STD = 0.5
"""Standard deviation of that logarithm."""

OFS = 2.0
"""The pipeline's input of the offset embedding, which only 1.5 I2V has."""


class CogVideoX(DiffusersModel):
    """A CogVideoX checkpoint."""

    series = "CogVideoX"
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
        prediction="v",
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
            "attention": (
                r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
            ),
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
        caches_first_block=True,
        sample_guidance=6.0,
        licence="CogVideoX License",
        timestep_distribution="UNIFORM",
        prediction_constants={
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "num_train_timesteps": 1000.0,
            "snr_shift_scale": 1.0,
            "rescale_betas_zero_snr": 1.0,
        },
        sample_shape=(49, 480, 720),
        keeps_variance=True,
        schedulers=(
            "CogVideoXDDIMScheduler",
            "CogVideoXDPMScheduler",
            "DDIMScheduler",
            "DDPMScheduler",
            "DPMSolverMultistepScheduler",
            "EulerDiscreteScheduler",
            "EulerAncestralDiscreteScheduler",
            "LCMScheduler",
            "UniPCMultistepScheduler",
        ),
    )
    tiny_parts = cogvideox_tiny.PARTS
    tiny_variants = cogvideox_tiny.VARIANTS
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
        """Read the spec of a checkpoint.

        Raises:
            VideotuneError: for a checkpoint that is not a published CogVideoX.
        """
        configs = cls.read_configs(folder, lambda vae: 2 * vae["latent_channels"])
        net = configs.transformer
        vae = configs.vae
        from_image = configs.has_image_channels
        patch_frames = net.get("patch_size_t")
        is_rotary = net.get("use_rotary_positional_embeddings")
        # A learned table of positions fits one length; for another length the model
        # would use an untrained table without a warning.
        is_learned = bool(net.get("use_learned_positional_embeddings"))

        spatial = 2 ** (len(vae["block_out_channels"]) - 1)
        temporal = vae["temporal_compression_ratio"]
        height = net["sample_height"] * spatial
        width = net["sample_width"] * spatial
        rules = VideoRules(
            # The VAE works on pairs of latent frames after the first; 1.5's tokens
            # cover two.
            frame_step=0 if is_learned else 2 * temporal * (patch_frames or 1),
            frame_rest=net["sample_frames"] if is_learned else 1,
            side_multiple=spatial * net["patch_size"],
            fps=16.0 if patch_frames else 8.0,
            spatial_stride=spatial,
            temporal_stride=temporal,
        )
        if patch_frames:
            # The sample size is 1.5's largest size; the older models are trained on it.
            version = "1.5 5B"
            rules = replace(
                rules, most_frames=NEWER_MOST_FRAMES, most_side=min(height, width)
            )
            frames, newer_height, newer_width = NEWER_SHAPE
            sample_shape = (frames, min(newer_height, height), min(newer_width, width))
        else:
            version = "5B" if is_rotary else "2B"
            size = (height, width) if is_learned else None
            rules = replace(rules, most_frames=net["sample_frames"], size=size)
            sample_shape = (net["sample_frames"], height, width)

        resolution: int | str = round(math.sqrt(sample_shape[1] * sample_shape[2]))
        if is_learned:
            resolution = f"{height}x{width}"
        suffix = " I2V" if from_image else ""
        return replace(
            cls.spec,
            title=f"CogVideoX {version}{suffix}",
            rules=rules,
            latent_channels=configs.latent_channels,
            patch=(patch_frames or 1, net["patch_size"], net["patch_size"]),
            text_tokens=net["max_text_seq_length"],
            text_width=net["text_embed_dim"],
            image_conditioning="concat" if from_image else "none",
            default_resolution=resolution,
            licence=cls.spec.licence if is_rotary else "Apache-2.0",
            prediction_constants=_schedule(
                folder / "scheduler" / "scheduler_config.json"
            ),
            first_frame_probability=FIRST_FRAME_SHARE if from_image else None,
            image_noise=from_image,
            sample_shape=sample_shape,
            image_channels=(0, configs.latent_channels if from_image else 0),
        )

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return "image" (C,1,H,W), the first frame's latents as the pipeline scales
        them.

        With ``random``, the frame gets noise of random strength, and a latent is
        sampled. Without it, the latent is the mean of the frame as it is.
        """
        if self.spec.first_frame_probability is None:
            return {}
        vae = self.vae()
        frame = frames[:, :1]
        if random is not None:
            strength = math.exp(LOG_MEAN + LOG_STD * random.standard_normal())
            noise = random.standard_normal(tuple(frame.shape), "float32")
            frame = frame + strength * torch.from_numpy(noise).to(frame)

        distribution = vae.encode(frame[None].to(self.device)).latent_dist
        latent = distribution.mean[0].float().cpu()
        if random is not None:
            noise = random.standard_normal(tuple(latent.shape), "float32")
            latent = latent + distribution.std[0].float().cpu() * torch.from_numpy(
                noise
            )

        scale = self.latent_scale()
        return {
            "image": latent * (1 / scale if vae.config.invert_scale_latents else scale)
        }

    def blank_channels(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of ``image_states``."""
        if self.spec.first_frame_probability is None:
            return {}
        _, rows, columns = self.spec.rules.latent_size(shape)
        return {"image": torch.zeros(self.spec.latent_channels, 1, rows, columns)}

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents, rounded in the pipeline's order."""
        return 1 / self.latent_scale() * latents

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v; the network gets the integer timestep, and an image if it takes
        one.

        If a token covers two frames, a noisy copy of the first clean frame is put
        before the clip and removed from the output.
        """
        from videotune.diffusion.noise_paths import timestep_index  # imports torch

        rules = self.spec.rules
        front = self._front(x_t.shape[2])
        frames, rows, columns = x_t.shape[2:]
        height = rows * rules.spatial_stride
        width = columns * rules.spatial_stride
        self.check_shape((frames - 1) * rules.temporal_stride + 1, height, width)
        if front:
            clean = self._path(t).alpha * batch.x0[:, :, :1]
            x_t = torch.cat([clean + scattered(x_t[:, :, :1] - clean), x_t], dim=2)
        states = x_t.to(self.dtype)
        if self.spec.first_frame_probability is not None:
            states = torch.cat(
                [states, self._image(batch.conditioning, frames + front).to(states)],
                dim=1,
            )
        out = net(
            hidden_states=states.transpose(1, 2),
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            timestep=timestep_index(
                t, int(self.spec.prediction_constants["num_train_timesteps"])
            ),
            ofs=None if self._net.ofs_embed_dim is None else states.new_full((1,), OFS),
            image_rotary_emb=self._rotary(height, width, frames + front, x_t.device),
            return_dict=False,
        )
        return out[0].transpose(1, 2)[:, :, front:].float()

    @cached_property
    def _net(self) -> SimpleNamespace:
        """The transformer's config with attribute access, as the pipeline reads it."""
        return SimpleNamespace(**{**self.config_defaults, **self.config})

    @cached_property
    def _path(self) -> Any:
        """The noising path."""
        from videotune.diffusion.loss import objective_for_prediction  # imports torch
        from videotune.diffusion.timesteps import TimestepSampler

        return objective_for_prediction(
            "v", self.spec.prediction_constants, TimestepSampler()
        ).noise_path

    def _front(self, frames: int) -> int:
        """Return how many latent frames to prepend so that tokens cover all frames."""
        return -frames % self.spec.patch[0]

    def _rotary(
        self, height: int, width: int, frames: int, device: torch.device
    ) -> Any:
        """Return the pipeline's rotary embedding, or None if the model has none."""
        if not self._net.use_rotary_positional_embeddings:
            return None
        stride = self.spec.rules.spatial_stride
        shell = SimpleNamespace(config=self._net)
        part = SimpleNamespace(vae_scale_factor_spatial=stride, transformer=shell)
        return self.pipeline_class()._prepare_rotary_positional_embeddings(
            part, height, width, frames, device
        )

    def _image(self, conditioning: Conditioning, frames: int) -> Tensor:
        """Return an image's latents at the first of ``frames`` frames, then zeros,
        (B,C,F,H,W).

        If a frame is prepended to the clip, the image is there, as in the pipeline.
        """
        if "image" not in conditioning.extras:
            raise VideotuneError(
                f"{self.spec.title} continues an image, and none was given"
            )
        image = conditioning.extras["image"]
        return torch.cat(
            [image, image.new_zeros(*image.shape[:2], frames - 1, *image.shape[3:])],
            dim=2,
        )

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Raise if the size is not the one with learned positions, or above 1.5's
        largest.
        """
        stride = self.spec.rules.spatial_stride
        net = self._net
        shape = net.sample_frames, net.sample_height * stride, net.sample_width * stride
        if net.use_learned_positional_embeddings and (frames, height, width) != shape:
            size = f"{shape[1]}x{shape[2]}"
            raise VideotuneError(
                f"{self.spec.title} takes only {shape[0]} frames of {size}; these are {frames} of {height}x{width}. "
                f'Set video_config.frames={shape[0]} and resolution="{size}".'
            )
        if net.patch_size_t is not None and (height > shape[1] or width > shape[2]):
            most = f"at most {shape[1]}x{shape[2]} pixels; these are {height}x{width}"
            raise VideotuneError(
                f"{self.spec.title} takes {most}. Set a lower resolution."
            )

    def token_frames(self, hidden_states: Tensor, **_: Any) -> int:
        """Return the frames of the video tokens: pairs of latent frames in 1.5."""
        return hidden_states.shape[1] // self.spec.patch[0]

    def scheduler(self, shift: float | None) -> Any:
        """Load the scheduler.

        Raises:
            VideotuneError: for a ``shift``; v-prediction needs the schedule of
                training.
        """
        if shift is not None:
            raise VideotuneError(
                f"sample.shift: {self.spec.title} has no shift. Remove the key."
            )
        return super().scheduler(shift)

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents; ``extras["image"]`` (B,C,1,H,W) is the image to continue."""
        shape = request.shape
        self.check_shape(shape.frames, shape.height, shape.width)
        pipe = self.pipeline(nets, request.shift)
        arguments = {}
        if self.spec.first_frame_probability is not None:
            pipe.prepare_latents = self._prepare_latents(
                pipe, conditioning
            )  # it has the true image
            arguments["image"] = torch.zeros(
                len(conditioning.text), 3, shape.height, shape.width
            )
        latents = self.run_pipeline(
            pipe, conditioning, unconditional, request, **arguments
        )
        front = self._front(self.spec.rules.latent_size(shape)[0])
        return latents.transpose(1, 2)[:, :, front:].float()

    def _prepare_latents(
        self, pipe: Any, conditioning: Conditioning
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Replace the pipeline's ``prepare_latents``: same noise, encoded image."""

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
                pipe,
                num,
                channels,
                frames,
                height,
                width,
                dtype,
                device,
                generators,
                latents,
            )
            return noise, self._image(conditioning, noise.shape[1]).transpose(1, 2).to(
                device, dtype
            )

        return prepare

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; with an image, cached entries of the VAE hold more."""
        prints = super().fingerprints()
        return (
            prints
            if self.spec.first_frame_probability is None
            else prints | {"vae": f"{prints['vae']}-image"}
        )


def _schedule(path: Path) -> dict[str, float]:
    """Read the constants of the noise path from the scheduler's config.

    Raises:
        VideotuneError: if one is missing or the path is of another kind.
    """
    config = read_config(path)
    missing = [name for name in SCHEDULE if config.get(name) is None]
    if missing:
        raise VideotuneError(
            f"{path} does not say {', '.join(missing)}; copy the file that comes with the checkpoint"
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
