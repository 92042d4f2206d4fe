"""HiDream-I1 (17B; HiDream.ai 2025, arXiv 2505.22705).

Images by flow matching, with routed experts and four text encoders.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models import hidream_tiny
from videotune.models.base import DiffusersModel
from videotune.models.checkpoint import tokenizer_of
from videotune.models.hidream_network import make_trainable, one_frame_vae
from videotune.models.loading import count_tokens
from videotune.models.model_files import model_parts, read_config
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

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
"""The fourth text encoder, which HiDream's repositories do not include."""

DISTILLED = "FlowMatchLCMScheduler"
"""The scheduler of Dev and Fast, which sample without guidance."""

ROUND_UP = 1 + 1e-9
"""Factor of a size that keeps it unchanged when the pipeline rounds down after a
division.
"""


class HiDream(DiffusersModel):
    """A HiDream-I1 checkpoint: CLIP-L, CLIP-G, T5-XXL and Llama 3.1 8B read its
    captions.
    """

    series = "HiDream-I1"
    spec = ModelSpec(
        name="hidream",
        aliases=(
            "HiDreamImagePipeline",
            "hidream-i1",
            "hidream-i1-full",
            "hidream-i1-dev",
            "hidream-i1-fast",
        ),
        title="HiDream-I1 Full",
        prediction="flow",
        rules=VideoRules(
            frame_step=0,
            frame_rest=1,
            side_multiple=16,
            fps=1.0,
            spatial_stride=8,
            temporal_stride=1,
            most_frames=1,
            most_area=1048576,
        ),
        text_tokens=128,
        blocks=("double_stream_blocks", "single_stream_blocks"),
        lora_targets={
            "attention": (
                r"(double|single)_stream_blocks\.\d+\.block\.attn1\.(to_q|to_k|to_v|to_out)(_t)?",
            ),
            "feed_forward": (
                r"(double|single)_stream_blocks\.\d+\.block\.(ff_i\.shared_experts|ff_t)\.(w1|w2|w3)",
            ),
            "linear": (
                r"(double|single)_stream_blocks\.\d+\.block\.attn1\.(to_q|to_k|to_v|to_out)(_t)?",
                r"(double|single)_stream_blocks\.\d+\.block\.(ff_i\.shared_experts|ff_t)\.(w1|w2|w3)",
            ),
            "all": (r"(double|single)_stream_blocks\.\d+\.block\..+",),
            "experts": (
                r"(double|single)_stream_blocks\.\d+\.block\.ff_i\.experts\.\d+\.(w1|w2|w3)",
            ),
        },
        default_resolution=1024,
        timestep_shift=3.0,
        sample_steps=50,
        sample_guidance=5.0,
        licence="MIT (its text encoder Llama 3.1: Llama 3.1 Community License)",
        sample_shape=(1, 1024, 1024),
        keeps_variance=True,
        text_numbers=16779264,
        padded_tokens=4096,
        schedulers=FLOW_SCHEDULERS,
    )
    no_cuda_graphs = (
        "the host waits for the card to learn which expert gets which token"
    )

    tiny_parts = hidream_tiny.PARTS
    tiny_variants = hidream_tiny.VARIANTS
    variants = ("full", "dev")
    transformer_class = "HiDreamImageTransformer2DModel"
    vae_class = "AutoencoderKL"
    text_encoders = {
        "text_encoder": "CLIPTextModelWithProjection", "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel", "text_encoder_4": "LlamaForCausalLM",
    }  # fmt: skip
    pipelines = ("HiDreamImagePipeline",)
    main_encoder = "text_encoder_4"
    all_layers = True
    original_names = ()

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        A frame rate of 1 means that a clip is read at one frame a second. Full, Dev and
        Fast have the same network and differ in their schedulers: Dev and Fast sample
        without guidance, with the shifts 6 and 3, in 28 and 16 steps.

        Raises:
            VideotuneError: if the fourth text encoder is missing, or parts do not fit.
        """
        parts = model_parts(read_config(folder / "model_index.json"))
        if "text_encoder" in parts and "text_encoder_4" not in parts:
            raise VideotuneError(
                f"{folder} has no text_encoder_4: HiDream-I1 also needs {LLAMA}, which its "
                "repositories lack. Fetch both, then run `python -m videotune.models.hidream "
                "HIDREAM_FOLDER LLAMA_FOLDER NEW_FOLDER` and use NEW_FOLDER."
            )

        configs = cls.read_configs(folder)
        net = configs.transformer
        scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
        default_shift = scheduler.get("shift", cls.spec.timestep_shift)
        shift = float(scheduler.get("flow_shift", default_shift))
        if scheduler.get("_class_name") != DISTILLED:
            version = "Full"
            steps = cls.spec.sample_steps
            guidance = cls.spec.sample_guidance
        else:
            is_fast = shift < 4
            version = "Fast" if is_fast else "Dev"
            steps = 16 if is_fast else 28
            guidance = 1.0

        stride = 2 ** (len(configs.vae["block_out_channels"]) - 1)
        patch = net["patch_size"]
        tokens = math.prod(net["max_resolution"]) // patch**2
        token_side = stride * patch
        area = tokens * token_side**2
        side = round(area**0.5) // token_side * token_side
        llama_layers = max(net["llama_layers"]) + 1
        llama_numbers = llama_layers * cls.spec.text_tokens * net["caption_channels"][1]
        return replace(
            cls.spec,
            title=f"HiDream-I1 {version}",
            rules=VideoRules(
                frame_step=0,
                frame_rest=1,
                side_multiple=token_side,
                fps=cls.spec.rules.fps,
                spatial_stride=stride,
                temporal_stride=1,
                most_frames=1,
                most_area=area,
            ),
            latent_channels=configs.latent_channels,
            patch=(1, patch, patch),
            text_width=net["caption_channels"][0],
            default_resolution=side,
            timestep_shift=shift,
            sample_steps=steps,
            sample_guidance=guidance,
            sample_shape=(1, side, side),
            text_numbers=llama_numbers + net["text_emb_dim"],
            padded_tokens=tokens,
        )

    @classmethod
    def token_lengths(cls, folder: Path, captions: Sequence[str]) -> list[int] | None:
        """Return for each caption the most tokens that any of the tokenizers gives.

        CLIP's tokenizers count only if they have a tokenizer.json.
        """
        counts = []
        for part, class_name in cls.text_encoders.items():
            texts = captions
            if "T5" in class_name:
                texts = [cls.clean(caption) for caption in captions]
            counts.append(count_tokens(folder / tokenizer_of(part), texts))
        if None in counts[2:]:
            return None
        if not captions:
            return []
        return [max(lengths) for lengths in zip(*filter(None, counts), strict=True)]

    def text_length(self, caption: str) -> int:
        """Return the most tokens that any of the tokenizers gives."""
        tokenizers = [part.tokenizer for part in self.text_parts().values()]
        return max(
            len(tokenizer(caption, verbose=False).input_ids) for tokenizer in tokenizers
        )

    def _load_text(self) -> Any:
        pipe = super()._load_text()

        # The pipeline requests attention maps and ignores them. Fused attention has
        # none and warns at each call.
        def without_maps(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"output_attentions": False}

        pipe.text_encoder_4.register_forward_pre_hook(without_maps, with_kwargs=True)
        return pipe

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return the states of all text encoders.

        "text" (128,D) are T5's, "llama" (layers,128,D) those of each of Llama's layers,
        "pooled" (P,) those of both CLIPs. The denoiser masks no padding and the states
        of padding depend on the caption, so all are kept.
        """
        text, _, llama, _, pooled, _ = self.encode_prompt(
            caption, do_classifier_free_guidance=False
        )
        return {"text": text[0], "llama": llama[:, 0], "pooled": pooled[0]}

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states, with Llama's and CLIP's."""
        layers = max(self.config["llama_layers"]) + 1
        width = self.config["caption_channels"][1]
        llama = torch.zeros(layers, self.spec.text_tokens, width, dtype=self.text_dtype)
        pooled = torch.zeros(self.config["text_emb_dim"], dtype=self.text_dtype)
        return super().blank_states(shape) | {"llama": llama, "pooled": pooled}

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; the VAE takes clips of one frame."""
        net = super().part(name, fill)
        return one_frame_vae(net) if name == "vae" else net

    def denoiser(
        self,
        expert: str | None = None,
        device: torch.device | None = None,
        fill: FillFn = None,
    ) -> nn.Module:
        """Load the transformer, with routed experts that propagate gradients."""
        return make_trainable(super().denoiser(expert, device, fill))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0, the network's negated output; its timestep is 1000 ·
        t.
        """
        _, _, frames, rows, columns = x_t.shape
        stride = self.spec.rules.spatial_stride
        self.check_shape(frames, rows * stride, columns * stride)
        extras = batch.conditioning.extras
        output = net(
            hidden_states=x_t[:, :, 0].to(self.dtype),
            timesteps=t.float() * 1000,
            encoder_hidden_states_t5=batch.conditioning.text.to(self.dtype),
            encoder_hidden_states_llama3=extras["llama"].to(self.dtype).transpose(0, 1),
            pooled_embeds=extras["pooled"].to(self.dtype),
            return_dict=False,
        )
        return -output[0][:, :, None].float()

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Raise VideotuneError unless it is one frame with no more tokens than
        positions.
        """
        if frames != 1:
            raise VideotuneError(
                f"{self.spec.title} generates images, and these are {frames} frames. "
                "Set video_config.frames=1."
            )
        most = self.spec.rules.most_area
        if most is not None and height * width > most:
            raise VideotuneError(
                f"{self.spec.title} takes at most {most} pixels; these are {height}x{width}. "
                "Set a lower resolution."
            )

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Do nothing: there is one frame.

        Raise VideotuneError if frames shall be isolated.
        """
        if on:
            keys = "video_config.use_temporal_attention, sample.use_temporal_attention"
            raise VideotuneError(
                f"{keys}: {self.spec.title} generates single frames: leave both at true."
            )

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the pipeline, which reads the number of positions from the network."""
        pipe = super().pipeline(nets, shift, cls, **parts)
        pipe.transformer.max_seq = self.spec.padded_tokens
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning as arguments of the pipeline."""
        arguments = {
            "prompt_embeds_t5": conditioning.text,
            "prompt_embeds_llama3": conditioning.extras["llama"].transpose(0, 1),
            "pooled_prompt_embeds": conditioning.extras["pooled"],
        }
        return {
            name: value.to(self.device, self.dtype) for name, value in arguments.items()
        }

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents at the request's size.

        The pipeline scales each request to one area, 1024² pixels for a published
        model. Here that area is the request's, so that the size of training is sampled.
        """
        pipe = self.pipeline(nets, request.shift)
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        if "generator" in signature(pipe.scheduler.step).parameters:
            # The scheduler of Dev and Fast draws noise at each step.
            pipe.scheduler.step = partial(pipe.scheduler.step, generator=generators)

        shape = request.shape
        side = math.sqrt(shape.height * shape.width)
        pipe.default_sample_size = side / pipe.vae_scale_factor * ROUND_UP
        latents = self.run_pipeline(
            pipe, conditioning, unconditional, request, generator=generators
        )
        _, rows, columns = self.spec.rules.latent_size(shape)
        assert latents.shape[2:] == (rows, columns), "the pipeline has changed the size"
        return latents[:, :, None].float()


