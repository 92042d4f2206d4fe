"""An LTX-Video checkpoint: encoders, what the transformer is told, and its own pipelines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.find import fingerprint, of_text, read_config
from videotune.families.held import Held
from videotune.families.loading import load_model
from videotune.families.ltx_video.facts import newer, read_spec
from videotune.families.ltx_video.nets import encoded, full_name, isolate_frames, quiet_schedule
from videotune.families.pipelines import in_tiles, own_scheduler, stand_in
from videotune.families.skeletons import on_meta
from videotune.families.text import fresh_tokenizers, text_skeletons
from videotune.rng import draws, seed32
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

DECODE_TIMESTEP, DECODE_NOISE = 0.05, 0.025
"""What a VAE that is told a timestep decodes with, and the share of noise then laid on the latents: its authors' own."""


class LTXVideo:
    """An LTX-Video checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes) -> None:
        self.spec, self.newer = read_spec(folder), newer(folder)
        self.folder, self.device, self.dtype, self.weights = folder, device, dtype, weights
        self._held = Held(device)

    def _text_encoder(self) -> Any:
        """A diffusers pipeline of tokenizer and text encoder alone, for its own prompt handling."""

        def load() -> Any:
            encoder = self._t5()
            return self.pipeline_class()(None, None, encoder, self.tokenizers()["text_encoder"], None)

        return self._held.get("text_encoder", load)

    def _vae(self) -> Any:
        """The VAE in float32. It is not tiled, unless asked: tiles give other pixels than the pipeline's."""
        return self._held.get("vae", lambda: self.part("vae"))

    def free(self, part: str) -> None:
        """Drop "text_encoder" or "vae" from memory."""
        self._held.free(part)

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has, the end mark included, before any cut."""
        return len(self._text_encoder().tokenizer(caption, verbose=False).input_ids)

    def _encode(self, caption: str) -> tuple[Tensor, Tensor]:
        """The pipeline's own embedding (L,D), padding included, and its mask (L,), True where the caption is."""
        text, mask, _, _ = self._text_encoder().encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=self.spec.text_tokens, device=self.device
        )
        return text[0], mask[0]

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """{"text": (L,D), "mask": (L,) bool} for each caption, padding included, on the CPU.

        Up to 0.9.1 T5 reads the padding without a mask, so that it acts on the words; the transformer sees the words alone.
        """
        with _torch().no_grad():
            found = [self._encode(caption) for caption in captions]
        return [{"text": text.cpu().clone(), "mask": mask.cpu().clone()} for text, mask in found]

    def text_parts(self) -> Mapping[str, TextPart]:
        """T5 and its tokenizer, as they read captions until they are freed."""
        pipe = self._text_encoder()
        return {"text_encoder": TextPart(pipe.tokenizer, pipe.text_encoder)}

    def tokenizers(self) -> Mapping[str, Any]:
        """T5's tokenizer, fresh."""
        return fresh_tokenizers(self.folder)

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """T5 without weights."""
        return text_skeletons(self.folder, "T5EncoderModel")

    def encode_in_loop(self, captions: Sequence[str]) -> Condition:
        """Text (B,L,D) and mask (B,L), encoded one caption after the other; equal ones once."""
        found = {caption: self._encode(caption) for caption in dict.fromkeys(captions)}
        texts, masks = zip(*(found[caption] for caption in captions), strict=True)
        return Condition(_torch().stack(texts), _torch().stack(masks))

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token; ComfyUI's tokenizer of this encoder asks for "t5xxl"."""
        return {"diffusers": {}, "comfyui": {"text_encoder": "t5xxl"}}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """Text (B,L,D), and the mask (B,L) that the pipeline hands to the transformer."""
        stack = _torch().stack
        return Condition(stack([state["text"] for state in states]), stack([state["mask"] for state in states]))

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """The mean of the VAE's latents and what they are divided by then, (C,1,1,1) each; buffers of the VAE itself."""
        vae = self._vae()
        mean, std = (buffer.float().view(-1, 1, 1, 1) for buffer in (vae.latents_mean, vae.latents_std))
        return mean, std / vae.config.scaling_factor

    def encode_video(self, frames: Tensor, random: np.random.Generator | None = None) -> Moments:
        """Frames (3,T,H,W) in [-1,1], T = 8n+1 -> the normalised moments, from which each view draws.

        ``random`` is for other families: nothing is drawn here. The first latent frame is the first frame's alone.
        """
        with self._held.vae_lock, _torch().no_grad():
            mean, std = self._statistics()
            latent = self._vae().encode(frames[None].to(self.device)).latent_dist
            moments = (latent.mean[0] - mean) / std, latent.logvar[0] - 2 * std.log()
        return Moments(*(moment.float().cpu() for moment in moments))

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the place of what ``encode_text`` gives of a full caption."""
        torch, length = _torch(), self.spec.text_tokens
        text = torch.zeros(length, self.spec.text_width, dtype=self.dtype)
        return {"text": text, "mask": torch.ones(length, dtype=torch.bool)}

    def part(self, name: str) -> nn.Module:
        """The network of "text_encoder" or "vae", loaded for this call; a VAE that is told a timestep is told the usual."""
        from diffusers import AutoencoderKLLTXVideo

        if name == "text_encoder":
            return self._t5()
        net: Any = load_model(AutoencoderKLLTXVideo, self.folder / name, _torch().float32, self.device)
        if net.config.timestep_conditioning:
            net.decode = _told_timestep(net.decode)
        return net

    def _t5(self) -> nn.Module:
        from transformers import T5EncoderModel

        folder = self.folder / "text_encoder"
        return load_model(T5EncoderModel, folder, self.dtype, self.device, self.weights.text_encoder)

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over.

        A VAE that is told a timestep gets a little noise on its latents, and some draw more inside: always the same.
        """
        torch = _torch()
        with self._held.vae_lock, torch.no_grad(), in_tiles(self._vae(), tiled), _own_draws(self.device):
            mean, std = self._statistics()
            raw = (latents.to(self.device) * std + mean)[None]
            if self._vae().config.timestep_conditioning:
                noise = torch.from_numpy(draws(0, "decode noise").standard_normal(tuple(raw.shape), "float32"))
                raw = (1 - DECODE_NOISE) * raw + DECODE_NOISE * noise.to(raw)
            pixels = self._vae().decode(raw, return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen; there is one expert."""
        from diffusers import LTXVideoTransformer3DModel as Net

        folder, kept = self.folder / "transformer", self.weights.transformer
        return load_model(Net, folder, self.dtype, self.device, kept, self.spec.blocks)

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer's shape without weights."""
        from diffusers import LTXVideoTransformer3DModel as Net

        return on_meta(Net, self.folder / "transformer")

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0 (B,C,F,H,W) float32; the network is told 1000 t, in float32, and 0 of tokens that are given.

        One timestep a sample says the same as one a token where nothing is given, and is lighter.
        """
        frames, rows, columns = x_t.shape[2:]
        told = t.float() * 1000
        if batch.any_given:
            told = (told[:, None] * ~batch.given[:, 0, :, 0, 0]).repeat_interleave(rows * columns, dim=1)
        elif self.newer:
            told = told[:, None]
        assert batch.cond.text_mask is not None
        out = net(
            hidden_states=_packed(x_t.to(self.dtype)),
            encoder_hidden_states=batch.cond.text.to(self.dtype),
            timestep=told,
            encoder_attention_mask=batch.cond.text_mask,
            return_dict=False,
            **self._positions(batch.fps, frames, rows, columns),
        )
        return out[0].transpose(1, 2).reshape(x_t.shape).float()

    def _positions(self, fps: Tensor, frames: int, rows: int, columns: int) -> dict[str, Any]:
        """Where the tokens lie, in pixels and in seconds at each sample's fps (B,), as the checkpoint's pipeline tells it.

        Up to 0.9.1 latent frame i is at 8i frames; from 0.9.5 on at its first, max(8i - 7, 0).
        """
        rules = self.spec.rules
        if not self.newer:
            seconds = (rules.temporal_stride / fps.float()).view(-1, 1, 1, 1, 1)
            scale = seconds, rules.spatial_stride, rules.spatial_stride
            return {"num_frames": frames, "height": rows, "width": columns, "rope_interpolation_scale": scale}
        from diffusers import LTXConditionPipeline as Pipeline

        ids = Pipeline._prepare_video_ids(len(fps), frames, rows, columns, device=fps.device)
        coords = Pipeline._scale_video_ids(ids, rules.spatial_stride, rules.temporal_stride, 0, fps.device).float()
        seconds = coords[:, :1] * (1 / fps.float()).view(-1, 1, 1)
        # the count of frames is not read where positions are given, but by isolated frames
        return {"num_frames": frames, "video_coords": _torch().cat([seconds, coords[:, 1:]], dim=1)}

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Video tokens attend to their own latent frame alone; text is only read from, so nothing leaks through it."""
        isolate_frames(net, on)

    def pipeline(self, nets: Mapping[str, nn.Module], shift: float | None = None) -> Any:
        """The checkpoint's own pipeline over the one network, without VAE and text encoder, with its own scheduler.

        Raises VideotuneError for a ``shift`` from 0.9.5 on, whose pipeline brings a schedule of its own.
        """
        return self._pipeline(self.pipeline_class(), nets, shift, None)

    def _pipeline(self, kind: Any, nets: Mapping[str, nn.Module], shift: float | None, first: Tensor | None) -> Any:
        if shift is not None and self.newer:
            raise VideotuneError(
                f"sample.shift: the pipeline of {self.spec.title} has a schedule of its own; leave it out"
            )
        scheduler = own_scheduler(self.folder, shift, **({} if shift is None else {"use_dynamic_shifting": False}))
        own = read_config(self.folder / "transformer" / "config.json")
        net = stand_in(
            nets, self.spec.experts[0].name, {"patch_size": 1, "patch_size_t": 1} | own, self.dtype, self.device
        )
        pipe = kind(scheduler, encoded(self.spec, first, self.device), None, None, net)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def sample(
        self, nets: Mapping[str, nn.Module], cond: Condition, uncond: Condition | None, request: SampleRequest
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        ``request.first`` goes on from clean first frames: up to 0.9.1 by the image-to-video pipeline, else by the one that
        takes conditions, which lays noise of its own on them while it draws; they come back as they were given.
        """
        torch, shape, first = _torch(), request.shape, request.first
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        words: dict[str, Any] = {}
        kind = self._kind(first is not None)
        if first is not None and self.newer:
            words = {"image": torch.zeros(1, 3, shape.height, shape.width)}  # only its size is looked at
        elif first is not None:
            words = {"latents": _packed(_begun(first.float(), self.spec.rules.latent_size(shape), generators))}
        if uncond is not None:
            words["negative_prompt_embeds"] = uncond.text.to(self.device, self.dtype)
            words["negative_prompt_attention_mask"] = _mask(uncond, self.device)
        pipe = self._pipeline(kind, nets, request.shift, first)
        with quiet_schedule(pipe.scheduler):
            latents = pipe(
                prompt_embeds=cond.text.to(self.device, self.dtype),
                prompt_attention_mask=_mask(cond, self.device),
                height=shape.height,
                width=shape.width,
                num_frames=shape.frames,
                frame_rate=shape.fps,
                num_inference_steps=request.steps,
                guidance_scale=request.guidance,
                generator=generators,
                output_type="latent",
                **words,
            ).frames
        if not self.newer:  # packed
            latents = latents.transpose(1, 2).unflatten(2, self.spec.rules.latent_size(shape))
        if first is not None:
            latents = torch.cat([first.to(latents), latents[:, :, 1:]], dim=2)
        return latents.float()

    def _kind(self, from_image: bool) -> Any:
        """The pipeline that draws: the newer takes an image or none, of the older there are two."""
        from diffusers import LTXImageToVideoPipeline

        return LTXImageToVideoPipeline if from_image and not self.newer else self.pipeline_class()

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that draws from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        from diffusers import LTXConditionPipeline, LTXPipeline

        return LTXConditionPipeline if self.newer else LTXPipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys, in each format; in the blocks all use the same names."""
        return {"diffusers": lambda path: f"transformer.{path}", "comfyui": lambda path: f"diffusion_model.{path}"}

    def native(self, path: str) -> str:
        """A block module's path in diffusers, which is its name in the authors' code too."""
        return path

    def full_key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a parameter's name in diffusers to its name in a file of all weights, in each format."""
        return {"diffusers": lambda name: name, "original": full_name}

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's file ends in, before .safetensors: there is one."""
        return ""

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on; T5 reads padding otherwise from 0.9.5 on."""
        text = of_text(self.folder, ("text_encoder", "tokenizer"), self.weights, self.dtype)
        parts = {part: fingerprint(self.folder / part) for part in ("vae", "transformer")}
        return {"text_encoder": f"{text}-masked" if self.newer else text, **parts}


def _packed(latents: Tensor) -> Tensor:
    """Latents (B,C,F,H,W) -> tokens (B,F·H·W,C), as the transformer takes them."""
    return latents.flatten(2).transpose(1, 2)


def _mask(cond: Condition, device: torch.device) -> Tensor:
    assert cond.text_mask is not None
    return cond.text_mask.to(device)


def _begun(first: Tensor, size: tuple[int, int, int], generators: Sequence[torch.Generator]) -> Tensor:
    """What image-to-video begins with: the clean frames (B,C,1,H,W), and the noise that its pipeline would draw."""
    torch, drawn = _torch(), []
    for frame, generator in zip(first, generators, strict=True):
        torch.randn(frame[None].shape, generator=generator)  # the pipeline draws the image's latents first
        drawn.append(torch.randn((1, frame.shape[0], *size), generator=generator))
    noise = torch.cat(drawn).to(first)
    return torch.cat([first, noise[:, :, 1:]], dim=2)


def _told_timestep(decode: Callable[..., Any]) -> Callable[..., Any]:
    """A VAE's ``decode`` that is told the usual timestep."""

    def told(latents: Tensor, **words: Any) -> Any:
        return decode(latents, latents.new_full((len(latents),), DECODE_TIMESTEP), **words)

    return told


@contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """Some VAEs draw inside from torch's own numbers: here always the same, and everyone else's are as they were."""
    torch = _torch()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed32(0, "decoder noise"))
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed32(0, "decoder noise"))
        yield


def open_family(
    folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes = PLAIN_WEIGHTS
) -> LTXVideo:
    """The family over a checkpoint folder."""
    return LTXVideo(folder, device, dtype, weights)


def _torch() -> Any:
    import torch

    return torch
