"""The facts of a model checkpoint, known without loading a weight."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from videotune.types import ClipShape

ImageConditioning = Literal["none", "replace", "concat"]

APPENDED_OF_SUFFIX = 2
"""Latent frames of an appended suffix that are tokens of their own, after the clip's. An
encoder that gets only the suffix makes these first latents without the frames before it, so
they differ from the clip's latents of the same frames. Those after them replace the clip's
last latents.
"""

ASSET = "asset:"
"""Beginning of the names of base models that come with videotune."""


def asset_title(name: str) -> str | None:
    """Return the title of a base model that comes with videotune; None for another.

    Such a model has a family's architecture, but is not one of the family's checkpoints.
    """
    if not name.startswith(ASSET):
        return None
    return f"the {name.removeprefix(ASSET)} base model"


@dataclass(frozen=True)
class VideoRules:
    """The frame counts and sizes that a model accepts.

    ``data/`` gets only these rules, because it does not import ``models/``.

    A valid frame count is ``frame_step`` · n + ``frame_rest``. A limit that is None does not
    exist.
    """

    frame_step: int
    frame_rest: int
    """What a valid count is beyond a multiple of ``frame_step``. With ``frame_step`` 0,
    the only count.
    """
    side_multiple: int
    """Height and width are multiples of this many pixels."""
    fps: float
    spatial_stride: int
    """Pixels of a latent cell's side."""
    temporal_stride: int
    """Pixel frames of a latent frame."""
    most_frames: int | None = None
    most_side: int | None = None
    size: tuple[int, int] | None = None
    """The only height and width that the model accepts."""
    most_area: int | None = None
    """Pixels of a frame, at most."""

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        """Return (F, H, W) of a clip of this shape."""
        frames = (shape.frames - 1) // self.temporal_stride + 1
        return (
            frames,
            shape.height // self.spatial_stride,
            shape.width // self.spatial_stride,
        )


@dataclass(frozen=True)
class ConditionSupport:
    """How a checkpoint takes a condition."""

    mechanism: Literal["in_place", "channels", "context"]
    """"in_place": latent cells are fed clean, at timestep 0; "channels": the network has
    input channels for it; "context": clean tokens that are appended to the clip's.
    """
    in_diffusers: bool = True
    """Whether diffusers' pipeline samples with it. False: only videotune does."""
    is_required: bool = False
    """Whether the network never runs without it."""
    is_image: bool = False
    """Whether it is one image of any aspect ratio, which the pipeline fits into the
    picture; not a file with the frames of the clip.
    """


@dataclass(frozen=True)
class SoundRules:
    """How a checkpoint takes and makes sound."""

    sample_rate: int
    """Numbers a second of the sound that is encoded."""
    latents_per_second: float
    channels: int
    """Numbers of each latent."""
    lora_targets: Mapping[str, tuple[str, ...]]
    """Patterns of module paths with sound, by the name of a preset of targets."""
    modules: tuple[str, ...]
    """Regular expressions of what acts on sound, matched from the beginning of a path."""
    idle_paths: Mapping[str, tuple[str, ...]]
    """``ModelSpec.idle_paths`` of a run that reads sound, by what it generates: "video",
    "sound" or "video and sound".
    """

    def latents(self, shape: ClipShape) -> int:
        """Return how many latents the sound of a sample has."""
        return round(shape.frames / shape.fps * self.latents_per_second)


@dataclass(frozen=True)
class ConnectorRules:
    """The networks between a text encoder and the denoiser, on which an adapter can
    train.
    """

    path: str
    """Their folder, their name in the pipeline, and that in the denoiser while they run
    in the step.
    """
    blocks: tuple[str, ...]
    """Module paths of their repeated blocks, from the denoiser on."""
    lora_targets: tuple[str, ...]
    """Patterns of the modules that "connectors" in ``lora.targets`` names."""
    text_width: int
    """Width of the states that they read."""
    text_numbers: int
    """Numbers of a caption that they read in addition to its ``text_tokens`` states."""


