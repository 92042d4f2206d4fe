"""Wan 2.1 and 2.2 (Wan team 2025, arXiv 2503.20314): flow matching, UMT5 text, a causal video VAE.

Text to video with one denoiser: 2.1 T2V 1.3B and 14B, and 2.2 TI2V-5B from text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.find import fingerprint, read_config
from videotune.families.loading import load_model
from videotune.types import Batch, Condition, Expert, FamilySpec, Moments, SampleRequest, VideoRules

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ATTENTION = (r"blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",)
FEED_FORWARD = (r"blocks\.\d+\.ffn\.(net\.0\.proj|net\.2)",)

SPEC = FamilySpec(
    name="wan",
    known_as=("WanPipeline", "wan2.1", "wan2.2", "wan21", "wan22", "WAN_2_2", "WAN_2_1"),
    title="Wan 2.1 T2V",
    path="flow",
    rules=VideoRules(4, 1, 16, 16.0, 8, 4),
    latent_channels=16,
    patch=(1, 2, 2),
    text_tokens=512,
    text_width=4096,
    given="none",
    experts=(Expert("transformer"),),
    blocks=("blocks",),
    lora_targets={"attention": ATTENTION, "linear": ATTENTION + FEED_FORWARD},
    default_resolution=480,
    timestep_distribution="LOGIT_NORMAL",
    timestep_shift=3.0,
    sample_steps=30,
    sample_guidance=5.0,
    fp16_safe=False,
    licence="Apache-2.0",
)


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    Raises VideotuneError for the Wan checkpoints that videotune does not train yet.
    """
    index = read_config(folder / "model_index.json")
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    if index.get("boundary_ratio") is not None or (folder / "transformer_2").is_dir():
        raise VideotuneError(f"{folder}: a Wan checkpoint with two experts (A14B) cannot be trained yet")
    if net["in_channels"] != vae["z_dim"]:
        raise VideotuneError(f"{folder}: an image-to-video Wan checkpoint cannot be trained yet")
    spatial, temporal = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
    patch = tuple(net["patch_size"])
    fps = 24.0 if index.get("expand_timesteps") else 16.0
    return replace(
        SPEC,
        title="Wan 2.2 TI2V" if index.get("expand_timesteps") else "Wan 2.1 T2V",
        rules=VideoRules(temporal, 1, spatial * patch[1], fps, spatial, temporal),
        latent_channels=vae["z_dim"],
        patch=patch,
        text_width=net["text_dim"],
        timestep_shift=5.0 if index.get("expand_timesteps") else SPEC.timestep_shift,
    )


