"""Wan 2.1 and 2.2 (Wan team 2025, arXiv 2503.20314): flow matching, UMT5 text, a causal
video VAE.

2.1 from text (1.3B, 14B) and from an image (14B), 2.2 TI2V-5B from either, and 2.2 A14B
from text and from an image, with one expert for high noise and one for low noise.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import Expert, ModelSpec, VideoRules
from videotune.models import wan_tiny
from videotune.models.base import DiffusersModel
from videotune.models.checkpoint import ImageEncoderParts
from videotune.models.fingerprint import fingerprint
from videotune.models.key_names import KeyRules
from videotune.models.model_files import read_config
from videotune.models.pipelines import vae_stand_in
from videotune.models.single_samples import one_by_one
from videotune.models.wan_conditions import (
    IN_PLACE,
    ReferencedNetworks,
    folded_mask,
    give_cells,
    give_channels,
    with_reference,
)
from videotune.models.wan_kinds import clip_vision_numbers, kind_of
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    ConditionPixels,
    Networks,
    SampleRequest,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

SIZES = {(1536, 30): "1.3B", (3072, 30): "5B", (5120, 40): "14B"}
"""(width, blocks) of the published transformers."""

COMFYUI_NAMES = (
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.add_([kv])_proj(?=\.|$)", r".\1_img"),
    (r"\.to_([qkv])(?=\.|$)", r".\1"),
    (r"\.to_out\.0(?=\.|$)", ".o"),
    (r"\.ffn\.net\.0\.proj(?=\.|$)", ".ffn.0"),
    (r"\.ffn\.net\.2(?=\.|$)", ".ffn.2"),
)


# The authors count the norm before cross attention third, diffusers counts it
# second.
ORIGINAL_NAMES: KeyRules = (
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm_third."),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
    (r"\.norm_third\.", ".norm3."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^proj_out\.", "head.head."),
    ("^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.norm_added_k\.", ".norm_k_img."),
    *COMFYUI_NAMES,
)


class Wan(DiffusersModel):
    """A Wan checkpoint."""

    series = "Wan 2.1 and 2.2"
    spec = ModelSpec(
        name="wan",
        aliases=(
            "WanPipeline",
            "WanImageToVideoPipeline",
            "wan2.1",
            "wan2.2",
            "wan21",
            "wan22",
            "WAN_2_2",
            "WAN_2_1",
        ),
        title="Wan 2.1 T2V",
        prediction="flow",
        rules=VideoRules(
            frame_step=4,
            frame_rest=1,
            side_multiple=16,
            fps=16.0,
            spatial_stride=8,
            temporal_stride=4,
        ),
        text_tokens=512,
        blocks=("blocks",),
        lora_targets={
            "attention": (r"blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",),
            "feed_forward": (r"blocks\.\d+\.ffn\.(net\.0\.proj|net\.2)",),
            "linear": (
                r"blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",
                r"blocks\.\d+\.ffn\.(net\.0\.proj|net\.2)",
            ),
            "all": (r"blocks\..+",),
            "self_attention": (r"blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",),
            "cross_attention": (r"blocks\.\d+\.attn2\.(to_q|to_k|to_v|to_out\.0)",),
        },
        splits_tokens=True,
        attention_heads=12,
        default_resolution=480,
        timestep_shift=3.0,
        sample_steps=30,
        caches_first_block=True,
        sample_guidance=5.0,
        licence="Apache-2.0",
        further_conditions=IN_PLACE,
        schedulers=(
            "UniPCMultistepScheduler",
            "FlowMatchEulerDiscreteScheduler",
            "FlowMatchHeunDiscreteScheduler",
            "FlowMatchLCMScheduler",
            "DPMSolverMultistepScheduler",
            "DPMSolverSinglestepScheduler",
        ),
    )
    variants: ClassVar[tuple[str, ...]] = (
        "t2v",
        "i2v",
        "flf2v",
        "ti2v",
        "t2v-a14b",
        "i2v-a14b",
    )
    transformer_class = "WanTransformer3DModel"
    vae_class = "AutoencoderKLWan"
    image_encoder_parts = ImageEncoderParts(
        "CLIPVisionModel", "CLIPImageProcessor", "image_processor"
    )
    pipelines: ClassVar[tuple[str, ...]] = ("WanPipeline", "WanImageToVideoPipeline")
    text_encoders = {"text_encoder": "UMT5EncoderModel"}
    embedding_names = {"text_encoder": "umt5xxl"}
    comfyui_names = COMFYUI_NAMES
    original_names: ClassVar[KeyRules | None] = ORIGINAL_NAMES
    config_defaults = {"image_dim": None}
    tiny_parts = wan_tiny.PARTS
    tiny_variants = wan_tiny.VARIANTS

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        The shift of training is 3 for 2.1: its schedulers have it, and its authors
        sample with it at 480p. For 2.2 it is 5, with which its authors sample TI2V-5B
        and I2V-A14B. They sample T2V-A14B with 12, which would leave the expert for low
        noise less than a third of the samples; diffusers uses 3.

        Raises:
            VideotuneError: for a Wan checkpoint of another kind.
        """
        index = read_config(folder / "model_index.json")
        configs = cls.read_configs(folder, _channels_with_image)
        net = configs.transformer
        from_image = configs.has_image_channels
        is_ti2v = bool(index.get("expand_timesteps"))
        experts = _experts(folder, index)
        has_experts = len(experts) > 1
        is_wan22 = is_ti2v or has_experts
        spatial = configs.vae.get("scale_factor_spatial", 8)
        temporal = configs.vae.get("scale_factor_temporal", 4)
        patch = tuple(net["patch_size"])

        kind = kind_of(folder, net, from_image=from_image, is_ti2v=is_ti2v)
        guidance = cls.spec.sample_guidance
        if has_experts:
            guidance = 3.5 if from_image else 4.0

        version = "2.2" if is_wan22 else "2.1"
        return replace(
            cls.spec,
            title=f"Wan {version} {kind.name} {_size(net, has_experts)}".rstrip(),
            rules=VideoRules(
                frame_step=temporal,
                frame_rest=1,
                side_multiple=spatial * patch[1],
                fps=24.0 if is_ti2v else 16.0,
                spatial_stride=spatial,
                temporal_stride=temporal,
            ),
            latent_channels=configs.latent_channels,
            patch=patch,
            attention_heads=net["num_attention_heads"],
            text_width=net["text_dim"],
            image_conditioning=kind.image_conditioning,
            first_frame_probability=kind.first_frame_share,
            further_conditions=kind.conditions,
            experts=experts,
            timestep_shift=5.0 if is_wan22 else cls.spec.timestep_shift,
            sample_guidance=guidance,
            # Of every latent frame, none of the first one alone.
            image_channels=(net["in_channels"] - configs.latent_channels, 0),
            image_numbers=kind.images * clip_vision_numbers(folder)
            if kind.images
            else 0,
        )

    @classmethod
    def clean(cls, caption: str) -> str:
        """Clean a caption as the pipeline does, without importing diffusers."""
        import ftfy  # its import takes a tenth of a second

        return super().clean(html.unescape(html.unescape(ftfy.fix_text(caption))))

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states without the zeros after the caption; the pipeline feeds no
        mask.
        """
        return {"text": states["text"][: self.text_length(caption)]}

    @property
    def _uses_clip_vision(self) -> bool:
        """Whether the denoiser also reads CLIP's states of the image (2.1 I2V)."""
        return self.config.get("image_dim") is not None

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return what the image-to-video pipeline makes of the first frame, and for
        FLF2V of the last one.
        """
        if self.spec.image_conditioning != "concat":
            return {}
        known = torch.zeros(frames.shape[1:], dtype=torch.bool)
        known[0] = True
        # FLF2V never runs without a last frame, so the clip's entry shows that too.
        if "last_frame" in self.spec.cached_with_latents:
            known[-1] = True
        return self.channel_states(ConditionPixels(frames, known))

    def channel_states(self, pixels: ConditionPixels) -> dict[str, Tensor]:
        """Return what the image-to-video pipeline makes of known pixels, in the run's
        dtype.

        "image" (4+C,F,H,W): a mask, 1 in cells of which all is known, for each pixel
        frame; and the latents of the clip with grey in the place of all other pixels.
        With CLIP also "clip" (257, 1280), the states of the first frame, or for FLF2V
        (514, 1280) with those of the last one; zeros if a frame is not known as a whole.
        """
        visible = pixels.frames.where(pixels.known, torch.zeros(()))
        with self.vae_lock, torch.no_grad():
            vae = self.vae()
            distribution = vae.encode(visible[None].to(self.device)).latent_dist
            mean, deviation = self._statistics()
            # In the pipeline's order, to the bit.
            latents = (distribution.mode()[0] - mean) * (1 / deviation)

        mask = folded_mask(pixels.known, self.spec.rules)
        image = torch.cat([mask, latents.float().cpu()])
        states = {"image": image.to(self.dtype)}

        if self._uses_clip_vision:
            ends = (0, -1) if "last_frame" in self.spec.cached_with_latents else (0,)
            states["clip"] = torch.cat(
                [self._clip_vision_states(pixels, end) for end in ends]
            )
        return states

    def _statistics(self) -> tuple[Tensor, Tensor]:
        statistics = self.latent_statistics()
        assert statistics is not None, "a Wan VAE has statistics of each channel"
        return statistics

    def _clip_vision_states(self, pixels: ConditionPixels, frame: int) -> Tensor:
        """Return CLIP's states of a frame; zeros if it is not known as a whole."""
        if not pixels.known[frame].all():
            return torch.zeros(
                self._clip_vision_tokens(), self._clip_vision_width, dtype=self.dtype
            )
        from PIL import Image  # keeps the start light

        pipe = diffusers.WanImageToVideoPipeline(None, None, vae=None, scheduler=None)
        processor, encoder = self.image_encoder()
        pipe.image_processor = processor
        pipe.image_encoder = encoder
        values = ((pixels.frames[:, frame] + 1) * 127.5).round().clamp(0, 255).byte()
        picture = Image.fromarray(values.permute(1, 2, 0).cpu().numpy())
        with torch.no_grad():
            clip_vision_states = pipe.encode_image(picture, self.device)[0]
        return clip_vision_states.to(self.dtype).cpu()

    @cached_property
    def _clip_vision_width(self) -> int:
        config = read_config(self.folder / "image_encoder" / "config.json")
        return int(config["hidden_size"])

    def _clip_vision_tokens(self) -> int:
        """Return how many states CLIP gives of one image; FLF2V has those of two."""
        images = 2 if "last_frame" in self.spec.cached_with_latents else 1
        return self.spec.image_numbers // self._clip_vision_width // images

    def blank_channels(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of ``channel_states``."""
        if self.spec.image_conditioning != "concat":
            return {}
        channels, _ = self.spec.image_channels
        size = (channels, *self.spec.rules.latent_size(shape))
        states = {"image": torch.zeros(size, dtype=self.dtype)}
        if self._uses_clip_vision:
            tokens = self.spec.image_numbers // self._clip_vision_width
            states["clip"] = torch.zeros(
                tokens, self._clip_vision_width, dtype=self.dtype
            )
        return states

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0.

        The timestep input is 1000 · t in float32, and 0 for tokens of conditioning
        frames.
        """
        extras = batch.conditioning.extras
        latents = x_t.to(self.dtype)
        if self.spec.image_conditioning == "concat":
            latents = torch.cat([latents, extras["image"].to(self.dtype)], dim=1)
        clip_vision_states = None
        if "clip" in extras:
            # (B, images · tokens, width) -> (B · images, tokens, width): the network takes
            # one CLIP image in each row of the batch.
            states = extras["clip"].to(self.dtype)
            clip_vision_states = states.unflatten(
                1, (-1, self._clip_vision_tokens())
            ).flatten(0, 1)
        timestep = self.model_timesteps(x_t, t, batch)
        if "reference" in extras:
            latents, timestep = with_reference(
                latents, timestep, extras["reference"], self.spec.patch
            )
        output = net(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            encoder_hidden_states_image=clip_vision_states,
            return_dict=False,
        )
        # Without the frames of the reference, which are appended.
        return output[0][:, :, : x_t.shape[2]].float()

    def _referenced(self, nets: Networks, conditioning: Conditioning) -> Networks:
        """Return networks that append the samples' reference to their inputs, if there
        is one.
        """
        reference = conditioning.extras.get("reference")
        if reference is None:
            return nets
        return ReferencedNetworks(nets, reference, self.spec.patch)

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents; an image is in the ``extras`` (I2V) or in ``request.first``,
        other clean cells are in ``request.known``.

        Samples with an image are sampled one by one, because the pipeline takes only
        one image.
        """
        is_in_place = self.spec.image_conditioning != "concat"
        if is_in_place and request.first is None and request.known is None:
            nets = self._referenced(nets, conditioning)
            return super().sample(nets, conditioning, unconditional, request)

        samples = []
        for positive, negative, single in one_by_one(
            conditioning, unconditional, request
        ):
            image = positive.extras.get("image")
            if single.first is not None:
                first = single.first
            elif single.known is not None:
                first = single.known[:, :, :1]
            else:
                assert image is not None, "image-to-video has channels of an image"
                first = image[:, -self.spec.latent_channels :]

            # Stand-ins return the states that the pipeline's encoders would compute.
            pipe = self.pipeline(
                self._referenced(nets, positive),
                request.shift,
                diffusers.WanImageToVideoPipeline,
                expand_timesteps=is_in_place,
            )
            if single.known is not None and single.known_mask is not None:
                give_cells(pipe, single.known, single.known_mask)
            elif image is not None:
                give_channels(pipe, image)
            pipe.vae = vae_stand_in(
                self.spec, first.float().to(self.device), self.device
            )
            if "clip" in positive.extras:
                clip_vision_states = positive.extras["clip"]
                clip_vision_states = clip_vision_states.unflatten(
                    1, (-1, self._clip_vision_tokens())
                )[0]
                pipe.encode_image = lambda *_, states=clip_vision_states: states.to(
                    self.device
                )
            samples.append(self.run_pipeline(pipe, positive, negative, single))
        return torch.cat(samples).float()

    def run_pipeline(
        self,
        pipe: Any,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
        **arguments: Any,
    ) -> Tensor:
        """Run the pipeline with a blank image and a second guidance, if it takes them."""
        if "image_processor" in pipe.components:
            shape = request.shape
            arguments["image"] = torch.zeros(1, 3, shape.height, shape.width)
        if len(self.spec.experts) > 1:
            guidance_2 = request.guidance_2
            arguments["guidance_scale_2"] = (
                request.guidance if guidance_2 is None else guidance_2
            )
        return super().run_pipeline(
            pipe, conditioning, unconditional, request, **arguments
        )

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes.

        For image-to-video, the VAE's includes the image encoder and the denoiser's
        dtype: entries of the cache also hold the image's states.
        """
        prints = super().fingerprints()
        if self.spec.image_conditioning == "concat":
            image_parts = (
                ("image_encoder", "image_processor") if self._uses_clip_vision else ()
            )
            image_prints = [fingerprint(self.folder / part) for part in image_parts]
            images = (
                "images" if "last_frame" in self.spec.cached_with_latents else "image"
            )
            prints["vae"] = "-".join(
                [prints["vae"], images, *image_prints, str(self.dtype)]
            )
        return prints


def _channels_with_image(vae: Mapping[str, Any]) -> int:
    """Return the input channels of image-to-video: noise, the mask, and the image."""
    return int(2 * vae["z_dim"] + vae.get("scale_factor_temporal", 4))


def _size(net: Mapping[str, Any], has_experts: bool) -> str:
    """Return the published name of the transformer's size, or ""."""
    width = net["num_attention_heads"] * net["attention_head_dim"]
    size = SIZES.get((width, net["num_layers"]), "")
    return f"A{size}" if size and has_experts else size


def _experts(folder: Path, index: Mapping[str, Any]) -> tuple[Expert, ...]:
    """Return one denoiser, or for A14B one above and one below the boundary noise
    level.
    """
    boundary = index.get("boundary_ratio")
    has_second = (folder / "transformer_2").is_dir()
    if boundary is None and not has_second:
        return Wan.spec.experts
    if boundary is None or not has_second:
        missing = (
            "boundary_ratio in its model_index.json" if has_second else "transformer_2/"
        )
        raise VideotuneError(
            f"{folder}: a Wan checkpoint with two experts (A14B) needs {missing}"
        )
    return Expert("high", float(boundary), 1.0), Expert("low", 0.0, float(boundary))
