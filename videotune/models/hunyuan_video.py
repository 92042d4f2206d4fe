"""HunyuanVideo 13B from text (Kong et al. 2024, arXiv 2412.03603): flow matching, guidance distilled, Llama and CLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch, transformers
from videotune.models.base import DiffusersModel, key_names, spec_of
from videotune.models.loading import read_tokenizer
from videotune.models.registry import facts
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
    from torch import Tensor, nn

TEMPLATE = str(facts("hunyuan_video")["template"])
"""What Llama reads around a caption. A fact of the checkpoint, and the pipeline's own; here for counting without torch."""

CROP = 95
"""Tokens in front of the caption: the pipeline cuts as many states off, whatever they are of."""

GUIDANCE = 1.0
"""What training tells the guidance embedding: a clip is what it is, not more so. Samples are drawn at 6."""

WIDTH = 3072
"""Of the published transformer; diffusers' converters from the authors' names know no other."""

SIZES = {(3072, 20, 40): " 13B"}
"""(width, double blocks, single blocks) of the published transformers."""


class HunyuanVideo(DiffusersModel):
    """A HunyuanVideo checkpoint."""

    spec = spec_of("hunyuan_video")
    variants = ("t2v",)
    transformer_class = "HunyuanVideoTransformer3DModel"
    vae_class = "AutoencoderKLHunyuanVideo"
    text_encoders = {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"}
    embedding_names = {"text_encoder": "llama", "text_encoder_2": "clip_l"}
    pipelines = ("HunyuanVideoPipeline",)
    attention = "attn"
    comfyui_names = key_names("hunyuan_video", "comfyui")
    file_names = tuple(
        key_names("hunyuan_video", f"{layout} file") for layout in ("original", "comfyui")
    )
    tokens_in_front = CROP

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint.

        The shift of training stays 7, at which the authors sample, whatever the checkpoint's scheduler says: it is that of
        sampling, and distilled checkpoints have others. Raises VideotuneError for one that only looks like one of these.
        """
        net, vae, latent, _ = cls.read_configs(folder)
        if net.get("image_condition_type") is not None:
            raise VideotuneError(
                f"{folder}: of HunyuanVideo videotune trains the text-to-video checkpoint alone"
            )
        patch = (net["patch_size_t"], net["patch_size"], net["patch_size"])
        spatial = vae["spatial_compression_ratio"]
        temporal = vae["temporal_compression_ratio"]
        width = net["num_attention_heads"] * net["attention_head_dim"]
        return replace(
            cls.spec,
            title=f"HunyuanVideo{SIZES.get((width, net['num_layers'], net['num_single_layers']), '')}",
            rules=VideoRules(
                temporal * patch[0],
                1,
                spatial * patch[1],
                cls.spec.rules.fps,
                spatial,
                temporal,
            ),
            latent_channels=latent,
            patch=patch,
            text_width=net["text_embed_dim"],
            guidance_embedded=bool(net.get("guidance_embeds")),
        )

    @classmethod
    def clean(cls, caption: str) -> str:
        """In the template."""
        return TEMPLATE.format(caption)

    def tokenizers(self) -> Mapping[str, Any]:
        """Llama's is read by the general class: Llama's own of transformers 5 would put the splitting of older Llamas in the
        place of what the file says, and give other tokens. Raises VideotuneError where it does not fit the template."""
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            raise VideotuneError(
                f"{folder} has no tokenizer.json; take the file that comes with the checkpoint"
            )
        llama = read_tokenizer(
            folder, self.folder / "text_encoder", transformers.PreTrainedTokenizerFast
        )
        one, other = (
            llama(TEMPLATE.format(word), verbose=False).input_ids for word in ("a", "0")
        )
        front = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1
        )
        if front != CROP or llama.padding_side != "right":
            fault = f"it pads on the {llama.padding_side} and reads {front} tokens in front of a caption, not {CROP}"
            raise VideotuneError(f"{folder} is not HunyuanVideo's tokenizer: {fault}")
        clip = read_tokenizer(self.folder / "tokenizer_2", self.folder / "text_encoder_2")
        return {"text_encoder": llama, "text_encoder_2": clip}

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Llama's states "text" (256,D), zeros where the "mask" (256,) is False, and CLIP's "pooled" (P,).

        The pipeline feeds states of the padding there, which the mask hides: they change nothing.
        """
        text, pooled, mask = self.encode_prompt(caption)
        shown = mask[0].bool()
        return {
            "text": text[0].where(shown[:, None], text.new_zeros(())),
            "mask": shown,
            "pooled": pooled[0],
        }

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Less the padding, which is on the right."""
        return {"text": states["text"][: int(states["mask"].sum())], "pooled": states["pooled"]}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """With the mask that follows from the length."""
        conditioning = super().condition(states)
        places = torch.arange(self.spec.text_tokens)
        if conditioning.text_mask is not None:
            return conditioning
        return replace(
            conditioning,
            text_mask=torch.stack([places < len(state["text"]) for state in states]),
        )

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """With CLIP's."""
        pooled = torch.zeros(self.config["pooled_projection_dim"], dtype=self.dtype)
        return super().blank_states(shape) | {"pooled": pooled}

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0; the network is told 1000 t in float32, and a guidance of 1.

        As the pipeline does, guidance is told to a checkpoint that has no embedding for it too: it does not listen.
        """
        conditioning = batch.conditioning
        assert conditioning.text_mask is not None
        out = net(
            hidden_states=x_t.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=conditioning.text.to(self.dtype),
            encoder_attention_mask=conditioning.text_mask.to(self.dtype),
            pooled_projections=conditioning.extras["pooled"].to(self.dtype),
            guidance=torch.full((len(x_t),), GUIDANCE, dtype=self.dtype, device=x_t.device)
            * 1000.0,
            return_dict=False,
        )
        return out[0].float()

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """With CLIP's."""
        return super().prompt(conditioning) | {
            "pooled_prompt_embeds": conditioning.extras["pooled"].to(self.device, self.dtype)
        }

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Guidance is told to the network, once a step.

        ``unconditional`` is asked of a checkpoint alone that has no embedding for it: there guidance joins two answers.
        """
        if self.spec.guidance_embedded:
            return super().sample(nets, conditioning, None, request)
        words = {"guidance_scale": GUIDANCE, "true_cfg_scale": request.guidance}
        return self.run_pipeline(
            self.pipeline(nets, request.shift), conditioning, unconditional, request, **words
        ).float()

    def lora_formats(self) -> tuple[str, ...]:
        """diffusers reads ComfyUI's form of the published width alone, so a file for another could not be proved."""
        published = (
            self.config["num_attention_heads"] * self.config["attention_head_dim"] == WIDTH
        )
        return super().lora_formats() if published else ("diffusers",)
