"""A HunyuanVideo checkpoint: encoders, what the transformer is told, and its own pipeline over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.find import fingerprint, of_text, read_config
from videotune.families.held import Held
from videotune.families.hunyuan_video.facts import CROP, TEMPLATE, WIDTH, read_spec
from videotune.families.hunyuan_video.nets import both_encoders, isolate_frames, native
from videotune.families.loading import load_model
from videotune.families.pipelines import in_tiles, own_scheduler, stand_in, without_vae
from videotune.families.pretrained import read_tokenizer
from videotune.families.skeletons import on_meta
from videotune.families.text import text_skeletons
from videotune.types import (
    PLAIN_WEIGHTS,
    Batch,
    ClipShape,
    Condition,
    Moments,
    SampleRequest,
    TextPart,
    WeightDtypes,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

GUIDANCE = 1.0
"""What training tells the guidance embedding: a clip is what it is, not more so. Draws tell it 6."""

TEXT = {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"}
"""The text encoders' classes in transformers, by folder."""


class HunyuanVideo:
    """A HunyuanVideo checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes) -> None:
        self.spec = read_spec(folder)
        self.folder, self.device, self.dtype, self.weights = folder, device, dtype, weights
        self._config = read_config(folder / "transformer" / "config.json")
        self._held = Held(device)

    def _text_encoders(self) -> Any:
        """A diffusers pipeline of tokenizers and text encoders alone, for its own prompt handling."""

        def load() -> Any:
            tokenizers = self.tokenizers()
            llama, clip = (self._text_encoder(part) for part in TEXT)
            if clip.eos_token_id == 2:
                # The published config names a wrong end of text, and transformers then takes the token of the largest
                # number for it: the same, until there are new tokens with larger ones.
                clip.eos_token_id = tokenizers["text_encoder_2"].eos_token_id
            pipe = self._bare(llama, clip)
            pipe.tokenizer, pipe.tokenizer_2 = tokenizers.values()
            return pipe

        return self._held.get("text_encoder", load)

    def _text_encoder(self, part: str) -> Any:
        import transformers

        cls = getattr(transformers, TEXT[part])
        return load_model(cls, self.folder / part, self.dtype, self.device, self.weights.text_encoder)

    def _bare(self, llama: Any = None, clip: Any = None, net: Any = None, scheduler: Any = None) -> Any:
        from diffusers import HunyuanVideoPipeline

        return HunyuanVideoPipeline(
            text_encoder=llama, tokenizer=None, transformer=net, vae=None, scheduler=scheduler, text_encoder_2=clip,
            tokenizer_2=None,
        )  # fmt: skip

    def _tokenizer(self, name: str) -> Any:
        """A tokenizer as its file says. Llama's is read by the general class: Llama's own of transformers 5 would put the
        splitting of older Llamas in the place of what the file says, and give other tokens."""
        from transformers import PreTrainedTokenizerFast

        folder, encoder = self.folder / name, self.folder / name.replace("tokenizer", "text_encoder")
        if name != "tokenizer":
            return read_tokenizer(folder, encoder)
        if not (folder / "tokenizer.json").is_file():
            raise VideotuneError(f"{folder} has no tokenizer.json; take the file that comes with the checkpoint")
        tokenizer = read_tokenizer(folder, encoder, PreTrainedTokenizerFast)
        one, other = (tokenizer(TEMPLATE.format(word), verbose=False).input_ids for word in ("a", "0"))
        front = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
        if front != CROP or tokenizer.padding_side != "right":
            raise VideotuneError(
                f"{folder} is not HunyuanVideo's tokenizer: it pads on the {tokenizer.padding_side} and reads {front} "
                f"tokens in front of a caption, where the pipeline pads on the right and cuts {CROP} off"
            )
        return tokenizer

    def _vae(self) -> Any:
        """The VAE in float32, which works on 16 frames at a time by itself. Its pictures are not tiled unless asked for."""
        return self._held.get("vae", lambda: self.part("vae"))

    def free(self, part: str) -> None:
        """Drop "text_encoder" (both of them) or "vae" from memory."""
        self._held.free(part)

    def text_length(self, caption: str) -> int:
        """How many of Llama's tokens the caption has, the end mark included, before any cut at 256; CLIP reads 77."""
        tokenizer = self._text_encoders().tokenizer
        return len(tokenizer(TEMPLATE.format(caption), verbose=False).input_ids) - CROP

    def _encode(self, caption: str) -> dict[str, Tensor]:
        """The pipeline's own embedding of one caption: "text" (256, D), "mask" (256,) and "pooled" (P,)."""
        text, pooled, mask = self._text_encoders().encode_prompt(
            caption, max_sequence_length=self.spec.text_tokens, device=self.device
        )
        return {"text": text[0], "mask": mask[0].bool(), "pooled": pooled[0]}

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """For each caption Llama's states {"text": (l, D)}, less those of the padding, and CLIP's {"pooled": (P,)}."""
        states = []
        with _torch().no_grad():
            for caption in captions:
                one = self._encode(caption)
                length = int(one["mask"].sum())  # it pads on the right
                states.append({"text": one["text"][:length].cpu().clone(), "pooled": one["pooled"].cpu().clone()})
        return states

    def text_parts(self) -> Mapping[str, TextPart]:
        """Llama and CLIP with their tokenizers, as they read captions until they are freed."""
        pipe = self._text_encoders()
        return {
            "text_encoder": TextPart(pipe.tokenizer, pipe.text_encoder),
            "text_encoder_2": TextPart(pipe.tokenizer_2, pipe.text_encoder_2),
        }

    def tokenizers(self) -> Mapping[str, Any]:
        """Llama's and CLIP's tokenizers, fresh. Raises VideotuneError where Llama's does not fit the pipeline's template."""
        return {"text_encoder": self._tokenizer("tokenizer"), "text_encoder_2": self._tokenizer("tokenizer_2")}

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """Llama and CLIP without weights."""
        return {part: text_skeletons(self.folder, name, part)[part] for part, name in TEXT.items()}

    def encode_in_loop(self, captions: Sequence[str]) -> Condition:
        """What ``condition`` gives, encoded one caption after the other; equal ones once."""
        torch, known = _torch(), {caption: self._encode(caption) for caption in dict.fromkeys(captions)}
        told = {
            name: torch.stack([known[caption][name] for caption in captions]) for name in ("text", "mask", "pooled")
        }
        text = told["text"].where(told["mask"][..., None], told["text"].new_zeros(()))
        return Condition(text, told["mask"], {"pooled": told["pooled"]})

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token; ComfyUI's tokenizers of these encoders ask for "llama" and "clip_l"."""
        return {"diffusers": {}, "comfyui": {"text_encoder": "llama", "text_encoder_2": "clip_l"}}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """Text (B,256,D), zeros after the true length, where the mask (B,256) is False; what else there is stacked.

        The pipeline feeds states of the padding there, which the mask hides: they change nothing.
        """
        torch = _torch()
        text = torch.zeros(len(states), self.spec.text_tokens, self.spec.text_width, dtype=states[0]["text"].dtype)
        mask = torch.zeros(text.shape[:2], dtype=torch.bool)
        for row, shown, state in zip(text, mask, states, strict=True):
            row[: len(state["text"])] = state["text"]
            shown[: len(state["text"])] = True
        others = [name for name in states[0] if name != "text"]
        return Condition(text, mask, {name: torch.stack([state[name] for state in states]) for name in others})

    def encode_video(self, frames: Tensor, random: np.random.Generator | None = None) -> Moments:
        """Frames (3,T,H,W) in [-1,1] -> the moments of z · scaling_factor, from which each view draws."""
        with self._held.vae_lock, _torch().no_grad():
            vae = self._vae()
            scale = float(vae.config.scaling_factor)
            latent = vae.encode(frames[None].to(self.device)).latent_dist
            mean, logvar = latent.mean[0] * scale, latent.logvar[0] + 2 * math.log(scale)
        return Moments(mean.float().cpu(), logvar.float().cpu())

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the place of what ``encode_text`` gives of a full caption."""
        torch, width = _torch(), self._config["pooled_projection_dim"]
        text = torch.zeros(self.spec.text_tokens, self.spec.text_width, dtype=self.dtype)
        return {"text": text, "pooled": torch.zeros(width, dtype=self.dtype)}

    def part(self, name: str) -> nn.Module:
        """The network of "text_encoder" (both, reading as Llama does) or "vae", loaded for this call."""
        if name == "text_encoder":
            return both_encoders(*(self._text_encoder(part) for part in TEXT))
        from diffusers import AutoencoderKLHunyuanVideo

        return load_model(AutoencoderKLHunyuanVideo, self.folder / name, _torch().float32, self.device)

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over."""
        with self._held.vae_lock, _torch().no_grad(), in_tiles(self._vae(), tiled):
            vae = self._vae()
            pixels = vae.decode(latents[None].to(self.device) / vae.config.scaling_factor, return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen."""
        from diffusers import HunyuanVideoTransformer3DModel as Net

        folder, kept = self.folder / (expert or "transformer"), self.weights.transformer
        return load_model(Net, folder, self.dtype, self.device, kept, self.spec.blocks)

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer's shape without weights."""
        from diffusers import HunyuanVideoTransformer3DModel as Net

        return on_meta(Net, self.folder / (expert or "transformer"))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0 (B,C,F,H,W) float32; the network is told 1000 t in float32, and a guidance of 1.

        As the pipeline does, guidance is told to a checkpoint that has no embedding for it too: it does not listen.
        """
        torch, cond = _torch(), batch.cond
        assert cond.text_mask is not None
        guidance = torch.full((len(x_t),), GUIDANCE, dtype=self.dtype, device=x_t.device) * 1000.0
        out = net(
            hidden_states=x_t.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=cond.text.to(self.dtype),
            encoder_attention_mask=cond.text_mask.to(self.dtype),
            pooled_projections=cond.extras["pooled"].to(self.dtype),
            guidance=guidance,
            return_dict=False,
        )
        return out[0].float()

    def pipeline(self, nets: Mapping[str, nn.Module], shift: float | None = None) -> Any:
        """The checkpoint's own pipeline over ``nets``, without VAE and text encoders, with its own scheduler."""
        net = stand_in(nets, self.spec.experts[0].name, self._config, self.dtype, self.device)
        return without_vae(self._bare(net=net, scheduler=own_scheduler(self.folder, shift)), self.spec.rules)

    def sample(
        self, nets: Mapping[str, nn.Module], cond: Condition, uncond: Condition | None, request: SampleRequest
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        Guidance is told to the network, once a step. ``uncond`` is asked of a checkpoint alone that has no embedding for
        it: there guidance is what two answers make of it.
        """
        torch, shape, told = _torch(), request.shape, {"guidance_scale": request.guidance}
        if not self._config["guidance_embeds"]:
            told = {"guidance_scale": GUIDANCE, "true_cfg_scale": request.guidance}
            told |= {} if uncond is None else {f"negative_{name}": value for name, value in self._words(uncond).items()}
        return (
            self.pipeline(nets, request.shift)(
                **self._words(cond),
                **told,
                height=shape.height,
                width=shape.width,
                num_frames=shape.frames,
                num_inference_steps=request.steps,
                generator=[torch.Generator("cpu").manual_seed(seed) for seed in request.seeds],
                output_type="latent",
            )
            .frames.float()
        )  # fmt: skip

    def _words(self, cond: Condition) -> dict[str, Any]:
        """What is said of captions, by the pipeline's names."""
        assert cond.text_mask is not None
        return {
            "prompt_embeds": cond.text.to(self.device, self.dtype),
            "prompt_attention_mask": cond.text_mask.to(self.device),
            "pooled_prompt_embeds": cond.extras["pooled"].to(self.device, self.dtype),
        }

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Video tokens attend to their own latent frame and the text, text to text alone; until turned off."""
        isolate_frames(net, on)

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that draws from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        from diffusers import HunyuanVideoPipeline

        return HunyuanVideoPipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys; in ComfyUI's form several modules share one.

        diffusers reads ComfyUI's form of the published width alone, so a file for another could not be proved.
        """
        maps: dict[str, Callable[[str], str]] = {"diffusers": lambda path: f"transformer.{path}"}
        if self._config["num_attention_heads"] * self._config["attention_head_dim"] == WIDTH:
            maps["comfyui"] = lambda path: f"diffusion_model.{native(path)}"
        return maps

    def native(self, path: str) -> str:
        """A block module's path in diffusers -> its name in the authors' code; several modules share one."""
        return native(path)

    def full_key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a parameter's name in diffusers to its name in a file of all weights, in each format.

        The authors' files join what diffusers has apart, which no renaming does.
        """
        return {"diffusers": lambda name: name}

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's file ends in, before .safetensors: there is one."""
        return ""

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on."""
        parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        text = of_text(self.folder, parts, self.weights, self.dtype)
        return {"text_encoder": text} | {part: fingerprint(self.folder / part) for part in ("vae", "transformer")}


def open_family(
    folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes = PLAIN_WEIGHTS
) -> HunyuanVideo:
    """The family over a checkpoint folder."""
    return HunyuanVideo(folder, device, dtype, weights)


def _torch() -> Any:
    import torch

    return torch