def join(base: Path, llama: Path, folder: Path) -> Path:
    """Write a folder of links in diffusers layout and return it.

    Args:
        base: folder of HiDream-I1.
        llama: folder of its fourth text encoder.
        folder: the new folder.

    Raises:
        VideotuneError: if one of them is another model, or the folder exists.
    """
    index = read_config(base / "model_index.json")
    config = read_config(llama / "config.json")
    if index.get("_class_name") != "HiDreamImagePipeline":
        raise VideotuneError(
            f"{base} is a {index.get('_class_name')}, not a HiDreamImagePipeline"
        )
    layers = max(read_config(base / "transformer" / "config.json")["llama_layers"]) + 1
    kind = config.get("model_type")
    depth = config.get("num_hidden_layers")
    if kind != "llama" or depth != layers:
        raise VideotuneError(
            f"{llama} is a {kind} of {depth} layers; HiDream-I1 reads a llama of {layers}"
        )
    if not (llama / "tokenizer.json").is_file():
        raise VideotuneError(f"{llama} has no tokenizer.json")

    if folder.exists():
        raise VideotuneError(f"{folder} already exists; choose another folder")

    part = "text_encoder_4"
    tokenizer = tokenizer_of(part)
    encoder = HiDream.text_encoders[part]
    links = {
        entry.name: entry
        for entry in base.iterdir()
        if entry.is_dir() and entry.name not in (part, tokenizer)
    }
    for entry in llama.iterdir():
        if entry.is_file():
            links[f"{tokenizer if 'token' in entry.name else part}/{entry.name}"] = (
                entry
            )
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target.absolute())

    new_parts = {
        part: ["transformers", encoder],
        tokenizer: ["transformers", "PreTrainedTokenizerFast"],
    }
    (folder / "model_index.json").write_text(
        json.dumps(index | new_parts, indent=2) + "\n", encoding="utf-8"
    )
    return folder


if __name__ == "__main__":
    import typer

    def main(base: Path, llama: Path, folder: Path) -> None:
        """Join the folders of HiDream-I1 and Llama-3.1-8B-Instruct by links in a new
        folder.
        """
        try:
            print(join(base, llama, folder))
        except VideotuneError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error

    typer.run(main)
