"""Wan 2.1 and 2.2 (Wan team 2025, arXiv 2503.20314): flow matching, UMT5 text, a causal video VAE.

2.1 from text (1.3B, 14B) and from an image (14B), 2.2 TI2V-5B from either, 2.2 A14B from text and from an image, with an
expert for high noise and one for low.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch, transformers
from videotune.models.base import DiffusersModel, key_names, spec_of
from videotune.models.loading import load_model, pretrained
from videotune.models.model_files import fingerprint, read_config
from videotune.models.pipelines import known_latents
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    Expert,
    ModelSpec,
    Networks,
    SampleRequest,
    VideoRules,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

SIZES = {(1536, 30): "1.3B", (3072, 30): "5B", (5120, 40): "14B"}
"""(width, blocks) of the published transformers."""


class Wan(DiffusersModel):
    """A Wan checkpoint."""

    spec = spec_of("wan")
    variants = ("t2v", "i2v", "ti2v", "t2v-a14b", "i2v-a14b")
    transformer_class = "WanTransformer3DModel"
    vae_class = "AutoencoderKLWan"
    pipelines = ("WanPipeline", "WanImageToVideoPipeline")
    text_encoders = {"text_encoder": "UMT5EncoderModel"}
    embedding_names = {"text_encoder": "umt5xxl"}
    # the authors count the norm before cross attention third, diffusers second
    comfyui_names = key_names("wan", "comfyui")
    original_names = key_names("wan", "original")
    config_defaults = {"image_dim": None}

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint.

        The shift of training is 3 for 2.1, as its schedulers say and its authors sample at 480p. For 2.2 it is 5, at which
        its authors sample TI2V-5B and I2V-A14B; they sample T2V-A14B at 12, which would leave the expert for low noise
        under a third of the samples, and diffusers at 3. Raises VideotuneError for a Wan checkpoint of another kind.
        """
        index = read_config(folder / "model_index.json")
        net, vae, latent, from_image = cls.read_configs(
            folder,
            lambda vae: (
                2 * vae["z_dim"] + vae.get("scale_factor_temporal", 4)
            ),  # noise, the mask, the image
        )
        spatial = vae.get("scale_factor_spatial", 8)
        temporal = vae.get("scale_factor_temporal", 4)
        patch = tuple(net["patch_size"])
        from_both = bool(index.get("expand_timesteps"))
        if net.get("pos_embed_seq_len") is not None:
            raise VideotuneError(
                f"{folder}: a Wan checkpoint for first and last frames (FLF2V) cannot be trained"
            )
        experts = _experts(folder, index)
        newer = from_both or len(experts) > 1
        size = SIZES.get(
            (net["num_attention_heads"] * net["attention_head_dim"], net["num_layers"]), ""
        )
        size = f"A{size}" if size and len(experts) > 1 else size
        kind = "TI2V" if from_both else "I2V" if from_image else "T2V"
        return replace(
            cls.spec,
            title=f"Wan {'2.2' if newer else '2.1'} {kind} {size}".rstrip(),
            rules=VideoRules(
                temporal, 1, spatial * patch[1], 24.0 if from_both else 16.0, spatial, temporal
            ),
            latent_channels=latent,
            patch=patch,
            text_width=net["text_dim"],
            image_conditioning="concat" if from_image else "replace" if from_both else "none",
            first_frame=1.0 if from_image else 0.0 if from_both else None,
            experts=experts,
            timestep_shift=5.0 if newer else cls.spec.timestep_shift,
            sample_guidance=cls.spec.sample_guidance
            if len(experts) == 1
            else 3.5
            if from_image
            else 4.0,
            image_channels=(net["in_channels"] - latent, 0),
            image_numbers=0 if net.get("image_dim") is None else _clip_numbers(folder),
        )

    @classmethod
    def clean(cls, caption: str) -> str:
        """The pipeline's own cleaning, without diffusers."""
        import ftfy  # takes a tenth of a second

        return super().clean(html.unescape(html.unescape(ftfy.fix_text(caption))))

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Less the zeros after the caption's true length; the pipeline feeds no mask."""
        return {"text": states["text"][: self.text_length(caption)]}

    @property
    def _reads_clip(self) -> bool:
        """Whether the denoiser is told what CLIP sees in the image (2.1 I2V), beside its latents."""
        return self.config.get("image_dim") is not None

    def free(self, part: str) -> None:
        """With the VAE goes the image encoder."""
        super().free(part)
        if part == "vae":
            super().free("image_encoder")

    def _image_encoder(self) -> tuple[Any, Any]:
        folder = self.folder / "image_encoder"
        encoder = load_model(transformers.CLIPVisionModel, folder, torch.float32, self.device)
        return pretrained(
            transformers.CLIPImageProcessor, self.folder / "image_processor"
        ), encoder

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """What the image-to-video pipeline itself makes of the first frame, in the denoiser's dtype.

        "image" (4+C,F,H,W), the mask and the latents of that frame before grey ones; 2.1's "clip" (257, 1280).
        """
        if self.spec.image_conditioning != "concat":
            return {}
        from PIL import Image  # light to start

        pipe = diffusers.WanImageToVideoPipeline(None, None, vae=self.vae(), scheduler=None)
        image = frames[:, 0]
        size = frames.shape[2], frames.shape[3], frames.shape[1]
        told = pipe.prepare_latents(  # it would draw noise, which is not asked for
            image[None].to(self.device), 1, self.spec.latent_channels, *size, torch.float32, self.device,
            latents=torch.empty(0),
        )[1]  # fmt: skip
        states = {"image": told[0].to(self.dtype).cpu()}
        if self._reads_clip:
            pipe.image_processor, pipe.image_encoder = self._part(
                "image_encoder", self._image_encoder
            )
            pixels = (
                ((image + 1) * 127.5)
                .round()
                .clamp(0, 255)
                .byte()
                .permute(1, 2, 0)
                .cpu()
                .numpy()
            )
            states["clip"] = (
                pipe.encode_image(Image.fromarray(pixels), self.device)[0].to(self.dtype).cpu()
            )
        return states

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """With what image-to-video is told."""
        states = super().blank_states(shape)
        if self.spec.image_conditioning == "concat":
            size = self.spec.image_channels[0], *self.spec.rules.latent_size(shape)
            states["image"] = torch.zeros(size, dtype=self.dtype)
            if self._reads_clip:
                width = read_config(self.folder / "image_encoder" / "config.json")[
                    "hidden_size"
                ]
                states["clip"] = torch.zeros(
                    self.spec.image_numbers // width, width, dtype=self.dtype
                )
        return states

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0; the network is told 1000 t, in float32, and 0 of tokens that are given."""
        extras = batch.conditioning.extras
        states = x_t.to(self.dtype)
        if self.spec.image_conditioning == "concat":
            states = torch.cat([states, extras["image"].to(self.dtype)], dim=1)
        out = net(
            hidden_states=states,
            timestep=self.model_timesteps(x_t, t, batch),
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            encoder_hidden_states_image=extras["clip"].to(self.dtype)
            if "clip" in extras
            else None,
            return_dict=False,
        )
        return out[0].float()

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """An image is in ``conditioning.extras`` (image-to-video) or ``request.first`` (TI2V).

        Samples with one are drawn one by one: the pipeline takes a single image for all.
        """
        if self.spec.image_conditioning != "concat" and request.first is None:
            return super().sample(nets, conditioning, unconditional, request)
        drawn = []
        for i, seed in enumerate(request.seeds):
            pick = itemgetter(slice(i, i + 1))
            one = conditioning.map(pick)
            other = None if unconditional is None else unconditional.map(pick)
            channels = self.spec.latent_channels
            first = (
                one.extras["image"][:, -channels:]
                if request.first is None
                else request.first[[i]]
            )
            # the image-to-video pipeline finds what its encoders would have made of the image already made
            pipe = self.pipeline(nets, request.shift, diffusers.WanImageToVideoPipeline)
            pipe.vae = known_latents(self.spec, first.float().to(self.device), self.device)
            if "clip" in one.extras:
                pipe.encode_image = lambda *_, clip=one.extras["clip"]: clip.to(self.device)
            drawn.append(self.run_pipeline(pipe, one, other, replace(request, seeds=(seed,))))
        return torch.cat(drawn).float()

    def run_pipeline(
        self,
        pipe: Any,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
        **words: Any,
    ) -> Tensor:
        """With an image of which only the size is looked at, and the guidance of a second expert."""
        if "image_processor" in pipe.components:
            words["image"] = torch.zeros(1, 3, request.shape.height, request.shape.width)
        if len(self.spec.experts) > 1:
            words["guidance_scale_2"] = (
                request.guidance if request.guidance_2 is None else request.guidance_2
            )
        return super().run_pipeline(pipe, conditioning, unconditional, request, **words)

    def fingerprints(self) -> dict[str, str]:
        """Latents of image-to-video have the image's beside them, in the denoiser's dtype, and so another name."""
        prints = super().fingerprints()
        if self.spec.image_conditioning == "concat":
            looks = ("image_encoder", "image_processor") if self._reads_clip else ()
            own = [fingerprint(self.folder / part) for part in looks]
            prints["vae"] = "-".join([prints["vae"], "image", *own, str(self.dtype)])
        return prints


def _experts(folder: Path, index: Mapping[str, Any]) -> tuple[Expert, ...]:
    """One denoiser, or in A14B the one for t from the boundary up and the one for t below it."""
    boundary = index.get("boundary_ratio")
    second = (folder / "transformer_2").is_dir()
    if boundary is None and not second:
        return Wan.spec.experts
    if boundary is None or not second:
        missing = "boundary_ratio in its model_index.json" if second else "transformer_2/"
        raise VideotuneError(
            f"{folder}: a Wan checkpoint with two experts (A14B) needs {missing}"
        )
    return Expert("high", float(boundary), 1.0), Expert("low", 0.0, float(boundary))


def _clip_numbers(folder: Path) -> int:
    """How many numbers CLIP says of an image: a state for each of its patches and one for the whole."""
    config = read_config(folder / "image_encoder" / "config.json")
    return ((config["image_size"] // config["patch_size"]) ** 2 + 1) * int(
        config["hidden_size"]
    )
