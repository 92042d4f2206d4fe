"""A CogVideoX checkpoint: encoders, what the transformer is told, and its own pipeline over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.cogvideox.attention import isolate_frames
from videotune.families.cogvideox.facts import read_spec
from videotune.families.find import fingerprint, of_text, read_config
from videotune.families.held import Held
from videotune.families.loading import load_model
from videotune.families.pipelines import in_tiles, own_scheduler, stand_in, without_vae
from videotune.families.skeletons import on_meta
from videotune.families.text import each_once, fresh_tokenizers, text_skeletons
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

LOG_MEAN, LOG_STD = -3.0, 0.5
"""Of the logarithm of the strength of the noise on an image."""

COMFYUI = (
    ("transformer_blocks.", "blocks."), ("attn1.to_out.0", "attn_out"), ("attn1.to_", ""),
    ("ff.net.0.proj", "ff_proj"), ("ff.net.2", "ff_out"),
)  # fmt: skip
"""From diffusers' names of a block's modules to those of ComfyUI's model."""

OFS = 2.0
"""What the pipeline tells the offset embedding, which 1.5 I2V alone has."""


OFF_UNLESS_SAID = (
    "patch_size_t",
    "ofs_embed_dim",
    "use_rotary_positional_embeddings",
    "use_learned_positional_embeddings",
)
"""Keys that older checkpoints do not have in their transformer's config."""


