"""The nouns of videotune, and the shape legend that every docstring uses.

Legend: **B** batch, **C** latent channels, **F** latent frames, **H W** latent rows and columns, **T** pixel frames,
**L** text tokens, **D** text width. Pixel frames are uint8 (T, H, W, 3) on the data side and float (B, 3, T, H, W) in
[-1, 1] on the model side. Latents are always normalised, (B, C, F, H, W), and float32 where losses are taken.

``t`` lies in [0, 1]: 0 is data, 1 is noise. v-prediction's t is k / (K - 1) with k an integer timestep; flow matching's
is the noise level itself. What the network is told (k, 1000 t, …) is the family's business, inside ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # importing this module must not import torch
    import numpy as np
    import torch
    from torch import Tensor, nn


Networks = Mapping[str, "nn.Module"]
"""Denoisers by their experts' names."""

LogFn = Callable[[str], None]
"""What is told a sentence for the user."""

FillFn = Callable[["nn.Module"], object] | None
"""What puts tensors in the place of a network's parameters, which are on the meta device; None: its weights are read."""


@dataclass(frozen=True, order=True)
class ClipShape:
    """What one sample looks like in pixels: frames × height × width, at fps frames a second. A bucket is one of these."""

    frames: int
    height: int
    width: int
    fps: float

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Clip:
    """One file of the person's data; ``id`` is a hash of its bytes, ``source`` the video it was cut from.

    ``kind`` is "train", "validation" (then it is held out) or "regularization", whose ``target`` is "base" (what the base
    model itself predicts) or "clip". ``repeats`` entries of the schedule show it; its loss is multiplied by ``loss_weight``.
    ``still``: it is an image. ``caption_weights``: of its captions by place, none: all alike.
    """

    id: str
    path: str
    source: str
    captions: tuple[str, ...]
    held_out: bool = False
    kind: str = "train"
    repeats: int = 1
    loss_weight: float = 1.0
    target: str = "clip"
    still: bool = False
    caption_weights: tuple[float, ...] = ()

    @property
    def prior_preservation(self) -> bool:
        """Whether the target of its samples is the base model's own prediction (prior preservation)."""
        return self.kind == "regularization" and self.target == "base"


@dataclass(frozen=True)
class Window:
    """A part of a clip from which a sample shows ``shape.frames`` frames: ``start`` to ``end``, in seconds of the clip.

    The window is the schedule's unit. ``sampling`` says how frames lie in it: "even" (spread over it), "hold" (at
    shape.fps from its start, the last one held when the clip ends), "start" (at shape.fps from a random start within
    it), "frames" (random times within it, in order). ``swaps``: neighbouring frames may change places. ``resize`` says
    how a frame gets its size: "center" or "random" crop, "pad", "stretch". What of it is random, ``FrameSample`` settles.
    """

    clip_id: str
    start: float
    end: float
    shape: ClipShape
    sampling: str = "even"
    swaps: bool = False
    resize: str = "center"

    @property
    def id(self) -> str:
        """Short, stable and readable: the clip, the second at which it starts, and the shape."""
        return f"{self.clip_id[:12]}@{self.start:.3f}+{self.shape}"

    @property
    def varies(self) -> bool:
        """Whether two views of it can show different pixels."""
        return self.swaps or self.sampling in ("start", "frames") or self.resize == "random"


DETERMINISTIC_VARIANT = -1
"""The variant of a window without any draw: what validation and sample metrics read."""


@dataclass(frozen=True)
class FrameSample:
    """The pixels that one variant of a window shows; all that decides them beside the file itself.

    ``times`` (T,) seconds of the clip in the order shown; ``place`` where a crop lies in the room it has, (down, right),
    each in [0, 1]: (0.5, 0.5) is the centre.
    """

    window: Window
    variant: int
    times: tuple[float, ...]
    place: tuple[float, float] = (0.5, 0.5)


@dataclass(frozen=True)
class VideoRules:
    """The few facts of a model that decide which frames and sizes it can take (the data room knows no model).

    A valid frame count is ``frame_step · n + frame_rest``, at most ``most_frames``; a valid side is a multiple of
    ``side_multiple`` pixels, at most ``most_side``. ``size``: the only height and width that there are; ``most_area``: the
    most pixels of a frame. None: no such limit.
    """

    frame_step: int
    frame_rest: int
    side_multiple: int
    fps: float
    spatial_stride: int
    temporal_stride: int
    most_frames: int | None = None
    most_side: int | None = None
    size: tuple[int, int] | None = None
    most_area: int | None = None

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        """(F, H, W) of a clip of this shape."""
        frames = (shape.frames - 1) // self.temporal_stride + 1
        return frames, shape.height // self.spatial_stride, shape.width // self.spatial_stride


