"""HiDream-I1 (17B; HiDream.ai 2025, arXiv 2505.22705): images by flow matching, routed experts, four text encoders."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, partialmethod
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.memory.accelerator import overlaps
from videotune.models.base import DiffusersModel
from videotune.models.checkpoint import tokenizer_of
from videotune.models.loading import count_tokens
from videotune.models.model_files import model_parts, read_config
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    FillFn,
    ModelSpec,
    Networks,
    SampleRequest,
    VideoRules,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
"""The fourth text encoder, which HiDream's own repositories leave out."""

DISTILLED = "FlowMatchLCMScheduler"
"""The scheduler of Dev and Fast, which sample without guidance."""

NEARLY = 1 + 1e-9
"""The pipeline rounds sizes down after a division; so much more than the size itself, and it stays what it is."""


TINY_CLIP = {
    "_class_name": "CLIPTextModelWithProjection",
    "vocab_size": 514,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "projection_dim": 8,
    "max_position_embeddings": 248,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}


class HiDream(DiffusersModel):
    """A HiDream-I1 checkpoint: CLIP-L, CLIP-G, T5-XXL and Llama 3.1 8B read its captions."""

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
        path="flow",
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
    )
    tiny_parts = {
        "_class_name": "HiDreamImagePipeline",
        "vae": {
            "_class_name": "AutoencoderKL",
            "block_out_channels": [4, 4, 4, 4],
            "norm_num_groups": 2,
            "latent_channels": 4,
            "layers_per_block": 1,
            "sample_size": 64,
            "down_block_types": [
                "DownEncoderBlock2D",
                "DownEncoderBlock2D",
                "DownEncoderBlock2D",
                "DownEncoderBlock2D",
            ],
            "up_block_types": [
                "UpDecoderBlock2D",
                "UpDecoderBlock2D",
                "UpDecoderBlock2D",
                "UpDecoderBlock2D",
            ],
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
        "transformer": {
            "_class_name": "HiDreamImageTransformer2DModel",
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_channels": [16, 12],
            "text_emb_dim": 16,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": [4, 2, 2],
            "max_resolution": [12, 12],
            "llama_layers": [0, 1, 1, 1],
        },
        "tokenizer": {"_class_name": "clip", "longest": 248},
        "text_encoder": TINY_CLIP,
        "tokenizer_2": {"_class_name": "clip", "longest": 248},
        "text_encoder_2": TINY_CLIP,
        "tokenizer_3": {"_class_name": "letters"},
        "text_encoder_3": {
            "_class_name": "T5EncoderModel",
            "vocab_size": 98,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
        },
        "tokenizer_4": {
            "_class_name": "bytes",
            "marks": ["<|begin_of_text|>", "<|eot_id|>"],
            "eos_token": "<|eot_id|>",
            "model_max_length": 131072,
        },
        "text_encoder_4": {
            "_class_name": "LlamaForCausalLM",
            "vocab_size": 258,
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 256,
            "eos_token_id": 257,
            "bos_token_id": 256,
            "pad_token_id": None,
        },
    }
    tiny_variants = {
        "full": {
            "scheduler": {
                "_class_name": "UniPCMultistepScheduler",
                "prediction_type": "flow_prediction",
                "use_flow_sigmas": True,
                "flow_shift": 3.0,
            }
        },
        "dev": {"scheduler": {"_class_name": "FlowMatchLCMScheduler", "shift": 6.0}},
    }
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
        """The spec of a checkpoint.

        Its rate of 1 means that of a clip a frame a second is shown. Full, Dev and Fast have one network; they are told
        apart by their schedulers: Dev and Fast sample without guidance, at the shifts 6 and 3, in 28 and 16 steps.

        Raises VideotuneError for a checkpoint without its fourth text encoder, and for one whose parts do not fit.
        """
        parts = model_parts(read_config(folder / "model_index.json"))
        if "text_encoder" in parts and "text_encoder_4" not in parts:
            raise VideotuneError(
                f"{folder} has no text_encoder_4: HiDream-I1 needs {LLAMA} too, which its repositories lack. Fetch both, "
                "then run `python -m videotune.models.hidream HIDREAM_FOLDER LLAMA_FOLDER NEW_FOLDER` and use NEW_FOLDER."
            )
        net, vae, latent, _ = cls.read_configs(folder)
        scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
        shift = float(
            scheduler.get("flow_shift", scheduler.get("shift", cls.spec.timestep_shift))
        )
        fast = shift < 4
        distilled = scheduler.get("_class_name") == DISTILLED
        stride = 2 ** (len(vae["block_out_channels"]) - 1)
        patch = net["patch_size"]
        tokens = math.prod(net["max_resolution"]) // patch**2
        side = stride * patch
        longest = round((tokens * side**2) ** 0.5) // side * side
        states = (
            (max(net["llama_layers"]) + 1) * cls.spec.text_tokens * net["caption_channels"][1]
        )
        return replace(
            cls.spec,
            title=f"HiDream-I1 {'Full' if not distilled else 'Fast' if fast else 'Dev'}",
            rules=VideoRules(
                0,
                1,
                side,
                cls.spec.rules.fps,
                stride,
                1,
                most_frames=1,
                most_area=tokens * side**2,
            ),
            latent_channels=latent,
            patch=(1, patch, patch),
            text_width=net["caption_channels"][0],
            default_resolution=longest,
            timestep_shift=shift,
            sample_steps=cls.spec.sample_steps if not distilled else 16 if fast else 28,
            sample_guidance=1.0 if distilled else cls.spec.sample_guidance,
            sample_shape=(1, longest, longest),
            text_numbers=states + net["text_emb_dim"],
            padded_tokens=tokens,
        )

    @classmethod
    def token_lengths(cls, folder: Path, captions: Sequence[str]) -> list[int] | None:
        """The most that any of the tokenizers makes of each caption; CLIP's count where they have a tokenizer.json."""
        counts = [
            count_tokens(
                folder / tokenizer_of(part),
                [*map(cls.clean, captions)] if "T5" in name else captions,
            )
            for part, name in cls.text_encoders.items()
        ]
        if None in counts[2:]:
            return None
        return (
            [max(each) for each in zip(*filter(None, counts), strict=True)] if captions else []
        )

    def text_length(self, caption: str) -> int:
        """The most that any of the tokenizers makes of it."""
        tokenizers = [part.tokenizer for part in self.text_parts().values()]
        return max(len(tokenizer(caption, verbose=False).input_ids) for tokenizer in tokenizers)

    def _load_text(self) -> Any:
        pipe = super()._load_text()
        # the pipeline asks for maps of attention and never looks at them; fused attention has none, and says so each time
        pipe.text_encoder_4.register_forward_pre_hook(
            lambda _, words, named: (words, named | {"output_attentions": False}),
            with_kwargs=True,
        )
        return pipe

    def encode(self, caption: str) -> dict[str, Tensor]:
        """ "text" (128,D) T5's states, "llama" (layers,128,D) those of every layer of Llama, "pooled" (P,) both CLIPs'.

        No reader of these masks padding, and the states of padding hang on the caption: all of them are told and kept.
        """
        text, _, llama, _, pooled, _ = self.encode_prompt(
            caption, do_classifier_free_guidance=False
        )
        return {"text": text[0], "llama": llama[:, 0], "pooled": pooled[0]}

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """With Llama's and CLIP's."""
        layers = max(self.config["llama_layers"]) + 1
        width = self.config["caption_channels"][1]
        llama = torch.zeros(layers, self.spec.text_tokens, width, dtype=self.dtype)
        pooled = torch.zeros(self.config["text_emb_dim"], dtype=self.dtype)
        return super().blank_states(shape) | {"llama": llama, "pooled": pooled}

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """The VAE takes clips of one frame."""
        net = super().part(name, fill)
        return _of_frames(net) if name == "vae" else net

    def denoiser(
        self, expert: str | None = None, device: torch.device | None = None, fill: FillFn = None
    ) -> nn.Module:
        """Its routed experts carry gradients."""
        return _trainable(super().denoiser(expert, device, fill))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0, which is the network's answer turned about; it is told 1000 t, in float32."""
        _, _, frames, rows, columns = x_t.shape
        stride = self.spec.rules.spatial_stride
        extras = batch.conditioning.extras
        self.check_shape(frames, rows * stride, columns * stride)
        out = net(
            hidden_states=x_t[:, :, 0].to(self.dtype),
            timesteps=t.float() * 1000,
            encoder_hidden_states_t5=batch.conditioning.text.to(self.dtype),
            encoder_hidden_states_llama3=extras["llama"].to(self.dtype).transpose(0, 1),
            pooled_embeds=extras["pooled"].to(self.dtype),
            return_dict=False,
        )
        return -out[0][:, :, None].float()

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """One frame, and no more tokens than there are places."""
        if frames != 1:
            these = f"these are {frames} frames. Set video_config.frames=1"
            raise VideotuneError(f"{self.spec.title} generates images, and {these}.")
        most = self.spec.rules.most_area
        if most is not None and height * width > most:
            these = f"these are {height}x{width}. Set a lower resolution"
            raise VideotuneError(f"{self.spec.title} takes at most {most} pixels; {these}.")

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Nothing to do: there is one frame. Raises VideotuneError where it is asked for."""
        if on:
            keys = "video_config.use_temporal_attention, sample.use_temporal_attention"
            raise VideotuneError(
                f"{keys}: {self.spec.title} generates single frames: leave both at true."
            )

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """The pipeline asks the network for its places."""
        pipe = super().pipeline(nets, shift, cls, **parts)
        pipe.transformer.max_seq = self.spec.padded_tokens
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Of three readers."""
        words = {
            "prompt_embeds_t5": conditioning.text,
            "prompt_embeds_llama3": conditioning.extras["llama"].transpose(0, 1),
            "pooled_prompt_embeds": conditioning.extras["pooled"],
        }
        return {word: value.to(self.device, self.dtype) for word, value in words.items()}

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """The pipeline samples every request at one area, 1024² pixels of a published model.

        Here that area is the request's own, so that the pipeline's loop samples the size that was trained.
        """
        shape = request.shape
        pipe = self.pipeline(nets, request.shift)
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        if (
            "generator" in signature(pipe.scheduler.step).parameters
        ):  # Dev's and Fast's draws noise at every step
            pipe.scheduler.step = partial(pipe.scheduler.step, generator=generators)
        pipe.default_sample_size = (
            math.sqrt(shape.height * shape.width) / pipe.vae_scale_factor * NEARLY
        )
        latents = self.run_pipeline(
            pipe, conditioning, unconditional, request, generator=generators
        )
        assert latents.shape[2:] == self.spec.rules.latent_size(shape)[1:], (
            "the pipeline has changed the size"
        )
        return latents[:, :, None].float()


def _trainable(net: nn.Module) -> nn.Module:
    """diffusers' transformer, whose answer is (B,C,H,W) and carries its gradients whether it is set to train or not.

    As it comes, outside of ``.train()`` its routed experts run without gradients, so that all before them silently loses
    what goes through them; in ``.train()`` its answer is not unpatchified. Which branch of both runs no longer hangs on the
    mode.
    """
    from diffusers.models.transformers.transformer_hidream_image import (
        MOEFeedForwardSwiGLU,
    )  # imports torch

    known: Any = net
    kind: Any = type(net)
    plain = SimpleNamespace(
        config=known.config, max_seq=known.max_seq
    )  # no cycle, so it can be freed
    known.patchify = partial(_patchify, kind, plain)
    known.unpatchify = lambda tokens, sizes, _: kind.unpatchify(
        plain, tokens, sizes, False
    )  # diffusers' in evaluation
    for module in net.modules():
        if isinstance(module, MOEFeedForwardSwiGLU):
            module.gate._force_inference_output = True  # no auxiliary loss, which nothing reads
            forward = partialmethod(_routed, bound=next(module.parameters()).is_meta)
            module.__class__ = type(
                "Routed", (MOEFeedForwardSwiGLU,), {"forward": forward}
            )  # no cycle either
    return net


def _patchify(
    kind: Any, plain: Any, latents: Tensor
) -> tuple[Tensor, Tensor | None, list[tuple[int, int]], Tensor]:
    """diffusers' own, but sizes are numbers: its tensors would make the host wait for the device at every step."""
    tokens, mask, _, places = kind.patchify(plain, latents)
    patch = plain.config.patch_size
    return (
        tokens,
        mask,
        [(latents.shape[2] // patch, latents.shape[3] // patch)] * len(latents),
        places,
    )


def _routed(moe: Any, states: Tensor, bound: bool) -> Tensor:
    """What diffusers' experts compute in training, bit for bit: it asks the device for each expert which tokens it has.

    Here tokens are sorted by expert, and how many each has is on its way to the host while the shared experts compute.
    ``bound``: tokens have no numbers, so as few experts as may be get all, which takes the most memory.
    """
    from videotune.memory.host_weights import to_host  # imports torch

    chosen, weight, _ = moe.gate(states)
    counts = (chosen.view(-1, 1) == torch.arange(len(moe.experts), device=states.device)).sum(0)
    sizes, arrived = (
        to_host(counts) if overlaps(states.device) and not bound else (counts, None)
    )
    shared = moe.shared_experts(states)
    order = chosen.flatten().argsort(stable=True)
    rows = states.view(-1, states.shape[-1]).repeat_interleave(
        moe.num_activated_experts, dim=0
    )[order]
    if arrived is not None:
        arrived.synchronize()
    most = [len(rows) // moe.num_activated_experts] * moe.num_activated_experts
    parts = rows.split(most + [0] * (len(moe.experts) - len(most)) if bound else sizes.tolist())
    mixed = torch.cat([expert(part) for expert, part in zip(moe.experts, parts, strict=True)])[
        order.argsort()
    ]
    routed = (
        (mixed.view(*weight.shape, -1) * weight.unsqueeze(-1))
        .sum(dim=1)
        .view(states.shape)
        .to(states.dtype)
    )
    return routed + shared


def _of_frames(vae: Any) -> nn.Module:
    """A VAE of pictures that takes clips of one frame, (B,C,1,H,W)."""

    class OfFrames(torch.nn.Module):
        """Frames in, frames out."""

        def __init__(self) -> None:
            super().__init__()
            self.vae = vae
            self.config = vae.config
            self.enable_tiling = vae.enable_tiling
            self.disable_tiling = vae.disable_tiling

        def encode(self, frames: Tensor) -> Any:
            latent = vae.encode(frames[:, :, 0]).latent_dist
            frame = SimpleNamespace(
                mean=latent.mean[:, :, None], logvar=latent.logvar[:, :, None]
            )
            return SimpleNamespace(latent_dist=frame)

        def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
            return (vae.decode(latents[:, :, 0], return_dict=False)[0][:, :, None],)

    return OfFrames()


def join(base: Path, llama: Path, folder: Path) -> Path:
    """Write a folder of links in diffusers layout: the parts of ``base``, and ``llama`` as its fourth text encoder.

    Raises VideotuneError where either is something else, or the folder is there.
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
        raise VideotuneError(f"{folder} is there already: name a new folder")
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
            links[f"{tokenizer if 'token' in entry.name else part}/{entry.name}"] = entry
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target.absolute())
    named = {
        part: ["transformers", encoder],
        tokenizer: ["transformers", "PreTrainedTokenizerFast"],
    }
    (folder / "model_index.json").write_text(
        json.dumps(index | named, indent=2) + "\n", encoding="utf-8"
    )
    return folder


if __name__ == "__main__":
    import typer

    def main(base: Path, llama: Path, folder: Path) -> None:
        """Join HiDream-I1's folder and that of Llama-3.1-8B-Instruct to a new one, which holds links and takes no room."""
        try:
            print(join(base, llama, folder))
        except VideotuneError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error

    typer.run(main)