class CogVideoX:
    """A CogVideoX checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes) -> None:
        from videotune.diffusion.objective import objective
        from videotune.diffusion.timesteps import Timesteps

        self.spec = read_spec(folder)
        self.folder, self.device, self.dtype, self.weights = folder, device, dtype, weights
        self._path = objective("v", self.spec.path_constants, Timesteps()).path
        self._config = SimpleNamespace(
            **dict.fromkeys(OFF_UNLESS_SAID) | read_config(folder / "transformer" / "config.json")
        )
        self._held = Held(device)

    def _text_encoder(self) -> Any:
        """A diffusers pipeline of tokenizer and text encoder alone, for its own prompt handling."""

        def load() -> Any:
            encoder = self._t5()
            return self.pipeline_class()(self.tokenizers()["text_encoder"], encoder, None, None, None)

        return self._held.get("text_encoder", load)

    def _vae(self) -> Any:
        """The VAE in float32. It is never tiled: tiles would give other latents and other frames than the pipeline's."""
        return self._held.get("vae", lambda: self.part("vae"))

    def free(self, part: str) -> None:
        """Drop "text_encoder" or "vae" from memory."""
        self._held.free(part)

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has, the end mark included, before any cut."""
        return len(self._text_encoder().tokenizer(caption, verbose=False).input_ids)

    def _encode(self, caption: str) -> Tensor:
        """(L, D), padding included: the pipeline's own embedding."""
        text, _ = self._text_encoder().encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=self.spec.text_tokens, device=self.device
        )
        return text[0]

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """{"text": (L, D)} for each caption, padding included, on the CPU.

        T5 reads the padding without a mask and so does the transformer: the states of padding are part of what it is told.
        """
        with _torch().no_grad():
            return [{"text": self._encode(caption).cpu().clone()} for caption in captions]

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
        """Text (B,L,D), encoded one caption after the other; equal ones once."""
        return Condition(each_once(captions, self._encode))

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token; there is no other reader that is known."""
        return {"diffusers": {}}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """Text (B,L,D), and of a checkpoint that takes an image its latents, extras["image"] (B,C,1,H,W)."""
        torch = _torch()
        extras = {}
        if any("image" in state for state in states):
            extras["image"] = torch.stack([state["image"] for state in states])
        return Condition(torch.stack([state["text"] for state in states]), None, extras)

    def encode_video(self, frames: Tensor, random: np.random.Generator | None = None) -> Moments:
        """Frames (3,T,H,W) in [-1,1] -> the moments of z · scaling_factor, from which each view draws.

        A checkpoint that takes an image gets the latents of the first frame beside them, extras["image"] (C,1,H,W):
        noise of a strength of its own is laid on the frame, and a latent drawn, both from ``random``; None: the mean of the
        frame as it is. Raises VideotuneError for a size that the checkpoint's positions do not know.
        """
        torch = _torch()
        self._refuse_shape(*frames.shape[1:])
        with self._held.vae_lock, torch.no_grad():
            vae = self._vae()
            scale = float(vae.config.scaling_factor)
            latent = vae.encode(frames[None].to(self.device)).latent_dist
            mean, logvar = latent.mean[0] * scale, latent.logvar[0] + 2 * math.log(scale)
            extras = {"image": self._encode_image(frames[:, :1], random)} if self.spec.first_frame is not None else {}
        return Moments(mean.float().cpu(), logvar.float().cpu(), extras)

    def _encode_image(self, frame: Tensor, random: np.random.Generator | None) -> Tensor:
        """A frame (3,1,H,W) -> its latents (C,1,H,W) as the pipeline scales them, on the CPU."""
        torch, vae = _torch(), self._vae()
        if random is not None:
            strength = math.exp(LOG_MEAN + LOG_STD * random.standard_normal())
            frame = frame + strength * torch.from_numpy(random.standard_normal(tuple(frame.shape), "float32")).to(frame)
        dist = vae.encode(frame[None].to(self.device)).latent_dist
        latent = dist.mean[0].float().cpu()
        if random is not None:
            draw = torch.from_numpy(random.standard_normal(tuple(latent.shape), "float32"))
            latent = latent + dist.std[0].float().cpu() * draw
        scale = vae.config.scaling_factor
        return latent * (1 / scale if vae.config.invert_scale_latents else scale)

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the place of what ``encode_text`` gives and ``encode_video`` beside the latents."""
        torch, (_, rows, columns) = _torch(), self.spec.rules.latent_size(shape)
        states = {"text": torch.zeros(self.spec.text_tokens, self.spec.text_width, dtype=self.dtype)}
        if self.spec.first_frame is not None:
            states["image"] = torch.zeros(self.spec.latent_channels, 1, rows, columns)
        return states

    def part(self, name: str) -> nn.Module:
        """The network of "text_encoder" or "vae", loaded for this call."""
        from diffusers import AutoencoderKLCogVideoX

        if name == "text_encoder":
            return self._t5()
        return load_model(AutoencoderKLCogVideoX, self.folder / name, _torch().float32, self.device)

    def _t5(self) -> nn.Module:
        from transformers import T5EncoderModel

        folder = self.folder / "text_encoder"
        return load_model(T5EncoderModel, folder, self.dtype, self.device, self.weights.text_encoder)

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over."""
        with self._held.vae_lock, _torch().no_grad(), in_tiles(self._vae(), tiled):
            vae = self._vae()
            pixels = vae.decode(1 / vae.config.scaling_factor * latents[None].to(self.device), return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen."""
        from diffusers import CogVideoXTransformer3DModel as Net

        folder, kept = self.folder / (expert or "transformer"), self.weights.transformer
        return load_model(Net, folder, self.dtype, self.device, kept, self.spec.blocks)

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer's shape without weights."""
        from diffusers import CogVideoXTransformer3DModel as Net

        return on_meta(Net, self.folder / (expert or "transformer"))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v (B,C,F,H,W) float32; the network is told the integer timestep, and an image where it takes one.

        Where a token covers two frames, a noisy copy of the first clean frame stands in front and is taken off again.
        """
        from videotune.diffusion.path import timestep_index

        rules, front = self.spec.rules, self._front(x_t.shape[2])
        frames, rows, columns = x_t.shape[2:]
        height, width = rows * rules.spatial_stride, columns * rules.spatial_stride
        self._refuse_shape((frames - 1) * rules.temporal_stride + 1, height, width)
        if front:
            alpha = self._path(t).alpha
            clean = alpha * batch.x0[:, :, :1]
            x_t = _torch().cat([clean + _scattered(x_t[:, :, :1] - clean), x_t], dim=2)
        told = x_t.to(self.dtype)
        if self.spec.first_frame is not None:
            told = _torch().cat([told, self._image(batch.cond, frames + front).to(told)], dim=1)
        out = net(
            hidden_states=told.transpose(1, 2),
            encoder_hidden_states=batch.cond.text.to(self.dtype),
            timestep=timestep_index(t, int(self.spec.path_constants["num_train_timesteps"])),
            ofs=None if self._config.ofs_embed_dim is None else told.new_full((1,), OFS),
            image_rotary_emb=self._rotary(height, width, frames + front, x_t.device),
            return_dict=False,
        )
        return out[0].transpose(1, 2)[:, :, front:].float()

    def _front(self, frames: int) -> int:
        """How many latent frames must stand in front of so many, for tokens to cover them all."""
        return -frames % self.spec.patch[0]

    def _rotary(self, height: int, width: int, frames: int, device: torch.device) -> Any:
        """The rotary embedding that the pipeline would hand over, or None where the model has another."""
        if not self._config.use_rotary_positional_embeddings:
            return None
        part = SimpleNamespace(
            vae_scale_factor_spatial=self.spec.rules.spatial_stride, transformer=SimpleNamespace(config=self._config)
        )
        return self.pipeline_class()._prepare_rotary_positional_embeddings(part, height, width, frames, device)

    def _image(self, cond: Condition, frames: int) -> Tensor:
        """An image's latents at the first of so many frames, zeros after it, (B,C,F,H,W).

        Where a frame stands in front of the clip's own, the image is there, as in the pipeline.
        """
        if "image" not in cond.extras:
            raise VideotuneError(f"{self.spec.title} goes on from an image, and none was given")
        image = cond.extras["image"]
        return _torch().cat([image, image.new_zeros(*image.shape[:2], frames - 1, *image.shape[3:])], dim=2)

    def _refuse_shape(self, frames: int, height: int, width: int) -> None:
        """VideotuneError for a shape that has no positions: some checkpoints learned one shape, 1.5 has a largest."""
        stride, config = self.spec.rules.spatial_stride, self._config
        shape = config.sample_frames, config.sample_height * stride, config.sample_width * stride
        if config.use_learned_positional_embeddings and (frames, height, width) != shape:
            raise VideotuneError(
                f"{self.spec.title} has learned where {shape[0]} frames of {shape[1]}x{shape[2]} pixels lie, and knows no "
                f"other shape; these are {frames} of {height}x{width}. "
                f'Set video_config.frames={shape[0]} and resolution="{shape[1]}x{shape[2]}".'
            )
        if config.patch_size_t is not None and (height > shape[1] or width > shape[2]):
            raise VideotuneError(
                f"{self.spec.title} has positions for at most {shape[1]}x{shape[2]} pixels, and these frames have "
                f"{height}x{width}. Set a lower resolution."
            )

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Video tokens attend to their own latent frame (1.5: its pair) and the text, text to itself; until turned off."""
        isolate_frames(net, on)

    def pipeline(self, nets: Mapping[str, nn.Module], shift: float | None = None) -> Any:
        """The family's diffusers pipeline over the one network, without VAE and text encoder, with its own scheduler.

        ``nets`` is asked for it at each step and not before, so it may load it then.

        Raises VideotuneError for a ``shift``: a schedule of v-prediction is the one that the model was trained on.
        """
        if shift is not None:
            raise VideotuneError(f"sample.shift: {self.spec.title} has no shift to set; leave it out")
        net = stand_in(nets, self.spec.experts[0].name, vars(self._config), self.dtype, self.device)
        return without_vae(self.pipeline_class()(None, None, None, net, own_scheduler(self.folder)), self.spec.rules)

    def sample(
        self, nets: Mapping[str, nn.Module], cond: Condition, uncond: Condition | None, request: SampleRequest
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        ``cond.extras["image"]`` (B,C,1,H,W) goes on from an image, where the checkpoint takes one.
        """
        torch, shape = _torch(), request.shape
        self._refuse_shape(shape.frames, shape.height, shape.width)
        pipe, generators = self.pipeline(nets, request.shift), [torch.Generator().manual_seed(s) for s in request.seeds]
        image = {}
        if self.spec.first_frame is not None:
            pipe.prepare_latents = self._prepare_latents(pipe, cond)
            image["image"] = torch.zeros(
                len(cond.text), 3, shape.height, shape.width
            )  # prepare_latents has the true one
        latents = pipe(
            **image,
            prompt_embeds=cond.text.to(self.device, self.dtype),
            negative_prompt_embeds=None if uncond is None else uncond.text.to(self.device, self.dtype),
            height=shape.height,
            width=shape.width,
            num_frames=shape.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=generators,
            output_type="latent",
        ).frames
        frames = self.spec.rules.latent_size(shape)[0]
        return latents.transpose(1, 2)[:, :, self._front(frames) :].float()

    def _prepare_latents(self, pipe: Any, cond: Condition) -> Callable[..., tuple[Tensor, Tensor]]:
        """What stands in for the image pipeline's ``prepare_latents``: the same noise, and an image encoded before."""

        def prepare(
            _: Tensor,
            num: int,
            channels: int,
            frames: int,
            height: int,
            width: int,
            dtype: Any,
            device: Any,
            generators: Sequence[torch.Generator],
            latents: None,
        ) -> tuple[Tensor, Tensor]:
            from diffusers import CogVideoXPipeline

            size = channels, 1, height // pipe.vae_scale_factor_spatial, width // pipe.vae_scale_factor_spatial
            for generator in generators:  # the pipeline draws the image's latents first
                _torch().randn(size, generator=generator)
            noise = CogVideoXPipeline.prepare_latents(
                pipe, num, channels, frames, height, width, dtype, device, generators, latents
            )
            return noise, self._image(cond, noise.shape[1]).transpose(1, 2).to(device, dtype)

        return prepare

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that draws from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        import diffusers

        image = self.spec.first_frame is not None
        return diffusers.CogVideoXImageToVideoPipeline if image else diffusers.CogVideoXPipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys, in each format."""
        return {
            "diffusers": lambda path: f"transformer.{path}",
            "comfyui": lambda path: f"diffusion_model.{self.native(path)}",
        }

    def native(self, path: str) -> str:
        """A block module's path in diffusers -> its name in ComfyUI's model, which is not the authors'."""
        for ours, theirs in COMFYUI:
            path = path.replace(ours, theirs)
        return path

    def full_key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a parameter's name in diffusers to its name in a file of all weights, in each format."""
        return {"diffusers": lambda name: name}

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's file ends in, before .safetensors: there is one."""
        return ""

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on."""
        text = of_text(self.folder, ("text_encoder", "tokenizer"), self.weights, self.dtype)
        parts = {part: fingerprint(self.folder / part) for part in ("vae", "transformer")}
        if self.spec.first_frame is not None:  # the same VAE keeps more of a clip here
            parts["vae"] += "-image"
        return {"text_encoder": text, **parts}


def _scattered(noise: Tensor) -> Tensor:
    """The noise (B,C,1,H,W) of a frame laid out anew: none stays in place, and neighbours come from far apart.

    The pipeline begins with noise of its own in the frame in front of a clip. Here that noise is the first frame's own at
    other places: as good as independent, and no draw is needed that only the host could make.
    """
    flat = noise.flatten(1)
    size = flat.shape[1]
    step = int(size / 1.618) | 1
    while math.gcd(step, size) > 1:
        step += 2
    # step is odd and size even, so that i·step + 1 = i has no solution
    places = (_torch().arange(size, device=noise.device) * step + 1) % size
    return flat[:, places].view_as(noise)


def open_family(
    folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes = PLAIN_WEIGHTS
) -> CogVideoX:
    """The family over a checkpoint folder."""
    return CogVideoX(folder, device, dtype, weights)


def _torch() -> Any:
    import torch

    return torch