@dataclass(frozen=True)
class Expert:
    """A denoiser that sees t in [t_lo, t_hi)."""

    name: str
    t_lo: float = 0.0
    t_hi: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is true of a checkpoint without loading a weight; read from its own configs where they say it.

    ``aliases``: its pipelines' classes and other names of the family. ``path`` is "flow" or "v"; ``given`` how clean frames
    enter: "replace", "concat" or "none"; ``blocks`` the module path of the repeated blocks (offload, checkpointing, compile,
    sharding and quantization all use this one fact); ``patch`` (frames, rows, columns) of latents a token covers;
    ``timestep_*`` and ``sample_*`` the family's own defaults.
    ``first_frame``: the share of samples that are told their clip's first frame, unless the config says another (None: the
    checkpoint takes no image); ``image_noise``: noise is drawn onto that frame before it is encoded, anew for each view.
    ``sample_shape`` (frames, height, width) is what the model samples by default (None: 8 steps of its frames in a square
    of ``default_resolution``). What ``encode_video`` gives of a clip: the mean, with ``keeps_variance`` the
    variance too; ``image_channels`` (of each latent frame, of the first alone) and ``image_numbers`` of an image.
    ``fused``: for an export format that makes one module of several, their list of blocks and their paths within a block,
    in the order of their rows. ``text_numbers``: what text encoders give of a caption beside its ``text_tokens`` states of
    ``text_width``. ``guidance_embedded``: the network is told the guidance and takes no second pass. ``padded_tokens``: as
    many as a picture that is not square is padded to (None: its own). ``shift_by_tokens``: (tokens, μ at them, other tokens,
    μ at those) of the checkpoint's own scheduler, whose shift e^μ grows with the resolution (None: it has a fixed one).
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    path: str
    rules: VideoRules
    text_tokens: int
    blocks: tuple[str, ...]
    lora_targets: Mapping[str, tuple[str, ...]]
    default_resolution: int | str
    timestep_shift: float
    sample_steps: int
    sample_guidance: float
    licence: str
    latent_channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    text_width: int = 4096
    image_conditioning: str = "none"
    experts: tuple[Expert, ...] = (Expert("transformer"),)
    timestep_distribution: str = "LOGIT_NORMAL"
    path_constants: Mapping[str, float] = field(default_factory=dict)
    first_frame: float | None = None
    image_noise: bool = False
    sample_shape: tuple[int, int, int] | None = None
    keeps_variance: bool = False
    image_channels: tuple[int, int] = (0, 0)
    image_numbers: int = 0
    fused_modules: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = field(
        default_factory=dict
    )
    text_numbers: int = 0
    guidance_embedded: bool = False
    padded_tokens: int | None = None
    shift_by_tokens: tuple[float, float, float, float] | None = None

    def part_of(self, expert: str | None = None) -> str:
        """The folder of an expert's weights in diffusers layout: transformer, then transformer_2. None: the first one."""
        index = 0 if expert is None else [known.name for known in self.experts].index(expert)
        return "transformer" if index == 0 else f"transformer_{index + 1}"

    def export_suffix(self, expert: str) -> str:
        """What the name of an expert's exported file ends in, before its .safetensors; empty where there is one expert.

        ComfyUI's workflows go by it.
        """
        return f"_{expert}_noise" if len(self.experts) > 1 else ""

    def cached_numbers(self, shape: ClipShape) -> int:
        """How many numbers the cache keeps of one view of this shape."""
        frames, rows, columns = self.rules.latent_size(shape)
        each, first = self.image_channels
        each += self.latent_channels * (2 if self.keeps_variance else 1)
        return (each * frames + first) * rows * columns + self.image_numbers

    def tokens(self, shape: ClipShape) -> int:
        """How many tokens the denoiser sees for one sample of this shape."""
        frames, rows, columns = self.rules.latent_size(shape)
        if self.padded_tokens is not None and rows != columns:
            return self.padded_tokens
        pf, ph, pw = self.patch
        return -(-frames // pf) * (rows // ph) * (columns // pw)


@dataclass(frozen=True)
class Conditioning:
    """What the denoiser is told beside the noisy latents: text (B,L,D), text_mask (B,L) or None, extras by name."""

    text: Tensor
    text_mask: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Conditioning:
        """The same condition with ``fn`` applied to each tensor."""
        mask = None if self.text_mask is None else fn(self.text_mask)
        return Conditioning(fn(self.text), mask, {k: fn(v) for k, v in self.extras.items()})


@dataclass(frozen=True)
class Batch:
    """Samples of one bucket.

    x0 (B,C,F,H,W); given (B,1,F,1,1) bool, conditioning frames, fed clean; dropped (B,1,F,1,1) bool, frames fed as pure
    noise; weight (B,1,F,1 or H,1 or W), what the loss counts, 0 where given, dropped or masked; scale (B,) multiplies a
    sample's loss; prior (B), samples whose target is the base model's own prediction; fps (B,). ``any_given`` False: the
    host knows that there is none, so nobody has to ask the device.
    """

    x0: Tensor
    conditioning_mask: Tensor
    dropped_frames_mask: Tensor
    loss_mask: Tensor
    loss_weight: Tensor
    conditioning: Conditioning
    captions: tuple[str, ...]
    window_ids: tuple[str, ...]
    fps: Tensor
    prior_preservation: tuple[bool, ...]
    has_conditioning: bool = True

    @classmethod
    def of(cls, x0: Tensor, conditioning: Conditioning, **more: Any) -> Batch:
        """Samples of which every frame is noised and counts the same, but for what ``more`` says."""
        count = len(x0)
        none = x0.new_zeros(len(x0), 1, x0.shape[2], 1, 1).bool()
        plain: dict[str, Any] = {
            "conditioning_mask": none,
            "dropped_frames_mask": none,
            "loss_mask": (~none).float(),
            "loss_weight": x0.new_ones(count),
        }
        plain |= {
            "captions": ("",) * count,
            "window_ids": ("",) * count,
            "prior_preservation": (False,) * count,
        }
        return cls(
            x0=x0, conditioning=conditioning, **({"fps": x0.new_ones(count)} | plain | more)
        )

    def __len__(self) -> int:
        return self.x0.shape[0]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``fn`` (a slice, a copy to a device) applied to each tensor."""
        tensors = {
            name: fn(getattr(self, name))
            for name in (
                "x0",
                "conditioning_mask",
                "dropped_frames_mask",
                "loss_mask",
                "loss_weight",
                "fps",
            )
        }
        return replace(self, conditioning=self.conditioning.map(fn), **tensors)  # type: ignore[arg-type]

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of at most ``size`` samples, in order."""
        if size >= len(self):
            return [self]
        parts = []
        for lo in range(0, len(self), size):
            part = slice(lo, lo + size)
            names: dict[str, Any] = {
                key: getattr(self, key)[part]
                for key in ("captions", "window_ids", "prior_preservation")
            }
            parts.append(replace(self.map(lambda x, part=part: x[part]), **names))  # type: ignore[misc]
        return parts


@dataclass(frozen=True)
class NoisePath:
    """Where x_t = alpha·x0 + sigma·noise lies and how it moves: v = d_alpha·x0 + d_sigma·noise.

    Each is (B,1,1,1,1) float32, with alpha·d_sigma - sigma·d_alpha = 1.
    """

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


@dataclass(frozen=True)
class StepOutput:
    """loss () with its graph; mse (B,) plain v-MSE, detached; per_clip (B,) what was averaged, detached; t (B,)."""

    loss: Tensor
    mse: Tensor
    per_sample_loss: Tensor
    t: Tensor


@dataclass(frozen=True)
class LatentDistribution:
    """A video's latent Gaussian, normalised: mean (C,F,H,W), and logvar likewise or None where only the mean trains.

    ``extras``: what else of the clip's pixels the denoiser is told, under the family's own names, for ``Family.condition``.
    """

    mean: Tensor
    logvar: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TextPart:
    """A text encoder in memory, frozen unless somebody lets it train, and the tokenizer whose numbers it reads."""

    tokenizer: Any
    encoder: nn.Module


@dataclass(frozen=True)
class WeightDtypes:
    """How frozen weights are kept: a name of ``memory/quantization.py``; None: in the run's dtype."""

    transformer: str | None = None
    text_encoder: str | None = None

    def of_text(self, dtype: torch.dtype) -> str:
        """Names what a text encoder computes with, as its states differ by it."""
        return "-".join(filter(None, (str(dtype), self.text_encoder)))


PLAIN_WEIGHTS = WeightDtypes()


class Family(Protocol):
    """What videotune asks of a family of models; an object is a checkpoint of it, ``DiffusersModel`` the usual base class.

    Parts load at the first call and are freed by ``free``. ``nets`` holds the denoisers by expert. An expert is looked up at
    each of its steps, so the mapping may load it then. ``fill``: no weights are read, and it puts tensors in the place of
    the parameters.
    """

    spec: ModelSpec
    """The usual checkpoint's; of an opened one its own."""

    variants: tuple[str, ...]
    """The kinds of checkpoint that ``tiny`` writes, the usual one first."""

    dtype: torch.dtype
    weights: WeightDtypes
    stream_text: LogFn | None
    """Text encoders that load from now on keep the weights of their blocks on the host; it is told what fails. None: not."""

    def __init__(
        self,
        folder: FilePath,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightDtypes = PLAIN_WEIGHTS,
    ) -> None: ...

    @classmethod
    def read_spec(cls, folder: FilePath) -> ModelSpec:
        """The spec of the checkpoint in a folder, from its own configs, without torch."""

    @classmethod
    def token_lengths(cls, folder: FilePath, captions: Sequence[str]) -> list[int] | None:
        """How many tokens each caption has, marks included, without torch; None where there is no tokenizer.json."""

    @classmethod
    def tiny(cls, folder: FilePath, seed: int = 0, variant: str | None = None) -> FilePath:
        """Write a tiny random checkpoint, one of ``variants``, in the real layout."""

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """For each caption its unpadded states on the CPU: {"text": (l, D), …}."""

    def text_parts(self) -> Mapping[str, TextPart]:
        """The text encoders by their folders' names; what is done to them is done to all that is encoded until ``free``."""

    def tokenizers(self) -> Mapping[str, Any]:
        """A fresh tokenizer of each text encoder, by the encoder's folder; no weights are read."""

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """The text encoders without weights (on the meta device), by their folders' names."""

    def text_length(self, caption: str) -> int:
        """How many tokens the caption has before any cut; more than ``spec.text_tokens`` are cut."""

    def encode_in_loop(self, captions: Sequence[str]) -> Conditioning:
        """``condition`` of captions encoded now, on the run's device, with gradients where they are on."""

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """For each format of token rows, each text encoder's key in its one file; {}: the token is the key, a file each."""

    def condition(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Pad and stack cached states, a clip's extras among them, exactly as the family's pipeline feeds them."""

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Zeros in the form of what ``condition`` is given for one clip of this shape and a caption of full length."""

    def encode_video(
        self, frames: Tensor, random: np.random.Generator | None = None
    ) -> LatentDistribution:
        """One clip (3,T,H,W) in [-1,1] -> its moments, on the CPU in float32; ``random`` is for ``spec.image_noise``."""

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Latents (C,F,H,W) -> pixels (3,T,H,W) in [-1,1], on the CPU in float32; ``tiled``: in less memory."""

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """The network of "text_encoder" or "vae", loaded for this call."""

    def denoiser(
        self, expert: str | None = None, device: torch.device | None = None, fill: FillFn = None
    ) -> nn.Module:
        """The diffusers transformer, frozen, in the run's dtype on a device (None: the run's). Expert None: the first."""

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """The same transformer without weights (on the meta device), to read a file into. None: the first expert."""

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v (B,C,F,H,W) float32 for noisy latents x_t at t (B,)."""

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Video tokens attend to their own latent frame and to the text, text to text alone, until switched off."""

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Normalised latents (B,C,F,H,W) sampled by the family's own pipeline, one for each seed."""

    def pipeline_class(self) -> Any:
        """The diffusers pipeline that reads this family's LoRA files."""

    def lora_formats(self) -> tuple[str, ...]:
        """The formats in which a LoRA of this checkpoint is written, sorted."""

    def to_comfyui_name(self, path: str) -> str:
        """A module's path in diffusers -> its name in ComfyUI; several may share one."""

    def original(self, name: str) -> str | None:
        """A parameter's name in diffusers -> its name in the authors' checkpoints; None: no such names are known."""

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the text encoder, the VAE and the denoisers on disk, for the caches and the journal."""

    def free(self, part: str) -> None:
        """Drop "text_encoder" or "vae" from memory."""


@dataclass(frozen=True)
class SampleRequest:
    """What to draw: the shape, steps, guidance (``guidance_2``: of the second expert, None: the same), a seed each.

    ``shift`` None: the checkpoint's own. ``first`` (B,C,1,H,W): clean first latent frames in the place of noise.
    """

    shape: ClipShape
    steps: int
    guidance: float
    seeds: tuple[int, ...]
    shift: float | None = None
    guidance_2: float | None = None
    first: Tensor | None = None


@dataclass(frozen=True)
class BasePlace:
    """Where a base model lies: a folder in diffusers layout, and the name by which the person asked for it."""

    name: str
    folder: FilePath
