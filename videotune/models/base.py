"""What the families share: a checkpoint in diffusers layout, its parts, its text, its latents and its pipeline.

A family is a subclass that says what differs. Shapes are those of ``videotune/types.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

from videotune.errors import VideotuneError
from videotune.files import checked
from videotune.lazy import diffusers, torch, transformers
from videotune.memory.accelerator import empty_cache
from videotune.models.loading import count_tokens, load_model, on_meta, read_tokenizer
from videotune.models.model_files import fingerprint, read_config
from videotune.models.pipelines import (
    bare_pipeline,
    in_tiles,
    isolate,
    joined,
    own_scheduler,
    stand_in,
)
from videotune.models.registry import facts, register
from videotune.models.single_file import Names, renamed
from videotune.models.tiny import tiny_pipeline
from videotune.types import (
    PLAIN_WEIGHTS,
    Conditioning,
    Family,
    LatentDistribution,
    ModelSpec,
    TextPart,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from videotune.types import (
        Batch,
        ClipShape,
        FillFn,
        LogFn,
        Networks,
        SampleRequest,
        WeightDtypes,
    )

OLDER_END = 2
"""What CLIP's configs once named as the number of the end mark, which is another."""


class DiffusersModel(Family):
    """A checkpoint in diffusers layout. Its encoders load at their first use and stay until they are freed.

    Whoever uses the VAE holds ``vae_lock``: whoever frees it waits, and a VAE that keeps state between frames works on one
    clip at a time.
    """

    spec: ModelSpec
    transformer_class: ClassVar[str]
    vae_class: ClassVar[str]
    text_encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "T5EncoderModel"}
    """Each text encoder's folder, and its class in transformers; its tokenizer's folder has the same number."""

    main_encoder = "text_encoder"
    all_layers = False
    """Of several text encoders, the one that stands for all in a plan, and whether the states of all its layers are used."""

    embedding_names: ClassVar[Mapping[str, str]] = {}
    """What ComfyUI's tokenizer of each text encoder calls new tokens in a file; none: no such form is written."""

    comfyui_names: ClassVar[Names] = ()
    """From a block module's path in diffusers to its name in ComfyUI, which is mostly the authors'."""

    original_names: ClassVar[Names | None] = None
    """From a parameter's name in diffusers to its name in the authors' checkpoints; None: no such file is written."""

    file_names: ClassVar[Sequence[Names]] = ()
    """Further such tables, of files that are read alone (``single_file.find_sources``)."""

    pipelines: ClassVar[tuple[str, ...]]
    """The diffusers pipelines that sample from text, and where the family has one from an image on extra channels."""

    attention = "attn1"
    text_first = False
    """A block's attention over video tokens, and whether the text's tokens stand in front of them there."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """Keys that older configs of the transformer lack and pipelines read."""

    tokens_in_front = 0
    """Tokens of ``clean`` that are not the caption's."""

    def __init_subclass__(cls) -> None:
        if "spec" in vars(cls):
            register(cls)

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightDtypes = PLAIN_WEIGHTS,
    ) -> None:
        self.spec = self.read_spec(folder)
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.weights = weights
        self.config = read_config(folder / "transformer" / "config.json")
        self.stream_text: LogFn | None = None
        self.vae_lock = RLock()
        self._loaded: dict[str, Any] = {}

    @classmethod
    def read_configs(
        cls, folder: Path, image_channels: Callable[[Any], int] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], int, bool]:
        """The configs of transformer and VAE, the latents' channels, and whether the transformer takes an image too.

        ``image_channels``: how many channels it then reads, from the VAE's config. Raises VideotuneError for a checkpoint
        of another kind.
        """
        net, vae = (
            read_config(folder / part / "config.json") for part in ("transformer", "vae")
        )
        channels = net["in_channels"]
        latent = vae["z_dim" if "z_dim" in vae else "latent_channels"]
        from_image = image_channels is not None and channels == image_channels(vae)
        if not from_image and channels != latent:
            fault = (
                f"its transformer reads {channels} channels, its VAE's latents have {latent}"
            )
            raise VideotuneError(
                f"{folder}: {fault}. Take both parts from one {cls.spec.name} checkpoint."
            )
        return net, vae, latent, from_image

    # parts

    def _part(self, name: str, load: Callable[[], Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]

    def free(self, part: str) -> None:
        """Drop "text_encoder" (all of them) or "vae" from memory."""
        with self.vae_lock:
            self._loaded.pop(part, None)
        if self.device.type != "cpu":
            empty_cache()  # libraries' hooks, and blocks that are streamed, refer to their networks

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """The network of "text_encoder" or "vae", loaded for this call."""
        if name == "text_encoder":
            encoders = {part: self._text_encoder(part, fill) for part in self.text_encoders}
            return (
                encoders[name]
                if len(encoders) == 1
                else joined(encoders, self.main_encoder, self.all_layers)
            )
        cls = getattr(diffusers, self.vae_class)
        return load_model(cls, self.folder / name, torch.float32, self.device, fill=fill)

    def vae(self) -> Any:
        """The VAE in float32. It is not tiled unless asked: tiles give other latents and frames than the pipeline's."""
        return self._part("vae", lambda: self.part("vae"))

    def denoiser(
        self, expert: str | None = None, device: torch.device | None = None, fill: FillFn = None
    ) -> nn.Module:
        """The transformer, frozen; modules that diffusers keeps in float32 stay so."""
        cls = getattr(diffusers, self.transformer_class)
        folder = self.folder / self.spec.part_of(expert)
        packed = self.weights.transformer
        blocks = self.spec.blocks
        return load_model(
            cls, folder, self.dtype, self.device, packed, blocks, stay=device, fill=fill
        )

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The transformer on the meta device."""
        return on_meta(
            getattr(diffusers, self.transformer_class), self.folder / self.spec.part_of(expert)
        )

    def fingerprints(self) -> dict[str, str]:
        """Names of the bytes that caches and checkpoints depend on."""
        text = [
            fingerprint(self.folder / name)
            for part in self.text_encoders
            for name in (part, tokenizer_of(part))
        ]
        nets = [self.spec.part_of(expert.name) for expert in self.spec.experts]
        own = {name: fingerprint(self.folder / name) for name in ("vae", *nets)}
        return {"text_encoder": "-".join([*text, self.weights.of_text(self.dtype)]), **own}

    # text

    def _text_encoder(self, part: str, fill: FillFn = None) -> nn.Module:
        cls = getattr(transformers, self.text_encoders[part])
        packed = self.weights.text_encoder
        stream = self.stream_text
        return load_model(
            cls, self.folder / part, self.dtype, self.device, packed, fill=fill, stream=stream
        )

    def text_pipeline(self) -> Any:
        """A diffusers pipeline of tokenizers and text encoders alone, for its own prompt handling."""
        return self._part("text_encoder", self._load_text)

    def _load_text(self) -> Any:
        tokenizers = self.tokenizers()
        parts: dict[str, Any] = {}
        for part, cls in self.text_encoders.items():
            parts |= {part: self._text_encoder(part), tokenizer_of(part): tokenizers[part]}
            # Older configs name 2 as CLIP's end mark, and then the highest number of a caption counts as its end: that of a
            # new token would. The end mark's own place is the same one in every other caption.
            for module in parts[part].modules() if cls.startswith("CLIP") else ():
                if getattr(module, "eos_token_id", None) == OLDER_END:
                    module.eos_token_id = tokenizers[part].eos_token_id
        return bare_pipeline(self.pipeline_class(), **parts)

    def text_parts(self) -> Mapping[str, TextPart]:
        """The text encoders with their tokenizers, as they read captions until they are freed.

        What is done to them (rows laid over a table, weights that train) is done to all that is encoded meanwhile.
        """
        pipe = self.text_pipeline()
        return {
            part: TextPart(getattr(pipe, tokenizer_of(part)), getattr(pipe, part))
            for part in self.text_encoders
        }

    def tokenizers(self) -> Mapping[str, Any]:
        """A fresh tokenizer of each text encoder."""
        folder = self.folder
        return {
            part: read_tokenizer(folder / tokenizer_of(part), folder / part)
            for part in self.text_encoders
        }

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """The text encoders on the meta device."""
        parts = self.text_encoders.items()
        return {
            part: on_meta(getattr(transformers, name), self.folder / part)
            for part, name in parts
        }

    @classmethod
    def clean(cls, caption: str) -> str:
        """What the tokenizer is given of a caption; T5's takes any white space for one space, whatever its file says."""
        return " ".join(caption.split())

    @classmethod
    def token_lengths(cls, folder: Path, captions: Sequence[str]) -> list[int] | None:
        """How many tokens each caption has, marks included, without torch; None without a tokenizer.json."""
        counts = count_tokens(
            folder / "tokenizer", [cls.clean(caption) for caption in captions]
        )
        return None if counts is None else [count - cls.tokens_in_front for count in counts]

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has, marks included, before any cut."""
        ids = self.text_pipeline().tokenizer(self.clean(caption), verbose=False).input_ids
        return len(ids) - self.tokens_in_front

    def encode_prompt(self, caption: str, **words: Any) -> Any:
        """The pipeline's own answer for a caption in full length."""
        tokens = self.spec.text_tokens
        return self.text_pipeline().encode_prompt(
            caption, max_sequence_length=tokens, device=self.device, **words
        )

    def encode(self, caption: str) -> dict[str, Tensor]:
        """The pipeline's own states of a caption in full length, in the form of ``condition``.

        "text" (L,D), and where the pipeline gives one its "mask" (L,), True where the caption is.
        """
        text, mask, *_ = self.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"text": text[0]} | ({} if mask is None else {"mask": mask[0]})

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of a caption's states must be kept: all, where the states of padding act on what is sampled."""
        return states

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """The states of each caption that ``condition`` needs, on the CPU."""
        with torch.no_grad():
            found = (self.trimmed(caption, self.encode(caption)) for caption in captions)
            return [
                {name: value.cpu().clone() for name, value in states.items()}
                for states in found
            ]

    def encode_in_loop(self, captions: Sequence[str]) -> Conditioning:
        """``condition`` of captions encoded now, each by itself and once, so that no neighbour moves a bit."""
        states = {caption: self.encode(caption) for caption in dict.fromkeys(captions)}
        return self.condition([states[caption] for caption in captions])

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Text (B,L,D), zeros after what was kept of it; "mask" (B,L) is the text's, and all else is stacked in extras."""
        tokens = self.spec.text_tokens
        pad = torch.nn.functional.pad
        text = torch.stack(
            [pad(state["text"], (0, 0, 0, tokens - len(state["text"]))) for state in states]
        )
        extras = {
            name: torch.stack([state[name] for state in states])
            for name in states[0]
            if name != "text"
        }
        return Conditioning(text, extras.pop("mask", None), extras)

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the form of what ``condition`` is given; of the caption alone, unless a family adds more."""
        return {
            "text": torch.zeros(self.spec.text_tokens, self.spec.text_width, dtype=self.dtype)
        }

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """diffusers' form goes by the token; ComfyUI's names the text encoder."""
        return {"diffusers": {}} | (
            {"comfyui": self.embedding_names} if self.embedding_names else {}
        )

    # latents

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Raise VideotuneError for a shape in pixels that the checkpoint does not take."""

    def latent_statistics(self) -> tuple[Tensor, Tensor] | None:
        """The mean and deviation of the VAE's latents, (C,1,1,1) each; None: its config has a scale for all channels."""
        vae = self.vae()
        found = [
            vae._buffers.get(name, vae.config.get(name))
            for name in ("latents_mean", "latents_std")
        ]
        if any(values is None for values in found):
            return None
        mean, std = (
            torch.as_tensor(values, device=self.device).float().view(-1, 1, 1, 1)
            for values in found
        )
        return mean, std / (vae.config.get("scaling_factor") or 1.0)

    def _normalised(self, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        statistics = self.latent_statistics()
        config = self.vae().config
        if statistics is not None:
            return (mean - statistics[0]) / statistics[1], logvar - 2 * statistics[1].log()
        scale = float(config.scaling_factor)
        shift = config.get("shift_factor") or 0.0
        return (mean - shift) * scale, logvar + 2 * math.log(scale)

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Normalised latents as the VAE takes them."""
        statistics = self.latent_statistics()
        config = self.vae().config
        if statistics is not None:
            return latents * statistics[1] + statistics[0]
        return latents / config.scaling_factor + (config.get("shift_factor") or 0.0)

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """What the denoiser is told of an image, here the first frame (3,T,H,W), for ``condition``."""
        return {}

    def encode_video(
        self, frames: Tensor, random: np.random.Generator | None = None
    ) -> LatentDistribution:
        """Frames (3,T,H,W) in [-1,1] -> normalised moments, the mean alone where the authors train on it.

        ``random`` gives the draws that this view of it needs (``spec.image_noise``); None: the plain view, without any.
        """
        self.check_shape(*frames.shape[1:])
        with self.vae_lock, torch.no_grad():
            latent = self.vae().encode(frames[None].to(self.device)).latent_dist
            mean, logvar = self._normalised(latent.mean[0], latent.logvar[0])
            extras = self.image_states(frames, random)
        return LatentDistribution(
            mean.float().cpu(),
            logvar.float().cpu() if self.spec.keeps_variance else None,
            extras,
        )

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Normalised latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU; ``tiled``: with seams blended over."""
        with self.vae_lock, torch.no_grad(), in_tiles(self.vae(), tiled):
            raw = self.raw_latents(latents.to(self.device))
            pixels = self.vae().decode(raw[None], return_dict=False)[0][0]
        return pixels.clamp(-1, 1).float().cpu()

    # the denoiser in training, and in the pipeline

    def model_timesteps(self, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """1000 t in float32, (B,); where frames are given clean one for each token, (B,S), and 0 for theirs.

        One a sample says the same as one a token where nothing is given, and is lighter.
        """
        times = t.float() * 1000
        if self.spec.image_conditioning != "replace" or not batch.has_conditioning:
            return times
        _, rows, columns = self.spec.patch
        tokens = (x_t.shape[3] // rows) * (x_t.shape[4] // columns)  # of a frame
        return (times[:, None] * ~batch.conditioning_mask[:, 0, :, 0, 0]).repeat_interleave(
            tokens, dim=1
        )

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Let video tokens attend to their own latent frame and to text alone, until switched off."""
        blocks = [
            block for name in self.spec.blocks for block in net.get_submodule(name).children()
        ]
        isolate(
            net,
            [getattr(block, self.attention) for block in blocks],
            on,
            self.token_frames,
            self.text_first,
        )

    def token_frames(self, hidden_states: Tensor, **_: Any) -> int:
        """In how many frames the tokens lie, from what the transformer is called with."""
        return hidden_states.shape[2] // self.spec.patch[0]

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that samples from this checkpoint, and whose ``load_lora_weights`` reads our files."""
        return getattr(diffusers, self.pipelines[self.spec.image_conditioning == "concat"])

    def scheduler(self, shift: float | None) -> Any:
        """The checkpoint's own scheduler, at its own shift or at another one."""
        return own_scheduler(self.folder, shift)

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """The checkpoint's pipeline over ``nets``, without VAE and text encoders; ``nets`` is asked at each of its steps.

        ``cls`` and ``parts``: another class, and further components of it.
        """
        for expert in self.spec.experts:
            part = self.spec.part_of(expert.name)
            config = {**self.config_defaults, **read_config(self.folder / part / "config.json")}
            parts[part] = stand_in(nets, expert.name, config, self.dtype, self.device)
        cls = cls or self.pipeline_class()
        index = read_config(self.folder / "model_index.json")
        settings = {
            name: index[name] for name in cls._get_signature_keys(cls)[1] if name in index
        }
        pipe = bare_pipeline(cls, **({"scheduler": self.scheduler(shift)} | settings | parts))
        pipe.vae_scale_factor = pipe.vae_scale_factor_spatial = self.spec.rules.spatial_stride
        pipe.vae_scale_factor_temporal = self.spec.rules.temporal_stride
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """A condition by the pipeline's names."""
        words = {"prompt_embeds": conditioning.text.to(self.device, self.dtype)}
        if conditioning.text_mask is not None:
            words["prompt_attention_mask"] = conditioning.text_mask.to(self.device)
        return words

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W), float32, on the run's device; noise is drawn on the CPU, by a seed each.

        Where the image is told on channels of its own, it is in ``conditioning.extras``, and ``unconditional`` has the same.
        """
        return self.run_pipeline(
            self.pipeline(nets, request.shift), conditioning, unconditional, request
        ).float()

    def run_pipeline(
        self,
        pipe: Any,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
        **words: Any,
    ) -> Tensor:
        """The latents that a pipeline gives; ``words`` are what its call takes beside what pipelines usually do."""
        negative = (
            {}
            if unconditional is None
            else {f"negative_{name}": x for name, x in self.prompt(unconditional).items()}
        )
        shape = request.shape
        asked = signature(pipe.__call__).parameters
        self.check_shape(shape.frames, shape.height, shape.width)
        video = {"num_frames": shape.frames, "frame_rate": shape.fps}
        known = {
            **{name: value for name, value in video.items() if name in asked},
            "height": shape.height,
            "width": shape.width,
            "num_inference_steps": request.steps,
            "guidance_scale": request.guidance,
            "generator": [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds],
            "output_type": "latent",
            "return_dict": False,
        }
        return pipe(**self.prompt(conditioning), **(known | negative | words))[0]

    # names elsewhere

    def lora_formats(self) -> tuple[str, ...]:
        """The formats in which a LoRA is written, sorted."""
        return ("comfyui", "diffusers")

    def to_comfyui_name(self, path: str) -> str:
        """A block module's path in diffusers -> its name in ComfyUI's model."""
        return renamed(path, self.comfyui_names)

    def original(self, name: str) -> str | None:
        """A parameter's name in diffusers -> its name in the authors' checkpoints; None: no such names are known."""
        return None if self.original_names is None else renamed(name, self.original_names)

    # tiny checkpoints

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0, variant: str | None = None) -> Path:
        """Write a random checkpoint of some 50,000 parameters in the real layout, and return its folder."""
        variant = variant or cls.variants[0]
        assert variant in cls.variants, f"{variant!r} is none of {', '.join(cls.variants)}"
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            pipe = cls.tiny_pipeline(variant)
        pipe.save_pretrained(folder)
        return folder

    @classmethod
    def tiny_pipeline(cls, variant: str) -> Any:
        """A pipeline of tiny random networks of a kind of checkpoint, by the family's configs in ``tiny.json``."""
        return tiny_pipeline(cls.spec.name, variant)


def tokenizer_of(part: str) -> str:
    """The folder of a text encoder's tokenizer."""
    return part.replace("text_encoder", "tokenizer")


def spec_of(family: str) -> ModelSpec:
    """The spec of a family's usual checkpoint, as its JSON file says."""
    return checked(ModelSpec, json.dumps(facts(family)["spec"]))


def key_names(family: str, layout: str) -> Names:
    """The replacements that make a family's names in diffusers into those of another layout."""
    return tuple((pattern, other) for pattern, other in facts(family)["key_names"][layout])
