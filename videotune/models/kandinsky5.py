"""Kandinsky 5.0 Video Lite, from text and from an image (Arkhipkin et al. 2025, arXiv
2511.14993).

Flow matching, Qwen2.5-VL and CLIP, HunyuanVideo's VAE. The transformer takes latents with
their channels last: the noisy ones, as many that stay zero, and a mask that is 1 in a
first frame that is given.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch, transformers
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models import kandinsky5_tiny
from videotune.models.base import DiffusersModel
from videotune.models.frame_attention import isolate
from videotune.models.hunyuan_encoder import (
    TILE_FRAMES,
    encode_long_clips,
    save_memory,
)
from videotune.models.loading import read_tokenizer
from videotune.models.model_files import read_config
from videotune.models.pipelines import (
    FLOW_SCHEDULERS,
    vae_stand_in,
    without_logits,
)
from videotune.models.single_samples import one_by_one
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

SIZES = {(1792, 32): "Lite", (4096, 60): "Pro"}
"""(width, video blocks) of the published transformers."""

FROM_IMAGE = "Kandinsky5I2VPipeline"
"""The pipeline of a checkpoint from an image."""

TEMPLATE = "\n".join(
    [
        "<|im_start|>system\nYou are a prompt engineer. Describe the video in detail.",
        "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.",
        "Describe the location of the video, main characters or objects and their action.",
        "Describe the dynamism of the video and presented actions.",
        "Name the visual style of the video: whether it is a professional footage, user generated "
        "content, some kind of animation, video game or scren content.",
        "Describe the visual effects, postprocessing and transitions if they are presented in the video.",
        "Pay attention to the order of key actions shown in the scene.<|im_end|>",
        "<|im_start|>user\n{}<|im_end|>",
    ]
)
"""Qwen's prompt template, the same as the pipeline's; here to count tokens without torch.
"""

CROP = 128
"""Tokens before the caption: the pipeline cuts off the states of this many tokens."""

NORMAL_SIDES = range(480, 855)
"""Sides in pixels at which the pipeline divides positions by 2; else by 3.16."""

REPAINTED = 4
"""First latent frames that the pipeline repaints after it sampled from an image, with the
mean and the deviation of those behind them.
"""

ATTENTION = (
    r"visual_transformer_blocks\.\d+\.(self_attention|cross_attention)\."
    r"(to_query|to_key|to_value|out_layer)"
)
FEED_FORWARD = r"visual_transformer_blocks\.\d+\.feed_forward\.(in_layer|out_layer)"
TEXT_ATTENTION = (
    r"text_transformer_blocks\.\d+\.self_attention\."
    r"(to_query|to_key|to_value|out_layer)"
)
TEXT_FEED_FORWARD = r"text_transformer_blocks\.\d+\.feed_forward\.(in_layer|out_layer)"


class Kandinsky5(DiffusersModel):
    """A Kandinsky 5.0 Video checkpoint."""

    series = "Kandinsky 5"
    spec = ModelSpec(
        name="kandinsky5",
        aliases=(
            "Kandinsky5T2VPipeline",
            FROM_IMAGE,
            "kandinsky",
            "kandinsky-5",
            "kandinsky-5-lite",
            "kandinsky5-lite",
        ),
        title="Kandinsky 5 Lite T2V",
        prediction="flow",
        rules=VideoRules(
            frame_step=4,
            frame_rest=1,
            side_multiple=16,
            fps=24.0,
            spatial_stride=8,
            temporal_stride=4,
        ),
        text_tokens=512,
        text_width=3584,
        text_numbers=768,
        text_by_length=True,
        blocks=("text_transformer_blocks", "visual_transformer_blocks"),
        lora_targets={
            "attention": (ATTENTION, TEXT_ATTENTION),
            "feed_forward": (FEED_FORWARD, TEXT_FEED_FORWARD),
            "linear": (ATTENTION, TEXT_ATTENTION, FEED_FORWARD, TEXT_FEED_FORWARD),
            "all": (r"(visual|text)_transformer_blocks\..+",),
            "self_attention": (
                r"(visual|text)_transformer_blocks\.\d+\.self_attention\."
                r"(to_query|to_key|to_value|out_layer)",
            ),
            "cross_attention": (
                r"visual_transformer_blocks\.\d+\.cross_attention\."
                r"(to_query|to_key|to_value|out_layer)",
            ),
        },
        # Up to 16:9, sides of this area are ``NORMAL_SIDES``.
        default_resolution=640,
        timestep_shift=5.0,
        sample_steps=50,
        sample_guidance=5.0,
        sample_shape=(121, 512, 768),
        licence="MIT",
        keeps_variance=True,
        schedulers=FLOW_SCHEDULERS,
    )
    variants = ("t2v", "i2v")
    transformer_class = "Kandinsky5Transformer3DModel"
    vae_class = "AutoencoderKLHunyuanVideo"
    text_encoders = {
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "text_encoder_2": "CLIPTextModel",
    }
    pipelines = ("Kandinsky5T2VPipeline",)
    channels_key = "in_visual_dim"
    attention = "self_attention"
    original_names = ()
    config_defaults = {"attention_type": "regular", "visual_cond": False}
    tokens_in_front = CROP
    encoding = f"tiles of {TILE_FRAMES} frames"
    tiny_parts = kandinsky5_tiny.PARTS
    tiny_variants = kandinsky5_tiny.VARIANTS

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        The shift of training is the scheduler's, with which its authors sample.

        Raises:
            VideotuneError: for a checkpoint with sparse attention, or without channels
                for the mask.
        """
        configs = cls.read_configs(folder)
        net = cls.config_defaults | configs.transformer
        kind = net["attention_type"]
        if kind != "regular":
            raise VideotuneError(
                f"{folder}: its transformer has {kind} attention, which needs kernels that "
                "videotune does not run. Use a checkpoint for 5 seconds (…-5s-Diffusers)."
            )
        if not net["visual_cond"]:
            raise VideotuneError(
                f"{folder}: its transformer reads no mask (visual_cond is false), so it is no "
                "Kandinsky 5 for video. Use the text-to-video or image-to-video checkpoint."
            )

        index = read_config(folder / "model_index.json")
        from_image = index.get("_class_name") == FROM_IMAGE
        scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
        patch = tuple(net["patch_size"])
        spatial = configs.vae["spatial_compression_ratio"]
        temporal = configs.vae["temporal_compression_ratio"]
        size = SIZES.get((net["model_dim"], net["num_visual_blocks"]), "")
        kind_name = "I2V" if from_image else "T2V"
        return replace(
            cls.spec,
            title=" ".join(filter(None, ("Kandinsky 5", size, kind_name))),
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
            text_width=net["in_text_dim"],
            text_numbers=net["in_text_dim2"],
            timestep_shift=float(scheduler.get("shift", cls.spec.timestep_shift)),
            image_conditioning="replace" if from_image else "none",
            first_frame_probability=1.0 if from_image else None,
            encodes_first_frame=from_image,
        )

    # text

    @classmethod
    def clean(cls, caption: str) -> str:
        """Return the caption, cleaned as by the pipeline, in Qwen's template."""
        import ftfy  # its import takes a tenth of a second

        text = html.unescape(html.unescape(ftfy.fix_text(caption)))
        return TEMPLATE.format(super().clean(text))

    def tokenizers(self) -> Mapping[str, Any]:
        """Load the tokenizers: of Qwen's processor only the part that reads text.

        Raises:
            VideotuneError: if Qwen's tokenizer does not fit the template.
        """
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            raise VideotuneError(
                f"{folder} has no tokenizer.json. Copy the file that comes with the checkpoint."
            )
        qwen = read_tokenizer(
            folder, self.folder / "text_encoder", transformers.PreTrainedTokenizerFast
        )

        in_front = qwen(TEMPLATE.partition("{}")[0], verbose=False).input_ids
        if len(in_front) != CROP:
            raise VideotuneError(
                f"{folder} is not Kandinsky 5's tokenizer: it reads {len(in_front)} tokens in front "
                f"of a caption, not {CROP}. Take the folder that comes with the checkpoint"
            )

        clip = read_tokenizer(
            self.folder / "tokenizer_2", self.folder / "text_encoder_2"
        )
        return {"text_encoder": qwen, "text_encoder_2": clip}

    def _text_encoder(self, part: str, fill: FillFn = None) -> nn.Module:
        """Load a text encoder; Qwen without its logits."""
        net = super()._text_encoder(part, fill)
        return without_logits(net) if part == self.main_encoder else net

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return "text" (L,D), Qwen's states of the caption alone, and "pooled" (P,),
        CLIP's.
        """
        text, pooled, _ = self.encode_prompt(caption)
        return {"text": text[0], "pooled": pooled[0]}

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states, with CLIP's pooled state."""
        pooled = torch.zeros(self.spec.text_numbers, dtype=self.text_dtype)
        return super().blank_states(shape) | {"pooled": pooled}

    # the networks

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; the VAE encodes long clips in HunyuanVideo's tiles."""
        net = super().part(name, fill)
        if name == "vae":
            encode_long_clips(net)
            save_memory(net.encoder)
        return net

    def denoiser(
        self,
        expert: str | None = None,
        device: torch.device | None = None,
        fill: FillFn = None,
    ) -> nn.Module:
        """Load the transformer, with the frequencies of its timesteps on the device.

        diffusers would copy them there in every pass, and the host would wait.
        """
        net: Any = super().denoiser(expert, device, fill)
        times = net.time_embeddings
        times.freqs = times.freqs.to(self.device)
        return net

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0.

        The timestep input is 1000 · t in float32, as by the authors' code; diffusers'
        pipeline rounds it to the network's dtype.
        """
        return self.predict_by_length(self._predict, net, x_t, t, batch)

    def _predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v of samples whose captions have one length."""
        conditioning = batch.conditioning
        mask = batch.conditioning_mask.expand(-1, -1, -1, *x_t.shape[3:])
        latents = torch.cat([x_t, torch.zeros_like(x_t), mask.to(x_t)], dim=1)
        output = net(
            hidden_states=latents.permute(0, 2, 3, 4, 1).to(self.dtype),
            encoder_hidden_states=conditioning.text.to(self.dtype),
            pooled_projections=conditioning.extras["pooled"].to(self.dtype),
            timestep=t.float() * 1000,
            sparse_params=None,
            return_dict=True,
            **self._positions(x_t, conditioning.text),
        )
        return output.sample.permute(0, 4, 1, 2, 3).float()

    def _positions(self, x_t: Tensor, text: Tensor) -> dict[str, Any]:
        """Return the positions of video and text tokens as the pipeline does."""
        _, _, frames, rows, columns = x_t.shape
        _, patch_rows, patch_columns = self.spec.patch
        counts = (frames, rows // patch_rows, columns // patch_columns)
        stride = self.spec.rules.spatial_stride
        is_normal = rows * stride in NORMAL_SIDES and columns * stride in NORMAL_SIDES
        return {
            "visual_rope_pos": [torch.arange(n, device=x_t.device) for n in counts],
            "text_rope_pos": torch.arange(text.shape[1], device=x_t.device),
            "scale_factor": (1, 2, 2) if is_normal else (1, 3.16, 3.16),
        }

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Let video tokens attend only to their own latent frame and to the text, if
        ``on``.

        The blocks of the text have no video tokens.
        """
        blocks: Any = net.get_submodule("visual_transformer_blocks").children()
        attentions = [block.self_attention for block in blocks]
        isolate(net, attentions, on, self.token_frames)

    def token_frames(self, hidden_states: Tensor, **_: Any) -> int:
        """Return how many frames the video tokens have, from the transformer's inputs."""
        return hidden_states.shape[1] // self.spec.patch[0]

    # samples

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the pipeline, which asks the network whether it reads a mask."""
        pipe = super().pipeline(nets, shift, cls, **parts)
        pipe.transformer.visual_cond = pipe.transformer.config["visual_cond"]
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning of one sample as arguments of the pipeline."""
        text = conditioning.text.to(self.device, self.dtype)
        pooled = conditioning.extras["pooled"].to(self.device, self.dtype)
        ends = torch.tensor([0, text.shape[1]], dtype=torch.int32)
        return {
            "prompt_embeds_qwen": text,
            "prompt_embeds_clip": pooled,
            "prompt_cu_seqlens": ends,
        }

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents one by one: captions have lengths of their own, and the pipeline
        takes one image. The image is in ``request.first``.
        """
        samples = []
        for positive, negative, single in one_by_one(
            conditioning, unconditional, request
        ):
            if single.first is None:
                pipe = self.pipeline(nets, request.shift)
                latents = self.run_pipeline(pipe, positive, negative, single)
            else:
                latents = self._from_image(nets, positive, negative, single)
            samples.append(latents.permute(0, 4, 1, 2, 3))
        return torch.cat(samples).float()

    def _from_image(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents (1,F,H,W,C) that begin with an image.

        The pipeline repaints the first ones by statistics of those behind them. Without
        any behind them it would return NaN, so they stay as they are.
        """
        assert request.first is not None
        vae = vae_stand_in(self.spec, request.first.float(), self.device)
        pipe = self.pipeline(
            nets, request.shift, diffusers.Kandinsky5I2VPipeline, vae=vae
        )
        shape = request.shape
        frames, _, _ = self.spec.rules.latent_size(shape)
        if frames <= REPAINTED:
            pipe.normalize_first_frame = lambda latents: latents
        blank = torch.zeros(1, 3, shape.height, shape.width)
        return self.run_pipeline(
            pipe, conditioning, unconditional, request, image=blank
        )

    @classmethod
    def tiny_pipeline(cls, variant: str) -> Any:
        """Build a pipeline of tiny random networks.

        A new network's modulation is zero, which would leave every block without effect.
        """
        pipe = super().tiny_pipeline(variant)
        for name, parameter in pipe.transformer.named_parameters():
            if "modulation." in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return pipe

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; the VAE's has whether the cache keeps first frames."""
        prints = super().fingerprints()
        if self.spec.encodes_first_frame:
            prints["vae"] += "-first"
        return prints
