"""HunyuanVideo 13B from text (Kong et al. 2024, arXiv 2412.03603).

Flow matching, distilled guidance, Llama and CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch, transformers
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models.base import DiffusersModel
from videotune.models.hunyuan_encoder import TILE_FRAMES, encode_long_clips, save_memory
from videotune.models.hunyuan_video_names import AUTHORS_FILE_NAMES, COMFYUI_FILE_NAMES
from videotune.models.loading import read_tokenizer
from videotune.models.pipelines import FLOW_SCHEDULERS
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    FillFn,
    Networks,
    SampleRequest,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the "
    "following aspects: 1. The main content and theme of the video.2. The color, "
    "shape, size, texture, quantity, text, and spatial relationships of the "
    "objects.3. Actions, events, behaviors temporal relationships, physical movement "
    "changes of the objects.4. background environment, light, style and "
    "atmosphere.5. camera angles, movements, and transitions used in the "
    "video:<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
"""Llama's prompt template, the same as the pipeline's; here to count tokens without
torch.
"""

CROP = 95
"""Tokens before the caption: the pipeline cuts off the states of this many tokens."""

GUIDANCE = 1.0
"""Input of the guidance embedding in training: clips are not guided. Samples use 6."""

WIDTH = 3072
"""Width of the published transformer, the only one that diffusers' converters support.
"""

SIZES = {(3072, 20, 40): " 13B"}
"""(width, double blocks, single blocks) of the published transformers."""


DOUBLE_ATTENTION = (
    r"transformer_blocks\.\d+\.attn\."
    r"(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
)


class HunyuanVideo(DiffusersModel):
    """A HunyuanVideo checkpoint."""

    series = "HunyuanVideo 1.0"
    spec = ModelSpec(
        name="hunyuan_video",
        aliases=(
            "HunyuanVideoPipeline",
            "hunyuan",
            "hunyuanvideo",
            "hunyuan-video",
            "hunyuan-video-13b",
        ),
        title="HunyuanVideo 13B",
        prediction="flow",
        rules=VideoRules(
            frame_step=4,
            frame_rest=1,
            side_multiple=16,
            fps=24.0,
            spatial_stride=8,
            temporal_stride=4,
        ),
        text_tokens=256,
        blocks=("transformer_blocks", "single_transformer_blocks"),
        lora_targets={
            "attention": (
                DOUBLE_ATTENTION,
                r"single_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v)",
            ),
            "feed_forward": (
                r"transformer_blocks\.\d+\.(ff|ff_context)\.(net\.0\.proj|net\.2)",
                r"single_transformer_blocks\.\d+\.(proj_mlp|proj_out)",
            ),
            "linear": (
                DOUBLE_ATTENTION,
                r"single_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v)",
                r"transformer_blocks\.\d+\.(ff|ff_context)\.(net\.0\.proj|net\.2)",
                r"single_transformer_blocks\.\d+\.(proj_mlp|proj_out)",
            ),
            "all": (r"(single_)?transformer_blocks\..+",),
        },
        default_resolution=544,
        timestep_shift=7.0,
        sample_steps=50,
        caches_first_block=True,
        sample_guidance=6.0,
        licence="Tencent Hunyuan Community License",
        keeps_variance=True,
        fused_modules={
            "comfyui": (
                ("transformer_blocks", ("attn.to_q", "attn.to_k", "attn.to_v")),
                (
                    "transformer_blocks",
                    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                ),
                (
                    "single_transformer_blocks",
                    ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                ),
            )
        },
        schedulers=FLOW_SCHEDULERS,
    )
    tiny_parts = {
        "_class_name": "HunyuanVideoPipeline",
        "vae": {
            "_class_name": "AutoencoderKLHunyuanVideo",
            "block_out_channels": [4, 4, 4, 4],
            "norm_num_groups": 2,
            "latent_channels": 4,
            "layers_per_block": 1,
        },
        "transformer": {
            "_class_name": "HunyuanVideoTransformer3DModel",
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "rope_axes_dim": [4, 4, 4],
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
        },
        "tokenizer": {
            "_class_name": "bytes",
            "marks": [
                "<|begin_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eot_id|>",
                "<pad>",
            ],
            "texts": [
                (
                    " and theme of the video.2. The color, shape, size, texture, quantity, "
                    "text, and spatial relationships of the objects.3. Actions, events, "
                    "behaviors temporal relationships, physical movement changes of the "
                    "objects.4. background environment, light, style and atmosphere.5. "
                    "camera angles, movements, and transitions used in the video:"
                )
            ],
            "padding_side": "right",
            "eos_token": "<|eot_id|>",
            "pad_token": "<pad>",
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "text_encoder": {
            "_class_name": "LlamaModel",
            "vocab_size": 262,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
        },
        "tokenizer_2": {"_class_name": "clip", "longest": 77},
        "text_encoder_2": {
            "_class_name": "CLIPTextModel",
            "vocab_size": 514,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_size": 8,
            "bos_token_id": 512,
            "eos_token_id": 2,
        },
        "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0},
    }
    tiny_variants = {"t2v": {}}
    variants = ("t2v",)
    transformer_class = "HunyuanVideoTransformer3DModel"
    vae_class = "AutoencoderKLHunyuanVideo"
    text_encoders = {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"}
    embedding_names = {"text_encoder": "llama", "text_encoder_2": "clip_l"}
    pipelines = ("HunyuanVideoPipeline",)
    attention = "attn"
    comfyui_names = (
        (r"^transformer_blocks\.", "double_blocks."),
        (r"^single_transformer_blocks\.", "single_blocks."),
        (r"^(single_blocks\.\d+)\.(attn\.to_[qkv]|proj_mlp)$", r"\1.linear1"),
        (r"^(single_blocks\.\d+)\.proj_out$", r"\1.linear2"),
        (r"^(single_blocks\.\d+)\.norm\.linear$", r"\1.modulation.linear"),
        (r"\.attn\.to_[qkv]$", ".img_attn_qkv"),
        (r"\.attn\.add_[qkv]_proj$", ".txt_attn_qkv"),
        (r"\.attn\.to_out\.0$", ".img_attn_proj"),
        (r"\.attn\.to_add_out$", ".txt_attn_proj"),
        (r"\.ff\.net\.0\.proj$", ".img_mlp.fc1"),
        (r"\.ff\.net\.2$", ".img_mlp.fc2"),
        (r"\.ff_context\.net\.0\.proj$", ".txt_mlp.fc1"),
        (r"\.ff_context\.net\.2$", ".txt_mlp.fc2"),
        (r"\.norm1\.linear$", ".img_mod.linear"),
        (r"\.norm1_context\.linear$", ".txt_mod.linear"),
    )
    file_names = (AUTHORS_FILE_NAMES, COMFYUI_FILE_NAMES)
    tokens_in_front = CROP
    encoding = f"tiles of {TILE_FRAMES} frames"

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        The shift of training stays 7, with which the authors sample. The scheduler's
        shift is only for sampling, and distilled checkpoints have others.

        Raises:
            VideotuneError: for a checkpoint that is not HunyuanVideo from text.
        """
        configs = cls.read_configs(folder)
        net = configs.transformer
        if net.get("image_condition_type") is not None:
            raise VideotuneError(
                f"{folder}: this HunyuanVideo checkpoint takes an image. "
                "Use the text-to-video checkpoint."
            )

        patch = (net["patch_size_t"], net["patch_size"], net["patch_size"])
        spatial = configs.vae["spatial_compression_ratio"]
        temporal = configs.vae["temporal_compression_ratio"]
        width = net["num_attention_heads"] * net["attention_head_dim"]
        size = SIZES.get((width, net["num_layers"], net["num_single_layers"]), "")
        return replace(
            cls.spec,
            title=f"HunyuanVideo{size}",
            rules=VideoRules(
                frame_step=temporal * patch[0],
                frame_rest=1,
                side_multiple=spatial * patch[1],
                fps=cls.spec.rules.fps,
                spatial_stride=spatial,
                temporal_stride=temporal,
            ),
            latent_channels=configs.latent_channels,
            patch=patch,
            text_width=net["text_embed_dim"],
            guidance_embedded=bool(net.get("guidance_embeds")),
        )

    @classmethod
    def clean(cls, caption: str) -> str:
        """Return the caption in Llama's template."""
        return TEMPLATE.format(caption)

    def tokenizers(self) -> Mapping[str, Any]:
        """Load the tokenizers.

        Llama's is loaded by the general class: in transformers 5 Llama's own class
        replaces the file's splitting by that of older Llamas, which gives other tokens.

        Raises:
            VideotuneError: if Llama's tokenizer does not fit the template.
        """
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            raise VideotuneError(
                f"{folder} has no tokenizer.json. Copy the file that comes with the checkpoint."
            )
        llama = read_tokenizer(
            folder, self.folder / "text_encoder", transformers.PreTrainedTokenizerFast
        )

        # Two captions that differ in their first letter show where the caption begins.
        first_ids = llama(TEMPLATE.format("a"), verbose=False).input_ids
        second_ids = llama(TEMPLATE.format("0"), verbose=False).input_ids
        front = -1
        for i, (first_id, second_id) in enumerate(
            zip(first_ids, second_ids, strict=False)
        ):
            if first_id != second_id:
                front = i
                break
        if front != CROP or llama.padding_side != "right":
            raise VideotuneError(
                f"{folder} is not HunyuanVideo's tokenizer: it pads on the {llama.padding_side} "
                f"and reads {front} tokens in front of a caption, not {CROP}"
            )

        clip = read_tokenizer(
            self.folder / "tokenizer_2", self.folder / "text_encoder_2"
        )
        return {"text_encoder": llama, "text_encoder_2": clip}

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return "text" (256,D), Llama's states; "mask" (256,); and "pooled" (P,),
        CLIP's.

        The text is zero where the mask is False. The pipeline feeds the padding's
        states there, but the mask hides them.
        """
        text, pooled, mask = self.encode_prompt(caption)
        mask = mask[0].bool()
        text = text[0].where(mask[:, None], text.new_zeros(()))
        return {"text": text, "mask": mask, "pooled": pooled[0]}

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states without the padding, which is on the right."""
        length = int(states["mask"].sum())
        return {"text": states["text"][:length], "pooled": states["pooled"]}

    def collate_states(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Pad and stack states; trimmed states get a mask by their length."""
        conditioning = super().collate_states(states)
        if conditioning.text_mask is not None:
            return conditioning
        positions = torch.arange(self.spec.text_tokens)
        masks = [positions < len(state["text"]) for state in states]
        return replace(conditioning, text_mask=torch.stack(masks))

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states, with CLIP's pooled state."""
        pooled = torch.zeros(
            self.config["pooled_projection_dim"], dtype=self.text_dtype
        )
        return super().blank_states(shape) | {"pooled": pooled}

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; the VAE encodes clips as the authors' does."""
        net = super().part(name, fill)
        if name == "vae":
            encode_long_clips(net)
            save_memory(net.encoder)
        return net

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0; the timestep input is 1000 · t in float32, the
        guidance 1.

        As in the pipeline, a checkpoint without guidance embedding also gets the
        guidance, and ignores it.
        """
        conditioning = batch.conditioning
        assert conditioning.text_mask is not None
        guidance = torch.full(
            (len(x_t),), GUIDANCE, dtype=self.dtype, device=x_t.device
        )
        output = net(
            hidden_states=x_t.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=conditioning.text.to(self.dtype),
            encoder_attention_mask=conditioning.text_mask.to(self.dtype),
            pooled_projections=conditioning.extras["pooled"].to(self.dtype),
            guidance=guidance * 1000.0,
            return_dict=False,
        )
        return output[0].float()

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning as arguments of the pipeline, with CLIP's pooled state."""
        pooled = conditioning.extras["pooled"].to(self.device, self.dtype)
        return super().prompt(conditioning) | {"pooled_prompt_embeds": pooled}

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents; guidance is an input of the network, so each step is one
        pass.

        Only a checkpoint without guidance embedding uses ``unconditional``, with two
        passes.
        """
        if self.spec.guidance_embedded:
            return super().sample(nets, conditioning, None, request)
        pipe = self.pipeline(nets, request.shift)
        return self.run_pipeline(
            pipe,
            conditioning,
            unconditional,
            request,
            guidance_scale=GUIDANCE,
            true_cfg_scale=request.guidance,
        ).float()

    def lora_formats(self) -> tuple[str, ...]:
        """Return the formats of LoRA files.

        diffusers reads ComfyUI's format only at the published width, so a file for
        another width could not be verified.
        """
        width = self.config["num_attention_heads"] * self.config["attention_head_dim"]
        return super().lora_formats() if width == WIDTH else ("diffusers",)