@dataclass(frozen=True)
class Expert:
    """A denoiser for the noise levels t in [t_lo, t_hi)."""

    name: str
    t_lo: float = 0.0
    t_hi: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is known of a checkpoint without loading a weight, read from its own configs
    where they say it.
    """

    name: str
    aliases: tuple[str, ...]
    """Class names of its pipelines, and other names of the family."""
    title: str
    prediction: Literal["flow", "v"]
    """What the network predicts."""
    rules: VideoRules
    text_tokens: int
    """Tokens of a caption, at most."""
    blocks: tuple[str, ...]
    """Module paths of the repeated blocks, for offload, checkpointing, compile,
    sharding and quantization.
    """
    lora_targets: Mapping[str, tuple[str, ...]]
    """Patterns of module paths, by the name of a preset of targets."""
    default_resolution: int | str
    timestep_shift: float
    sample_steps: int
    sample_guidance: float
    licence: str
    licence_terms: str = ""
    """Address of the terms, if they pass to what is trained and must be accepted once.
    """
    latent_channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    """Latent (frames, rows, columns) of a token."""
    text_width: int = 4096
    """Width D of the text states."""
    text_by_length: bool = False
    """Whether the network reads text without padding and without a mask. Then it runs
    on samples whose captions have one length at a time
    (``DiffusersModel.predict_by_length``).
    """
    image_conditioning: ImageConditioning = "none"
    """How a conditioning image enters: "replace" feeds the first latent frame clean,
    "concat" adds channels.
    """
    further_conditions: Mapping[str, ConditionSupport] = field(default_factory=dict)
    """Conditions in addition to that of ``image_conditioning``, by their type."""
    experts: tuple[Expert, ...] = (Expert("transformer"),)
    timestep_distribution: str = "LOGIT_NORMAL"
    prediction_constants: Mapping[str, float] = field(default_factory=dict)
    """Constants of the noise schedule of v-prediction."""
    first_frame_probability: float | None = None
    """Share of samples that are conditioned on their first frame by default.

    None: it takes no image.
    """
    predicts_images_apart: bool = False
    """Whether samples with an image and samples without are passes of their own through
    the network.
    """
    encodes_first_frame: bool = False
    """Whether a first frame that is fed clean is encoded on its own, because the VAE
    gives it other latents within a clip. The cache keeps its latents and the clip's.
    """
    image_noise: bool = False
    """Whether noise is drawn onto the conditioning frame before it is encoded, for each
    view.
    """
    sample_shape: tuple[int, int, int] | None = None
    """(frames, height, width) that it samples by default.

    None: 8 steps of its frames in a square of ``default_resolution``.
    """
    keeps_variance: bool = False
    """Whether the cache keeps the variance of its latents, too, and not only the mean."""
    image_channels: tuple[int, int] = (0, 0)
    """Channels of a conditioning image that the cache keeps: of each latent frame, and
    of the first one only.
    """
    control_channels: int = 0
    """Channels on which a network of its own kind reads conditions; they are encoded
    also if they show nothing.
    """
    image_numbers: int = 0
    """Numbers of a conditioning image that the cache keeps in addition to those."""
    fused_modules: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = field(
        default_factory=dict
    )
    """Modules that an export format joins into one, by format: their list of blocks,
    and their paths within a block in the order of their rows.
    """
    text_numbers: int = 0
    """Numbers that text encoders give of a caption in addition to its ``text_tokens``
    states.
    """
    authors_read_otherwise: bool = False
    """Whether the authors' code and ComfyUI read captions otherwise than diffusers'
    pipeline does.
    """
    authors_text: bool = False
    """Whether captions are read as the authors' code reads them, not as diffusers'
    pipeline does (``DiffusersModel.with_authors_text``).
    """
    guidance_embedded: bool = False
    """Whether guidance is an input of the network, so that sampling needs no second
    pass.
    """
    least_steps: int = 1
    """Denoising steps of a sample, at least."""
    sample_passes: int = 2
    """Passes of the network in a step of a guided sample."""
    sample_rescale: float = 0.0
    """How far a guided sample is scaled back by default (``guidance_rescale``)."""
    idle_paths: tuple[str, ...] = ()
    """Regular expressions, matched from the beginning of a path. What they match has no
    effect in a training step and never trains.
    """
    sound: SoundRules | None = None
    """How it takes and makes sound. None: it has no sound."""
    connectors: ConnectorRules | None = None
    """The networks between text encoder and denoiser. None: no adapter trains on them.
    """
    connectors_in_step: bool = False
    """Whether these run in the step, with the denoiser, and captions are cached before
    them.
    """
    generates: tuple[str, ...] = ("video",)
    """What a run learns, the config's ``generate``: "video", "sound" or both. In a run with
    sound, the other one is given.
    """
    reads_sound: bool = False
    """Whether the samples of a run have sound."""
    schedulers: tuple[str, ...] = ()
    """diffusers' schedulers that its pipeline samples with."""
    takes_frame_rate: bool = False
    """Whether its pipeline takes the frames a second."""
    pipeline_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its pipeline's call that the checkpoint needs and that are not
    diffusers' defaults.
    """
    unguided_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of that call with which a guidance of 1 is one pass a step."""
    rescales_guidance: bool = False
    """Whether its pipeline takes ``guidance_rescale``."""
    caches_first_block: bool = False
    """Whether diffusers' first-block cache knows its blocks, so that a sample can skip
    those behind the first.
    """
    padded_tokens: int | None = None
    """Tokens that a picture is padded to unless it is square.

    None: it is not padded.
    """
    splits_tokens: bool = False
    """Whether diffusers splits the tokens of a sample over several processes
    (``context_parallel``).
    """
    attention_heads: int = 1
    """Heads of the attention over video tokens, if ``splits_tokens``."""
    shift_by_tokens: tuple[float, float, float, float] | None = None
    """(tokens, μ there, other tokens, μ there) of a scheduler whose shift e^μ grows
    with the resolution. None: the shift is fixed.
    """
    shifts_in_training: bool = False
    """Whether training draws noise levels with ``shift_by_tokens`` by default; otherwise
    only sampling does.
    """

    @property
    def has_conditioning_video(self) -> bool:
        """Whether samples of a run are given their whole video."""
        return self.generates == ("sound",)

    @property
    def has_conditioning_sound(self) -> bool:
        """Whether samples of a run are given their sound."""
        return self.reads_sound and self.generates == ("video",)

    @property
    def has_conditioning_modality(self) -> bool:
        """Whether samples of a run are given their video or their sound."""
        return self.has_conditioning_video or self.has_conditioning_sound

    @property
    def conditions(self) -> Mapping[str, ConditionSupport]:
        """Conditions that the checkpoint takes, by their type."""
        conditions = {}
        if self.image_conditioning == "replace":
            conditions["first_frame"] = ConditionSupport("in_place")
        elif self.image_conditioning == "concat":
            conditions["first_frame"] = ConditionSupport("channels")
        return {**conditions, **self.further_conditions}

    @property
    def required_conditions(self) -> frozenset[str]:
        """Types of the conditions without which the network never runs."""
        return frozenset(
            name for name, support in self.conditions.items() if support.is_required
        )

    @property
    def cached_with_latents(self) -> frozenset[str]:
        """Types of the conditions that a clip's own cache entry shows on channels: they are
        encoded together with the clip.
        """
        is_on_channels = self.image_conditioning == "concat"
        return self.required_conditions | ({"first_frame"} if is_on_channels else set())

    def need_own_entry(self, types: frozenset[str]) -> bool:
        """Whether what channels show of these conditions is a cache entry of its own, and
        not part of the clip's.

        Channels of an image are zeros without a condition, which need no entry. Control
        channels are never zeros.
        """
        if self.control_channels:
            return True
        return bool(types) and types != self.cached_with_latents

    def is_appended(self, condition: str) -> bool:
        """Whether a condition's tokens are appended to the clip's."""
        support = self.conditions.get(condition)
        return support is not None and support.mechanism == "context"

    @property
    def has_reference_image(self) -> bool:
        """Whether its reference is one image, fitted into the picture."""
        support = self.conditions.get("reference")
        return support is not None and support.is_image

    def is_on_channels(self, condition: str) -> bool:
        """Whether the network has input channels for a condition."""
        support = self.conditions.get(condition)
        return support is not None and support.mechanism == "channels"

    def is_in_place(self, condition: str) -> bool:
        """Whether a condition's latent cells are fed clean."""
        support = self.conditions.get(condition)
        return support is not None and support.mechanism == "in_place"

    def acts_on_sound(self, path: str) -> bool:
        """Whether a parameter or module acts on sound, or between sound and video."""
        if self.sound is None:
            return False
        return any(re.match(pattern, path) for pattern in self.sound.modules)

    def is_idle(self, path: str) -> bool:
        """Whether a parameter or module has no effect in a training step."""
        return any(re.match(pattern, path) for pattern in self.idle_paths)

    def with_sound(self, generates: Sequence[str]) -> ModelSpec:
        """Return the spec of a run that reads sound.

        Args:
            generates: what it learns, see ``generates``.
        """
        assert self.sound is not None
        ordered = tuple(name for name in ("video", "sound") if name in generates)
        return replace(
            self,
            generates=ordered,
            reads_sound=True,
            lora_targets={**self.lora_targets, **self.sound.lora_targets},
            idle_paths=self.sound.idle_paths[" and ".join(ordered)],
        )

    def with_connectors(self) -> ModelSpec:
        """Return the spec of a run whose connectors run in the step."""
        assert self.connectors is not None
        return replace(
            self,
            connectors_in_step=True,
            text_width=self.connectors.text_width,
            text_numbers=self.connectors.text_numbers,
        )

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Module paths of all repeated blocks of a step, in the order in which they
        run: those of connectors in the step, then ``blocks``.
        """
        if not self.connectors_in_step:
            return self.blocks
        assert self.connectors is not None
        return (*self.connectors.blocks, *self.blocks)

    def is_connector(self, path: str) -> bool:
        """Whether a module or parameter belongs to the connectors."""
        return self.connectors is not None and path.startswith(
            f"{self.connectors.path}."
        )

    def part_of(self, expert: str | None = None) -> str:
        """Return the folder of an expert's weights in diffusers layout: transformer,
        then transformer_2. None: the first.
        """
        names = [known_expert.name for known_expert in self.experts]
        index = 0 if expert is None else names.index(expert)
        return "transformer" if index == 0 else f"transformer_{index + 1}"

    def export_suffix(self, expert: str) -> str:
        """Return the end of an exported file's name before .safetensors, as ComfyUI's
        workflows expect it.

        Empty for a model with one expert.
        """
        return f"_{expert}_noise" if len(self.experts) > 1 else ""

    def cached_numbers(self, shape: ClipShape) -> int:
        """Return how many numbers the cache keeps of one view of this shape."""
        frames, rows, columns = self.rules.latent_size(shape)
        channels_per_frame, channels_of_first = self.image_channels
        channels_per_frame += self.latent_channels * (2 if self.keeps_variance else 1)
        if self.encodes_first_frame:
            channels_of_first += self.latent_channels
        channels = channels_per_frame * frames + channels_of_first
        return channels * rows * columns + self.image_numbers

    def tokens(self, shape: ClipShape) -> int:
        """Return how many tokens the denoiser sees of one sample of this shape."""
        tokens = self.video_tokens(shape)
        if shape.sound and self.sound is not None:
            tokens += self.sound.latents(shape)
        return tokens

    def video_tokens(self, shape: ClipShape) -> int:
        """Return how many of these tokens are the video's."""
        frames, rows, columns = self.rules.latent_size(shape)
        if self.padded_tokens is not None and rows != columns:
            return self.padded_tokens
        patch_frames, patch_rows, patch_columns = self.patch
        return (
            -(-frames // patch_frames)
            * (rows // patch_rows)
            * (columns // patch_columns)
        )
