"""A Wan checkpoint: encoders, what the transformer is told, and its own pipeline over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.find import fingerprint, of_text, read_config
from videotune.families.held import Held
from videotune.families.loading import load_model
from videotune.families.pipelines import in_tiles, own_scheduler, stand_in, without_vae
from videotune.families.pretrained import pretrained
from videotune.families.skeletons import on_meta
from videotune.families.text import each_once, fresh_tokenizers, text_skeletons
from videotune.families.wan.facts import FOLDERS, read_spec
from videotune.families.wan.nets import encoded, full_name, isolate_frames, native
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


class Wan:
    """A Wan checkpoint in diffusers layout; its parts load at the first use."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes) -> None:
        self.spec = read_spec(folder)
        self.folder, self.device, self.dtype, self.weights = folder, device, dtype, weights
        self._held = Held(device)

    def _text_encoder(self) -> Any:
        """A diffusers pipeline of tokenizer and text encoder alone, for its own prompt handling."""

        def load() -> Any:
            from diffusers import WanPipeline

            encoder = self._umt5()
            return WanPipeline(self.tokenizers()["text_encoder"], encoder, vae=None, scheduler=None)

        return self._held.get("text_encoder", load)

    def _vae(self) -> Any:
        """The VAE in float32. It is never tiled: tiles would give other latents and other frames than the pipeline's."""
        return self._held.get("vae", lambda: self.part("vae"))

    def _looks_at_image(self) -> bool:
        """Whether the denoiser is told what CLIP sees in the image (2.1 I2V), beside its latents."""
        return read_config(self.folder / "transformer" / "config.json").get("image_dim") is not None

    def _image_pipeline(self) -> Any:
        """diffusers' image-to-video pipeline of VAE and CLIP alone, for its own preparation of the image."""
        from diffusers import WanImageToVideoPipeline

        pipe = WanImageToVideoPipeline(None, None, vae=self._vae(), scheduler=None)
        if self._looks_at_image():
            pipe.image_processor, pipe.image_encoder = self._held.get("image_encoder", self._image_encoder)
        return pipe

    def _image_encoder(self) -> tuple[Any, Any]:
        from transformers import CLIPImageProcessor, CLIPVisionModel

        encoder = load_model(CLIPVisionModel, self.folder / "image_encoder", _torch().float32, self.device)
        return pretrained(CLIPImageProcessor, self.folder / "image_processor"), encoder

    def free(self, part: str) -> None:
        """Drop "text_encoder", or "vae" (and the image encoder that goes with it), from memory."""
        self._held.free(part, *(["image_encoder"] if part == "vae" else []))

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has, the end mark included, before any cut at 512."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self._text_encoder().tokenizer(prompt_clean(caption), verbose=False).input_ids)

    def _encode(self, caption: str) -> Tensor:
        """(512, D): the pipeline's own embedding, zeros after the caption's true length."""
        text, _ = self._text_encoder().encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=self.spec.text_tokens, device=self.device
        )
        return text[0]

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """{"text": (l, D)} for each caption: the pipeline's own embedding less its zero padding, on the CPU."""
        states = []
        with _torch().no_grad():
            for caption in captions:
                length = min(self.text_length(caption), self.spec.text_tokens)
                states.append({"text": self._encode(caption)[:length].cpu().clone()})
        return states

    def text_parts(self) -> Mapping[str, TextPart]:
        """UMT5 and its tokenizer, as they read captions until they are freed."""
        pipe = self._text_encoder()
        return {"text_encoder": TextPart(pipe.tokenizer, pipe.text_encoder)}

    def tokenizers(self) -> Mapping[str, Any]:
        """UMT5's tokenizer, fresh."""
        return fresh_tokenizers(self.folder)

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """UMT5 without weights."""
        return text_skeletons(self.folder, "UMT5EncoderModel")

    def encode_in_loop(self, captions: Sequence[str]) -> Condition:
        """Text (B,512,D) as ``condition`` pads it, encoded one caption after the other; equal ones once."""
        return Condition(each_once(captions, self._encode))

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token; ComfyUI's tokenizer of this encoder asks for "umt5xxl"."""
        return {"diffusers": {}, "comfyui": {"text_encoder": "umt5xxl"}}

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Condition:
        """Text (B,512,D), zeros after the true length: the pipeline feeds no mask. What else there is is stacked."""
        torch = _torch()
        text = torch.zeros(len(states), self.spec.text_tokens, self.spec.text_width, dtype=states[0]["text"].dtype)
        for row, state in zip(text, states, strict=True):
            row[: len(state["text"])] = state["text"]
        others = [name for name in states[0] if name != "text"]
        return Condition(text, extras={name: torch.stack([state[name] for state in states]) for name in others})

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """The VAE's latent mean and standard deviation, (C,1,1,1) each."""
        config, torch = self._vae().config, _torch()
        values = (config.latents_mean, config.latents_std)
        mean, std = (torch.tensor(v, device=self.device).view(-1, 1, 1, 1) for v in values)
        return mean, std

    def encode_video(self, frames: Tensor, random: np.random.Generator | None = None) -> Moments:
        """Frames (3,T,H,W) in [-1,1], T = 4n+1 -> the normalised latent mean; Wan's authors train on it alone.

        Of image-to-video also what the first frame tells, in the denoiser's dtype: "image" (4+C,F,H,W), the mask and the
        latents of that frame before grey ones; 2.1's "clip" (257, 1280). ``random`` is for other families: nothing is
        drawn.
        """
        with self._held.vae_lock, _torch().no_grad():
            mean, std = self._statistics()
            latent = self._vae().encode(frames[None].to(self.device)).latent_dist.mode()[0]
            extras = self._told(frames) if self.spec.given == "concat" else {}
        return Moments(((latent - mean) / std).float().cpu(), extras=extras)

    def _told(self, frames: Tensor) -> dict[str, Tensor]:
        """What the pipeline itself makes of the first of these frames, for a video of as many."""
        from PIL import Image

        torch, pipe, image = _torch(), self._image_pipeline(), frames[:, 0]
        size = {"num_frames": frames.shape[1], "height": frames.shape[2], "width": frames.shape[3]}
        _, told = pipe.prepare_latents(
            image[None].to(self.device),
            1,
            self.spec.latent_channels,
            **size,
            dtype=torch.float32,
            device=self.device,
            latents=torch.empty(0),  # it would draw noise, which is not asked for
        )
        extras = {"image": told[0].to(self.dtype).cpu()}
        if self._looks_at_image():
            bytes_ = ((image + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
            extras["clip"] = pipe.encode_image(Image.fromarray(bytes_), self.device)[0].to(self.dtype).cpu()
        return extras

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the place of what ``encode_text`` gives of a full caption and ``encode_video`` beside the latents."""
        torch, (frames, rows, columns) = _torch(), self.spec.rules.latent_size(shape)
        states = {"text": torch.zeros(self.spec.text_tokens, self.spec.text_width, dtype=self.dtype)}
        if self.spec.given == "concat":
            channels = self.spec.latent_channels + self.spec.rules.temporal_stride
            states["image"] = torch.zeros(channels, frames, rows, columns, dtype=self.dtype)
            if self._looks_at_image():
                config = read_config(self.folder / "image_encoder" / "config.json")
                patches = (config["image_size"] // config["patch_size"]) ** 2
                states["clip"] = torch.zeros(patches + 1, config["hidden_size"], dtype=self.dtype)
        return states

    def part(self, name: str) -> nn.Module:
        """The network of "text_encoder" or "vae", loaded for this call."""
        from diffusers import AutoencoderKLWan

        if name == "text_encoder":
            return self._umt5()
        return load_model(AutoencoderKLWan, self.folder / name, _torch().float32, self.device)

    def _umt5(self) -> nn.Module:
        from transformers import UMT5EncoderModel

        folder = self.folder / "text_encoder"
        return load_model(UMT5EncoderModel, folder, self.dtype, self.device, self.weights.text_encoder)

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over."""
        with self._held.vae_lock, _torch().no_grad(), in_tiles(self._vae(), tiled):
            mean, std = self._statistics()
            pixels = self._vae().decode((latents.to(self.device) * std + mean)[None], return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    def _expert_folder(self, expert: str | None) -> Path:
        if expert is None:
            assert len(self.spec.experts) == 1, f"{self.spec.title} has two experts: which one?"
            return self.folder / "transformer"
        return self.folder / FOLDERS[expert]

    def denoiser(self, expert: str | None = None) -> nn.Module:
        """The transformer, frozen; norms and embedders that diffusers keeps in float32 stay so. None: the only expert."""
        from diffusers import WanTransformer3DModel

        folder, kept = self._expert_folder(expert), self.weights.transformer
        return load_model(WanTransformer3DModel, folder, self.dtype, self.device, kept, self.spec.blocks)

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer's shape without weights. None: the first expert; both have one shape."""
        from diffusers import WanTransformer3DModel

        return on_meta(WanTransformer3DModel, self._expert_folder(expert or self.spec.experts[0].name))

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0 (B,C,F,H,W) float32; the network is told 1000 t, in float32, and 0 of tokens that are given.

        One timestep a sample says the same as one a token where nothing is given, and is lighter.
        """
        extras, told, x_t = batch.cond.extras, t.float() * 1000, x_t.to(self.dtype)
        if self.spec.given == "concat":
            x_t = _torch().cat([x_t, extras["image"].to(self.dtype)], dim=1)
        if self.spec.given == "replace" and batch.any_given:
            _, rows, columns = self.spec.patch
            tokens = (x_t.shape[3] // rows) * (x_t.shape[4] // columns)  # of a frame
            told = (told[:, None] * ~batch.given[:, 0, :, 0, 0]).repeat_interleave(tokens, dim=1)
        out = net(
            hidden_states=x_t,
            timestep=told,
            encoder_hidden_states=batch.cond.text.to(self.dtype),
            encoder_hidden_states_image=extras["clip"].to(self.dtype) if "clip" in extras else None,
            return_dict=False,
        )
        return out[0].float()

    def pipeline(self, nets: Mapping[str, nn.Module], shift: float | None = None) -> Any:
        """The checkpoint's own pipeline over ``nets``, without VAE and text encoder, with its own scheduler."""
        return self._pipeline(self.pipeline_class(), nets, shift)

    def _pipeline(self, kind: Any, nets: Mapping[str, nn.Module], shift: float | None) -> Any:
        index = read_config(self.folder / "model_index.json")
        experts = [self._stand_in(nets, expert.name) for expert in self.spec.experts]
        pipe = kind(
            None,
            None,
            vae=None,
            scheduler=own_scheduler(self.folder, shift),
            transformer=experts[0],
            transformer_2=experts[1] if len(experts) > 1 else None,
            boundary_ratio=index.get("boundary_ratio"),
            expand_timesteps=bool(index.get("expand_timesteps")),
        )
        return without_vae(pipe, self.spec.rules)

    def _stand_in(self, nets: Mapping[str, nn.Module], name: str) -> nn.Module:
        config = read_config(self._expert_folder(name) / "config.json")
        return stand_in(nets, name, {"image_dim": None} | config, self.dtype, self.device)

    def sample(
        self, nets: Mapping[str, nn.Module], cond: Condition, uncond: Condition | None, request: SampleRequest
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        An image is told by ``cond.extras`` (image-to-video) or ``request.first`` (TI2V). Samples with one are drawn one
        by one: the pipeline takes a single image for all.
        """
        torch = _torch()
        if self.spec.given != "concat" and request.first is None:
            return self._draw(self.pipeline(nets, request.shift), cond, uncond, request, list(request.seeds))
        drawn = []
        for i, seed in enumerate(request.seeds):
            one, other = (None if c is None else c.map(lambda x, i=i: x[i : i + 1]) for c in (cond, uncond))  # type: ignore[misc]
            assert one is not None
            first = (
                one.extras["image"][:, -self.spec.latent_channels :] if request.first is None else request.first[[i]]
            )
            drawn.append(self._draw(self._told_pipeline(nets, request, one, first), one, other, request, [seed]))
        return torch.cat(drawn)

    def _told_pipeline(
        self, nets: Mapping[str, nn.Module], request: SampleRequest, cond: Condition, first: Tensor
    ) -> Any:
        """The image-to-video pipeline, which finds what its encoders would have made of the image already made."""
        from diffusers import WanImageToVideoPipeline

        pipe = self._pipeline(WanImageToVideoPipeline, nets, request.shift)
        pipe.vae = encoded(first.float().to(self.device), self.device)
        if "clip" in cond.extras:
            pipe.encode_image = lambda *_: cond.extras["clip"].to(self.device)
        return pipe

    def _draw(
        self, pipe: Any, cond: Condition, uncond: Condition | None, request: SampleRequest, seeds: Sequence[int]
    ) -> Tensor:
        torch, shape, words = _torch(), request.shape, {}
        if "image_processor" in pipe.components:  # what the pixels would be: only their size is looked at
            words["image"] = torch.zeros(1, 3, shape.height, shape.width)
        if len(self.spec.experts) > 1:
            words["guidance_scale_2"] = request.guidance if request.guidance_2 is None else request.guidance_2
        latents = pipe(
            prompt_embeds=cond.text.to(self.device, self.dtype),
            negative_prompt_embeds=None if uncond is None else uncond.text.to(self.device, self.dtype),
            height=shape.height,
            width=shape.width,
            num_frames=shape.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="latent",
            **words,
        )
        return latents.frames.float()

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Video tokens attend to their own latent frame alone; text is only read from, so nothing leaks through it."""
        isolate_frames(net, on)

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that draws from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        from diffusers import WanImageToVideoPipeline, WanPipeline

        return WanImageToVideoPipeline if self.spec.given == "concat" else WanPipeline

    def key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a module's path to the prefix of its LoRA keys, in each format."""
        return {
            "diffusers": lambda path: f"transformer.{path}",
            "comfyui": lambda path: f"diffusion_model.{native(path)}",
        }

    def native(self, path: str) -> str:
        """A block module's path in diffusers -> its name in the authors' code, which ComfyUI uses."""
        return native(path)

    def full_key_maps(self) -> Mapping[str, Callable[[str], str]]:
        """From a parameter's name in diffusers to its name in a file of all weights, in each format."""
        return {"diffusers": lambda name: name, "original": full_name}

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's file ends in, before .safetensors; ComfyUI's workflows go by it."""
        return {"high": "_high_noise", "low": "_low_noise"}.get(expert, "")

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that the caches and checkpoints depend on.

        Latents of image-to-video have the image's beside them, in the denoiser's dtype, and so another name.
        """
        text = of_text(self.folder, ("text_encoder", "tokenizer"), self.weights, self.dtype)
        vae = fingerprint(self.folder / "vae")
        if self.spec.given == "concat":
            looks = [fingerprint(self.folder / part) for part in ("image_encoder", "image_processor")]
            vae = "-".join([vae, "image", *(looks if self._looks_at_image() else ()), str(self.dtype)])
        nets = {FOLDERS[expert.name] for expert in self.spec.experts}
        return {"text_encoder": text, "vae": vae} | {name: fingerprint(self.folder / name) for name in sorted(nets)}


def open_family(folder: Path, device: torch.device, dtype: torch.dtype, weights: WeightDtypes = PLAIN_WEIGHTS) -> Wan:
    """The family over a checkpoint folder."""
    return Wan(folder, device, dtype, weights)


def _torch() -> Any:
    import torch

    return torch
