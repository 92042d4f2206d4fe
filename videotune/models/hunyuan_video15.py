"""HunyuanVideo 1.5 from text and from an image (Wu et al. 2025, arXiv 2511.18870).

Flow matching with classifier-free guidance; Qwen2.5-VL for the caption, ByT5 for text in
quotes, SigLIP for an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models import hunyuan_video15_tiny
from videotune.models.checkpoint import ImageEncoderParts
from videotune.models.fingerprint import fingerprint
from videotune.models.hunyuan_video15_attention import KeyMaskProcessor
from videotune.models.hunyuan_video15_encoder import save_memory
from videotune.models.hunyuan_video15_names import (
    AUTHORS_FILE_NAMES,
    BLOCK_NAMES,
    COMFYUI_FILE_NAMES,
    COMFYUI_NAMES,
)
from videotune.models.hunyuan_video15_text import GLYPH_TOKENS, HunyuanVideo15Text
from videotune.models.key_names import KeyRules
from videotune.models.model_files import read_config
from videotune.models.pipelines import (
    FLOW_SCHEDULERS,
    vae_stand_in,
    without_warnings,
)
from videotune.models.planning_mode import select_all
from videotune.models.sample_groups import predict_in_groups
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    FillFn,
    Networks,
    SampleRequest,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

VISION_TOKENS = 729
"""States of an image that the pipeline from text feeds as zeros."""

SIZES = {(2048, 54): " 8.3B"}
"""(width, blocks) of the published transformers."""

ATTENTION = (
    r"transformer_blocks\.\d+\.attn\."
    r"(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
)
FEED_FORWARD = r"transformer_blocks\.\d+\.(ff|ff_context)\.(net\.0\.proj|net\.2)"


class HunyuanVideo15(HunyuanVideo15Text):
    """A HunyuanVideo 1.5 checkpoint."""

    series = "HunyuanVideo 1.5"
    spec = ModelSpec(
        name="hunyuan_video15",
        aliases=(
            "HunyuanVideo15Pipeline",
            "HunyuanVideo15ImageToVideoPipeline",
            "hunyuan_video_15",
            "hunyuan_video_1_5",
            "hunyuan1.5",
            "hunyuanvideo-1.5",
            "hunyuan-video-1.5",
            "hv_1_5",
        ),
        title="HunyuanVideo 1.5 T2V 8.3B",
        prediction="flow",
        rules=VideoRules(
            frame_step=4,
            frame_rest=1,
            side_multiple=16,
            fps=24.0,
            spatial_stride=16,
            temporal_stride=4,
        ),
        text_tokens=1000,
        text_width=3584,
        text_numbers=GLYPH_TOKENS * 1472,
        blocks=("transformer_blocks",),
        lora_targets={
            "attention": (ATTENTION,),
            "feed_forward": (FEED_FORWARD,),
            "linear": (ATTENTION, FEED_FORWARD),
            "all": (r"transformer_blocks\..+",),
        },
        default_resolution=640,
        timestep_shift=3.0,
        sample_steps=50,
        sample_guidance=6.0,
        licence="Tencent Hunyuan Community License",
        latent_channels=32,
        patch=(1, 1, 1),
        keeps_variance=True,
        # Without an image its states are masked.
        idle_paths=(r"image_embedder(\.|$)",),
        fused_modules={
            "comfyui": (
                ("transformer_blocks", ("attn.to_q", "attn.to_k", "attn.to_v")),
                (
                    "transformer_blocks",
                    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                ),
            )
        },
        schedulers=FLOW_SCHEDULERS,
    )
    variants: ClassVar[tuple[str, ...]] = ("t2v", "i2v")
    transformer_class = "HunyuanVideo15Transformer3DModel"
    vae_class = "AutoencoderKLHunyuanVideo15"
    image_encoder_parts = ImageEncoderParts(
        "SiglipVisionModel", "SiglipImageProcessor", "feature_extractor"
    )
    pipelines: ClassVar[tuple[str, ...]] = (
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
    )
    attention = "attn"
    load_lora = "pipe.transformer.load_lora_adapter"
    loads_comfyui_names = False
    comfyui_names = COMFYUI_NAMES
    original_names: ClassVar[KeyRules | None] = BLOCK_NAMES
    file_names = (AUTHORS_FILE_NAMES, COMFYUI_FILE_NAMES)
    no_cuda_graphs = "the host waits for the card to learn which tokens are text"

    tiny_parts = hunyuan_video15_tiny.PARTS
    tiny_variants = hunyuan_video15_tiny.VARIANTS

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        The shift of training stays 3, with which its authors train. The scheduler's is
        for sampling: 5 at 480p, 7 and 9 at 720p. The guidance is that of the guider; a
        distilled checkpoint has 1.

        Raises:
            VideotuneError: for a checkpoint of another kind.
        """
        index = read_config(folder / "model_index.json")
        configs = cls.read_configs(folder, lambda vae: 2 * vae["latent_channels"] + 1)
        net = configs.transformer
        if not configs.has_image_channels:
            raise VideotuneError(
                f"{folder}: its transformer reads {net['in_channels']} channels; noise, an image and a mask are "
                f"{2 * configs.latent_channels + 1}. Take a HunyuanVideo 1.5 checkpoint from text or from an image"
            )
        if net.get("use_meanflow"):
            raise VideotuneError(
                f"{folder}: this HunyuanVideo 1.5 checkpoint is distilled to few steps (use_meanflow), and "
                "is not trained here. Use the checkpoint that it was made from"
            )

        from_image = index.get("_class_name") == cls.pipelines[1]
        spatial = configs.vae["spatial_compression_ratio"]
        temporal = configs.vae["temporal_compression_ratio"]
        patch = (net["patch_size_t"], net["patch_size"], net["patch_size"])
        width = net["num_attention_heads"] * net["attention_head_dim"]
        size = SIZES.get((width, net["num_layers"]), "")
        return replace(
            cls.spec,
            title=f"HunyuanVideo 1.5 {'I2V' if from_image else 'T2V'}{size}",
            rules=VideoRules(
                frame_step=temporal * patch[0],
                frame_rest=1,
                side_multiple=spatial * patch[1],
                fps=24.0,
                spatial_stride=spatial,
                temporal_stride=temporal,
            ),
            latent_channels=configs.latent_channels,
            patch=patch,
            text_width=net["text_embed_dim"],
            text_numbers=GLYPH_TOKENS * net["text_embed_2_dim"],
            default_resolution=net["target_size"],
            sample_guidance=float(_guider_config(folder)["guidance_scale"]),
            image_conditioning="concat" if from_image else "none",
            first_frame_probability=1.0 if from_image else None,
            predicts_images_apart=from_image,
            image_channels=(0, configs.latent_channels if from_image else 0),
            image_numbers=_vision_numbers(folder) if from_image else 0,
            idle_paths=() if from_image else cls.spec.idle_paths,
        )

    # images

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; the VAE encodes clips in little memory."""
        net = super().part(name, fill)
        if name == "vae":
            save_memory(net)
        return net

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return what the image-to-video pipeline makes of the first frame.

        "image" (C,1,H,W), its latents, the mean of their distribution; and "vision"
        (N,V), SigLIP's states in the run's dtype.
        """
        if self.spec.image_conditioning != "concat":
            return {}
        from PIL import Image  # keeps the start light

        frame = frames[:, :1]
        distribution = self.vae().encode(frame[None].to(self.device)).latent_dist
        latents = distribution.mode()[0] * self.latent_scale()

        values = ((frame[:, 0] + 1) * 127.5).round().clamp(0, 255).byte()
        picture = Image.fromarray(values.permute(1, 2, 0).cpu().numpy())
        processor, encoder = self.image_encoder()
        vision = self.pipeline_class()._get_image_embeds(
            encoder, processor, picture, self.device
        )
        return {
            "image": latents.float().cpu(),
            "vision": vision[0].to(self.dtype).cpu(),
        }

    @cached_property
    def _vision_size(self) -> tuple[int, int]:
        """States of an image, and the width of each."""
        width: int = self.config["image_embed_dim"]
        if not self.spec.image_numbers:
            return VISION_TOKENS, width
        return self.spec.image_numbers // width, width

    def blank_channels(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of ``image_states``."""
        if self.spec.image_conditioning != "concat":
            return {}
        _, rows, columns = self.spec.rules.latent_size(shape)
        return {
            "image": torch.zeros(self.spec.latent_channels, 1, rows, columns),
            "vision": torch.zeros(*self._vision_size, dtype=self.dtype),
        }

    # the denoiser

    def denoiser(
        self,
        expert: str | None = None,
        device: torch.device | None = None,
        fill: FillFn = None,
    ) -> nn.Module:
        """Load the transformer, with attention under a mask of keys.

        It embeds timesteps in their own dtype and computes in the run's, so float32
        timesteps are not rounded before they are embedded.
        """
        net = super().denoiser(expert, device, fill)
        for block in net.get_submodule("transformer_blocks").children():
            block.get_submodule("attn").set_processor(KeyMaskProcessor())  # type: ignore[operator]
        embedder = net.get_submodule("time_embed.timestep_embedder")
        embedder.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].to(self.dtype),)
        )
        return net

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0; the timestep input is 1000 · t in float32.

        The network decides by all samples whether they have an image, so samples with
        one and samples without are predicted apart.
        """
        predict = partial(self._predict_one_kind, net)
        image = batch.conditioning.extras.get("image")
        if image is None:
            return predict(x_t, t, batch)
        has_image = [bool(sample) for sample in _has_image(image).cpu()]
        return predict_in_groups(predict, has_image, x_t, t, batch)

    def _predict_one_kind(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch
    ) -> Tensor:
        conditioning = batch.conditioning
        assert conditioning.text_mask is not None
        extras = conditioning.extras
        image_channels, vision = self._image_inputs(conditioning, x_t)

        output = net(
            hidden_states=torch.cat([x_t.to(self.dtype), image_channels], dim=1),
            timestep=t.float() * 1000,
            encoder_hidden_states=conditioning.text.to(self.dtype),
            encoder_attention_mask=conditioning.text_mask.to(self.dtype),
            encoder_hidden_states_2=extras["glyph"].to(self.dtype),
            encoder_attention_mask_2=extras["glyph_mask"].to(self.dtype),
            image_embeds=vision,
            return_dict=False,
        )
        return output[0].float()

    def _image_inputs(
        self, conditioning: Conditioning, latents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the channels of images and masks (B,C+1,F,H,W), and SigLIP's states.

        All are zeros for samples without an image. The mask is 1 at the first frame of
        the others.
        """
        samples, _, frames, rows, columns = latents.shape
        image = conditioning.extras.get("image")
        if image is None:
            channels = self.spec.latent_channels + 1
            size = (samples, channels, frames, rows, columns)
            vision = latents.new_zeros(samples, *self._vision_size, dtype=self.dtype)
            return latents.new_zeros(size, dtype=self.dtype), vision

        mask = _has_image(image).view(-1, 1, 1, 1, 1).expand(-1, -1, -1, rows, columns)
        first = torch.cat([image, mask.to(image.dtype)], dim=1).to(self.dtype)
        later = first.new_zeros(*first.shape[:2], frames - 1, rows, columns)
        vision = conditioning.extras["vision"].to(self.dtype)
        return torch.cat([first, later], dim=2), vision

    def planning_mode(self) -> AbstractContextManager[Any]:
        """Return a context in which the network, which selects text by masks, runs on
        fake tensors.
        """
        mode: AbstractContextManager[Any] = select_all()
        return mode

    # samples

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning as arguments of the pipeline."""
        assert conditioning.text_mask is not None
        extras = conditioning.extras
        return {
            "prompt_embeds": conditioning.text.to(self.device, self.dtype),
            "prompt_embeds_mask": conditioning.text_mask.to(self.device),
            "prompt_embeds_2": extras["glyph"].to(self.device, self.dtype),
            "prompt_embeds_mask_2": extras["glyph_mask"].to(self.device),
        }

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the checkpoint's pipeline over ``nets``, with its guider, and a stand-in
        of the VAE, which the pipeline asks for its strides.
        """
        parts.setdefault("guider", self._guider(self.spec.sample_guidance))
        parts.setdefault("vae", vae_stand_in(self.spec, None, self.device))
        return super().pipeline(nets, shift, cls, **parts)

    def _guider(self, guidance: float) -> Any:
        """Return the checkpoint's guider with this guidance."""
        config = {**_guider_config(self.folder), "guidance_scale": guidance}
        with without_warnings(diffusers.BaseGuidance):
            return diffusers.ClassifierFreeGuidance.from_config(config)

    def call_arguments(self, request: SampleRequest) -> dict[str, Any]:
        """Return the size; guidance is the guider's, and the pipeline from an image has
        its size.
        """
        from PIL import Image  # keeps the start light

        shape = request.shape
        if self.spec.image_conditioning == "concat":
            return {"image": Image.new("RGB", (shape.width, shape.height))}
        return {"height": shape.height, "width": shape.width}

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents; an image is in the ``extras``.

        The pipeline gets the image's states and the requested size, where it would
        encode an image and choose a size by it.
        """
        guidance = 1.0 if unconditional is None else request.guidance
        pipe = self.pipeline(nets, request.shift, guider=self._guider(guidance))

        if self.spec.image_conditioning == "concat":
            shape = request.shape
            size = (shape.height, shape.width)
            latents = torch.empty(
                len(request.seeds),
                self.spec.latent_channels,
                *self.spec.rules.latent_size(shape),
                device=self.device,
            )
            inputs = conditioning.map(lambda tensor: tensor.to(self.device))
            channels, vision = self._image_inputs(inputs, latents)
            pipe.video_processor.calculate_default_height_width = lambda **_: size
            pipe.encode_image = lambda **_: vision
            pipe.prepare_cond_latents_and_mask = lambda **_: (
                channels[:, :-1],
                channels[:, -1:],
            )
        return self.run_pipeline(pipe, conditioning, unconditional, request).float()

    # names in other programs

    def lora_reader(self) -> Any:
        """Return diffusers' modular pipeline of the model: the usual ones read no LoRA."""
        return diffusers.HunyuanVideo15ModularPipeline

    def single_file_names(self) -> KeyRules | None:
        """Return the names of the file that ComfyUI reads, which joins q, k and v."""
        return COMFYUI_FILE_NAMES

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; with an image, cached entries of the VAE also hold
        SigLIP's states in the denoiser's dtype.
        """
        prints = super().fingerprints()
        if self.spec.image_conditioning == "concat":
            image_parts = ("image_encoder", "feature_extractor")
            image_prints = [fingerprint(self.folder / part) for part in image_parts]
            prints["vae"] = "-".join(
                [prints["vae"], "image", *image_prints, str(self.dtype)]
            )
        return prints


def _has_image(image: Tensor) -> Tensor:
    """Return which samples have an image (B,): those whose latents are not all zero."""
    return (image != 0).flatten(1).any(1)


def _guider_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of the checkpoint's guider.

    Raises:
        VideotuneError: if it is of another kind, or its guidance is no number that
            anybody samples with.
    """
    path = folder / "guider" / "guider_config.json"
    config = read_config(path)
    scale = config["guidance_scale"]
    is_known = config.get("_class_name") == "ClassifierFreeGuidance"
    if not is_known or not isinstance(scale, int | float) or not 1 <= scale <= 100:
        raise VideotuneError(
            f"{path} is not of a ClassifierFreeGuidance with a guidance_scale from 1 to 100. "
            "Take the file that comes with the checkpoint"
        )
    return config


def _vision_numbers(folder: Path) -> int:
    """Return how many numbers SigLIP gives of an image."""
    config = read_config(folder / "image_encoder" / "config.json")
    tokens = (config["image_size"] // config["patch_size"]) ** 2
    return int(tokens * config["hidden_size"])
