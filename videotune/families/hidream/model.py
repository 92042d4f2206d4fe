"""A HiDream-I1 checkpoint: encoders, what the transformer is told, and its own pipeline over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.find import fingerprint, of_text, read_config
from videotune.families.held import Held
from videotune.families.hidream.facts import ENCODERS, read_spec
from videotune.families.hidream.nets import pictures, ready
from videotune.families.hidream.text import encoders, reader, states, together
from videotune.families.loading import load_model
from videotune.families.pipelines import in_tiles, own_scheduler, stand_in
from videotune.families.skeletons import on_meta
from videotune.families.text import fresh_tokenizers, text_skeletons
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

NEARLY = 1 + 1e-9
"""The pipeline rounds sizes down after a division; so much more than the size itself, and it stays what it is."""


class HiDream:
    """A HiDream-I1 checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes) -> None:
        self.spec = read_spec(folder)
        self.folder, self.device, self.dtype, self.weights = folder, device, dtype, weights
        self._held = Held(device)

    def _reader(self) -> Any:
        return self._held.get("text_encoder", lambda: reader(self.folder, self.dtype, self.device, self.weights))

    def _vae(self) -> Any:
        """The VAE in float32. It is never tiled unless asked: tiles would give other latents than the pipeline's."""
        from diffusers import AutoencoderKL as Vae

        return self._held.get("vae", lambda: load_model(Vae, self.folder / "vae", _torch().float32, self.device))

    def free(self, part: str) -> None:
        """Drop "text_encoder" (all four) or "vae" from memory."""
        self._held.free(part)

    def text_length(self, caption: str) -> int:
        """The most tokens that any of the four tokenizers makes of the caption, marks included, before any cut."""
        pipe = self._reader()
        return max(len(getattr(pipe, name)(caption, verbose=False).input_ids) for name, _ in ENCODERS.values())

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """What the pipeline makes of each caption, padding included, on the CPU: "text", "llama" and "pooled".

        No reader of these masks padding, and the states of padding hang on the caption: all of them are told and kept.
        """
        with _torch().no_grad():
            told = (self._encode(caption) for caption in captions)
            return [{name: value.cpu().clone() for name, value in one.items()} for one in told]

    def _encode(self, caption: str) -> dict[str, Tensor]:
        return states(self._reader(), caption, self.spec.text_tokens, self.device)

    def text_parts(self) -> Mapping[str, TextPart]:
        """The text encoders with their tokenizers, as they read captions until they are freed."""
        pipe = self._reader()
        return {part: TextPart(getattr(pipe, name), getattr(pipe, part)) for part, (name, _) in ENCODERS.items()}

    def tokenizers(self) -> Mapping[str, Any]:
        """A fresh tokenizer of each text encoder."""
        return fresh_tokenizers(self.folder, {part: name for part, (name, _) in ENCODERS.items()})

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """The text encoders without weights."""
        found: dict[str, nn.Module] = {}
        for part, (_, name) in ENCODERS.items():
            found |= text_skeletons(self.folder, name, part)
        return found

    def encode_in_loop(self, captions: Sequence[str]) -> Condition:
        """Captions encoded one after the other; equal ones once."""
        known = {caption: self._encode(caption) for caption in dict.fromkeys(captions)}
        return self.condition([known[caption] for caption in captions])

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token, a file for each text encoder."""
        return {"diffusers": {}}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """T5's states (B,128,D); extras["llama"] (B,layers,128,D) and extras["pooled"] (B,P)."""
        stacked = {name: _torch().stack([state[name] for state in states]) for name in ("text", "llama", "pooled")}
        return Condition(stacked.pop("text"), None, stacked)

    def encode_video(self, frames: Tensor, random: np.random.Generator | None = None) -> Moments:
        """A picture (3,1,H,W) in [-1,1] -> the moments of (z - shift_factor)·scaling_factor, from which each view draws.

        ``random`` is for other families: nothing is drawn here. Raises VideotuneError for more frames, and for a size that
        the model does not take.
        """
        self._refuse_shape(*frames.shape[1:])
        with self._held.vae_lock, _torch().no_grad():
            vae = self._vae()
            scale, shift = float(vae.config.scaling_factor), float(vae.config.shift_factor)
            latent = vae.encode(frames[:, 0][None].to(self.device)).latent_dist
            mean, logvar = (latent.mean[0] - shift) * scale, latent.logvar[0] + 2 * math.log(scale)
        return Moments(mean[:, None].float().cpu(), logvar[:, None].float().cpu())

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the place of what ``encode_text`` gives."""
        torch, config = _torch(), read_config(self.folder / "transformer" / "config.json")
        tokens, layers = self.spec.text_tokens, max(config["llama_layers"]) + 1
        return {
            "text": torch.zeros(tokens, self.spec.text_width, dtype=self.dtype),
            "llama": torch.zeros(layers, tokens, config["caption_channels"][1], dtype=self.dtype),
            "pooled": torch.zeros(config["text_emb_dim"], dtype=self.dtype),
        }

    def part(self, name: str) -> nn.Module:
        """The networks of "text_encoder", all four, or of "vae", which takes clips of one frame; loaded for this call."""
        if name == "text_encoder":
            return together(encoders(self.folder, self.dtype, self.device, self.weights))
        from diffusers import AutoencoderKL

        return pictures(load_model(AutoencoderKL, self.folder / name, _torch().float32, self.device))

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,1,H,W) -> pixels (3,1,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over."""
        with self._held.vae_lock, _torch().no_grad(), in_tiles(self._vae(), tiled):
            vae = self._vae()
            z = latents[:, 0][None].to(self.device) / vae.config.scaling_factor + vae.config.shift_factor
            pixels = vae.decode(z, return_dict=False)[0][0]
        return pixels[:, None].clamp(-1, 1).float().cpu()

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen; its routed experts carry gradients."""
        from diffusers import HiDreamImageTransformer2DModel as Net

        folder, kept = self.folder / (expert or "transformer"), self.weights.transformer
        return ready(load_model(Net, folder, self.dtype, self.device, kept, self.spec.blocks))

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer's shape without weights."""
        from diffusers import HiDreamImageTransformer2DModel as Net

        return on_meta(Net, self.folder / (expert or "transformer"))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0 (B,C,1,H,W) float32, which is the network's answer turned about; it is told 1000 t, in float32."""
        _, _, frames, rows, columns = x_t.shape
        stride, extras = self.spec.rules.spatial_stride, batch.cond.extras
        self._refuse_shape(frames, rows * stride, columns * stride)
        out = net(
            hidden_states=x_t[:, :, 0].to(self.dtype),
            timesteps=t.float() * 1000,
            encoder_hidden_states_t5=batch.cond.text.to(self.dtype),
            encoder_hidden_states_llama3=extras["llama"].to(self.dtype).transpose(0, 1),
            pooled_embeds=extras["pooled"].to(self.dtype),
            return_dict=False,
        )
        return -out[0][:, :, None].float()

    def _refuse_shape(self, frames: int, height: int, width: int) -> None:
        """VideotuneError for more than one frame, and for more tokens than there are places."""
        if frames != 1:
            raise VideotuneError(
                f"{self.spec.title} draws pictures: it takes images and single frames of clips, and these are {frames} "
                "frames. Set video_config.frames=1."
            )
        most = self.spec.rules.most_area
        if most is not None and height * width > most:
            raise VideotuneError(
                f"{self.spec.title} takes at most {most} pixels ({math.isqrt(most)}x{math.isqrt(most)}), and these are "
                f"{height}x{width}. Set a lower resolution."
            )

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Nothing to do: there is one frame. Raises VideotuneError where it is asked for."""
        if on:
            raise VideotuneError(
                f"video_config.use_temporal_attention, sample.use_temporal_attention: {self.spec.title} draws single "
                "frames, which attend to no other: leave both as they are (true)."
            )

    def pipeline(self, nets: Mapping[str, nn.Module], shift: float | None = None) -> Any:
        """The family's diffusers pipeline over the one network, without VAE and text encoders, with its own scheduler.

        ``nets`` is asked for it at each step and not before, so it may load it then.
        """
        name = self.spec.experts[0].name
        facts = read_config(self.folder / name / "config.json")
        net = stand_in(nets, name, facts, self.dtype, self.device)
        net.max_seq = math.prod(facts["max_resolution"]) // facts["patch_size"] ** 2
        parts = dict.fromkeys([*ENCODERS, *(place for place, _ in ENCODERS.values())])
        scheduler = own_scheduler(self.folder, shift)
        pipe = self.pipeline_class()(scheduler=scheduler, vae=None, transformer=net, **parts)
        pipe.vae_scale_factor = self.spec.rules.spatial_stride
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def sample(
        self, nets: Mapping[str, nn.Module], cond: Condition, uncond: Condition | None, request: SampleRequest
    ) -> Tensor:
        """Normalised latents (B,C,1,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        The pipeline draws every request at one area, 1024² pixels of a published model. Here that area is the request's
        own, so that the pipeline's loop draws the size that was trained.
        """
        torch, shape = _torch(), request.shape
        self._refuse_shape(shape.frames, shape.height, shape.width)
        pipe = self.pipeline(nets, request.shift)
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        if "generator" in signature(pipe.scheduler.step).parameters:  # Dev's and Fast's draws noise at every step
            pipe.scheduler.step = partial(pipe.scheduler.step, generator=generators)
        pipe.default_sample_size = math.sqrt(shape.height * shape.width) / pipe.vae_scale_factor * NEARLY
        latents = pipe(
            **self._told(cond, ""),
            **({} if uncond is None else self._told(uncond, "negative_")),
            height=shape.height,
            width=shape.width,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=generators,
            output_type="latent",
        ).images
        assert latents.shape[2:] == self.spec.rules.latent_size(shape)[1:], "the pipeline has changed the size"
        return latents[:, :, None].float()

    def _told(self, cond: Condition, which: str) -> dict[str, Tensor]:
        """A condition in the pipeline's words; ``which`` is what stands before them."""
        words = {
            "prompt_embeds_t5": cond.text,
            "prompt_embeds_llama3": cond.extras["llama"].transpose(0, 1),
            "pooled_prompt_embeds": cond.extras["pooled"],
        }
        return {f"{which}{word}": value.to(self.device, self.dtype) for word, value in words.items()}

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that draws from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        from diffusers import HiDreamImagePipeline

        return HiDreamImagePipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys, in each format; the authors' names are diffusers'."""
        return {"diffusers": lambda path: f"transformer.{path}", "comfyui": lambda path: f"diffusion_model.{path}"}

    def native(self, path: str) -> str:
        """A block module's path in diffusers, which is its name in the authors' code too."""
        return path

    def full_key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a parameter's name in diffusers to its name in a file of all weights, in each format."""
        return {"diffusers": lambda name: name, "original": lambda name: name}

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's file ends in, before .safetensors: there is one."""
        return ""

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on."""
        folders = [place for part, (tokenizer, _) in ENCODERS.items() for place in (part, tokenizer)]
        text = of_text(self.folder, folders, self.weights, self.dtype)
        return {"text_encoder": text} | {part: fingerprint(self.folder / part) for part in ("vae", "transformer")}


def open_family(
    folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes = PLAIN_WEIGHTS
) -> HiDream:
    """The family over a checkpoint folder."""
    return HiDream(folder, device, dtype, weights)


def _torch() -> Any:
    import torch

    return torch