class Wan:
    """A Wan checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = read_spec(folder)
        self.folder, self.device, self.dtype = folder, device, dtype
        self._parts: dict[str, Any] = {}
        self._vae_lock = RLock()  # the VAE keeps its state between frames in itself: one clip at a time

    def _text_encoder(self) -> Any:
        """A diffusers pipeline of tokenizer and text encoder alone, for its own prompt handling."""
        if "text_encoder" not in self._parts:
            from diffusers import WanPipeline
            from transformers import AutoTokenizer, UMT5EncoderModel

            encoder = load_model(UMT5EncoderModel, self.folder / "text_encoder", self.dtype, self.device)
            tokenizer = AutoTokenizer.from_pretrained(self.folder / "tokenizer")
            self._parts["text_encoder"] = WanPipeline(tokenizer, encoder, vae=None, scheduler=None)
        return self._parts["text_encoder"]

    def _vae(self) -> Any:
        """The VAE in float32. It is never tiled: tiles would give other latents and other frames than the pipeline's."""
        if "vae" not in self._parts:
            from diffusers import AutoencoderKLWan

            self._parts["vae"] = load_model(AutoencoderKLWan, self.folder / "vae", _torch().float32, self.device)
        return self._parts["vae"]

    def free(self, part: str) -> None:
        """Drop "text_encoder" or "vae" from memory."""
        with self._vae_lock:
            self._parts.pop(part, None)
        if self.device.type == "cuda":
            _torch().cuda.empty_cache()

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has, the end mark included, before any cut at 512."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self._text_encoder().tokenizer(prompt_clean(caption), verbose=False).input_ids)

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """{"text": (l, D)} for each caption: the pipeline's own embedding less its zero padding, on the CPU."""
        torch, pipe, states = _torch(), self._text_encoder(), []
        with torch.no_grad():
            for caption in captions:
                text, _ = pipe.encode_prompt(
                    caption,
                    do_classifier_free_guidance=False,
                    max_sequence_length=self.spec.text_tokens,
                    device=self.device,
                )
                length = min(self.text_length(caption), self.spec.text_tokens)
                states.append({"text": text[0, :length].cpu().clone()})
        return states

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """Text (B,512,D), zeros after the true length: the pipeline feeds no mask."""
        torch = _torch()
        text = torch.zeros(len(states), self.spec.text_tokens, self.spec.text_width, dtype=states[0]["text"].dtype)
        for row, state in zip(text, states, strict=True):
            row[: len(state["text"])] = state["text"]
        return Condition(text)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """The VAE's latent mean and standard deviation, (C,1,1,1) each."""
        config, torch = self._vae().config, _torch()
        values = (config.latents_mean, config.latents_std)
        mean, std = (torch.tensor(v, device=self.device).view(-1, 1, 1, 1) for v in values)
        return mean, std

    def encode_video(self, frames: Tensor) -> Moments:
        """Frames (3,T,H,W) in [-1,1], T = 4n+1 -> the normalised latent mean; Wan's authors train on it alone."""
        with self._vae_lock, _torch().no_grad():
            mean, std = self._statistics()
            latent = self._vae().encode(frames[None].to(self.device)).latent_dist.mode()[0]
        return Moments(((latent - mean) / std).float().cpu())

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU."""
        with self._vae_lock, _torch().no_grad():
            mean, std = self._statistics()
            pixels = self._vae().decode((latents.to(self.device) * std + mean)[None], return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen; norms and embedders that diffusers keeps in float32 stay so."""
        from diffusers import WanTransformer3DModel

        return load_model(WanTransformer3DModel, self.folder / (expert or "transformer"), self.dtype, self.device)

    def skeleton(self) -> nn.Module:
        """The transformer's shape without weights."""
        from diffusers import WanTransformer3DModel

        with _torch().device("meta"):
            return WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(self.folder / "transformer"))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0 (B,C,F,H,W) float32; the network is told 1000 t, in float32."""
        out = net(
            hidden_states=x_t.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=batch.cond.text.to(self.dtype),
            return_dict=False,
        )
        return out[0].float()

    def pipeline(self, net: nn.Module, shift: float | None = None) -> Any:
        """WanPipeline over ``net``, without VAE and text encoder, with the checkpoint's own scheduler."""
        import diffusers

        index = read_config(self.folder / "model_index.json")
        scheduler_class = getattr(diffusers, index["scheduler"][1])
        config = scheduler_class.load_config(self.folder / "scheduler")
        if shift is not None:
            config |= {"flow_shift" if "flow_shift" in config else "shift": shift}
        pipe = diffusers.WanPipeline(
            None,
            None,
            vae=None,
            scheduler=scheduler_class.from_config(config),
            transformer=net,
            expand_timesteps=bool(index.get("expand_timesteps")),
        )
        pipe.vae_scale_factor_spatial = self.spec.rules.spatial_stride
        pipe.vae_scale_factor_temporal = self.spec.rules.temporal_stride
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def sample(self, net: nn.Module, cond: Condition, uncond: Condition | None, request: SampleRequest) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each."""
        torch, shape = _torch(), request.shape
        latents = self.pipeline(net, request.shift)(
            prompt_embeds=cond.text.to(self.device, self.dtype),
            negative_prompt_embeds=None if uncond is None else uncond.text.to(self.device, self.dtype),
            height=shape.height,
            width=shape.width,
            num_frames=shape.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in request.seeds],
            output_type="latent",
        )
        return latents.frames.float()

    def pipeline_class(self) -> Any:
        """The diffusers pipeline whose ``load_lora_weights`` reads our files."""
        from diffusers import WanPipeline

        return WanPipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys, in each format."""
        return {
            "diffusers": lambda path: f"transformer.{path}",
            "comfyui": lambda path: f"diffusion_model.{native(path)}",
        }

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on."""
        text = "-".join([fingerprint(self.folder / part) for part in ("text_encoder", "tokenizer")] + [str(self.dtype)])
        parts = {part: fingerprint(self.folder / part) for part in ("vae", "transformer")}
        return {"text_encoder": text, **parts}


_NATIVE = (
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.add_([kv])_proj$", r".\1_img"),
    (r"\.to_([qkv])$", r".\1"),
    (r"\.to_out\.0$", ".o"),
    (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
    (r"\.ffn\.net\.2$", ".ffn.2"),
)


def native(path: str) -> str:
    """A block module's path in diffusers -> its name in the authors' code, which ComfyUI uses."""
    for pattern, name in _NATIVE:
        path = re.sub(pattern, name, path)
    return path


def token_lengths(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens each caption has, the end mark included, without torch; None without a tokenizer.json."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        return None
    import html

    import ftfy
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cleaned = [" ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split()) for caption in captions]
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(cleaned)]


def open_family(folder: Path, device: torch.device, dtype: torch.dtype) -> Wan:
    """The family over a checkpoint folder."""
    return Wan(folder, device, dtype)


def oracle(x0: Tensor) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,F,H,W): v = (x_t - x0) / t, told 1000 t.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it.
    """

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        t = (timestep.float() / 1000).view(-1, 1, 1, 1, 1)
        return (hidden_states - x0) / t

    return answer


def tiny(folder: Path, seed: int = 0) -> Path:
    """Write a random Wan checkpoint of some 40,000 parameters in the real layout, and return its folder."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    from videotune.families.tiny import letters_tokenizer

    torch = _torch()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
        )
        net = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=128,
        )
        tokenizer = letters_tokenizer()
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
            )
        )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    WanPipeline(tokenizer, encoder, vae, scheduler, net).save_pretrained(folder)
    return folder


def _torch() -> Any:
    import torch

    return torch
