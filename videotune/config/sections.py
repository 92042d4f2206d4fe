"""Sections of the config on what trains: adapters, averages, encoders, new tokens."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from videotune.config.data_schema import Section
from videotune.config.fields import (
    Share,
    data,
    fatal,
    override,
    safe,
    word,
)


def weights(value: Any) -> Any:
    """Accept any case for weight dtypes, whose default is spelled in small letters."""
    return "auto" if str(value).lower() == "auto" else word(value)


WeightDtype = Annotated[
    Literal[
        "auto", "FLOAT_32", "BFLOAT_16", "FLOAT_16", "FLOAT_8", "INT_8", "NFLOAT_4"
    ],
    BeforeValidator(weights),
]


MatmulDtype = Annotated[
    Literal["auto", "FLOAT_8", "INT_8"],
    BeforeValidator(weights),
]


CONNECTORS = "connectors"
"""Target of an adapter on the networks between text encoder and denoiser."""

_CONNECTOR_PATTERN = re.compile(rf"{CONNECTORS}(\\?\.|$)")


def is_connector_target(target: str) -> bool:
    """Whether a target of an adapter is "connectors", or a pattern of paths in them."""
    return _CONNECTOR_PATTERN.match(target) is not None


class LoraModules(Section):
    """Modules of the adapter with numbers of their own; what is left out is the
    adapter's.
    """

    pattern: Annotated[str, Field(min_length=1)]
    """a module's path as a regular expression, or its last parts; the first rule that
    names a module counts
    """
    rank: int | None = Field(None, ge=1, le=8192)
    """rank of their update"""
    alpha: float | None = Field(None, gt=0)
    """numerator of their scale"""
    learning_rate: float | None = Field(None, gt=0)
    """their peak rate"""


class Lora(Section):
    """The adapter."""

    variant: Annotated[
        Literal["LORA", "DORA", "LOHA", "LOKR", "OFT"], BeforeValidator(word)
    ] = fatal("LORA")
    """LORA; DORA: with magnitudes; LOHA, LOKR: products of another kind; OFT: rotations
    """
    rank: int = fatal(16, ge=1, le=8192)
    """rank of the low-rank update (OFT: size of the rotated blocks)"""
    alpha: float | None = fatal(None, gt=0)
    """the update is scaled by alpha / rank (default: alpha = rank)"""
    dropout: float = override(0.0, ge=0, lt=1)
    """dropout on the adapter's input while training (LOHA, LOKR: on rows of the update)
    """
    learning_rate_ratio: float = fatal(1.0, gt=0)
    """LoRA+: learning rate of lora_B divided by that of lora_A, which is learning_rate
    """
    modules: list[LoraModules] = fatal([])
    """[{"pattern", "rank", "alpha", "learning_rate"}]: modules whose rank, alpha or
    rate differ; the first match counts
    """
    targets: str | Annotated[list[str], Field(min_length=1)] = fatal("attention")
    """attention, self_attention, cross_attention, feed_forward, experts, linear, all; of
    models with sound also video, sound, cross_modal; of models with text connectors also
    connectors; or a list of such names and of module path patterns
    """

    @property
    def target_list(self) -> list[str]:
        """The targets as a list."""
        return [self.targets] if isinstance(self.targets, str) else self.targets

    @property
    def names_connectors(self) -> bool:
        """Whether modules of the text connectors are among the targets."""
        return any(map(is_connector_target, self.target_list))

    @property
    def scale(self) -> float:
        """What the update is multiplied by."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank


class LoraFile(Section):
    """A LoRA that exists already, of any program."""

    file: Annotated[str, Field(min_length=1)]
    """a .safetensors file, or a folder of PEFT or diffusers"""
    strength: float = Field(1.0, ge=-1000, le=1000)
    """what its update is multiplied by; negative: it is taken away"""
    expert: str | None = Field(None, pattern="^(high|low)$")
    """of a model with two experts, the one that it belongs to (default: as its header
    or name says)
    """


class BaseLora(LoraFile):
    """A LoRA that is merged into the frozen weights while they are loaded."""

    training_only: bool = False
    """the result is used without it: previews, samples and merged models leave it out
    (an adapter for training a distilled base)
    """


ConditionType = Literal[
    "first_frame", "last_frame", "prefix", "suffix", "mask", "reference", "control"
]


class Condition(Section):
    """A part of the clip that some samples are given clean, or a file beside it."""

    type: ConditionType
    """first_frame, last_frame; prefix, suffix: the first or last latent_frames; mask:
    what is black in the clip's mask, or lies outside of a drawn box; reference: the
    clip or image of its name in references/, appended to it; control: that in controls/,
    on channels of the network
    """
    probability: Share = 1.0
    """share of the samples"""
    latent_frames: int | None = Field(None, ge=1, le=1000)
    """prefix, suffix: number of latent frames (default: 1); reference: its first ones
    (default: as many as the clip has)
    """

    @property
    def frames_given(self) -> int:
        """Number of latent frames of a prefix or suffix."""
        return self.latent_frames or 1


class SoundConfig(Section):
    """The clips' sound, for models that make sound; see generate."""

    loss_weight: float = override(1.0, gt=0, le=1000)
    """generate with both: factor of the sound's loss beside the video's"""
    changed_speed: Literal["drop", "refuse"] = data("drop")
    """a window whose frames do not run as filmed (stretch, temporal_augmentation) trains
    without its sound; refuse: it is an error
    """


class LossMask(Section):
    """How much the loss counts inside and outside of a clip's mask."""

    inside: float = override(1.0, ge=0, le=1000)
    """weight of the loss where a clip's mask is white"""
    outside: float = override(1.0, ge=0, le=1000)
    """weight of the loss where its mask is black; masks are read if it differs from
    loss_mask.inside
    """

    @property
    def is_used(self) -> bool:
        """Whether masks make a difference."""
        return self.inside != self.outside


class Ema(Section):
    """An average of the last steps' weights."""

    decay: float | None = override(None, gt=0, lt=1)
    """share of the average that stays at each step, say 0.999; previews and exports use
    it (default: none)
    """
    device: Literal["device", "host"] = safe("device")
    """where the average is kept; host: no device memory, but each step copies the
    weights there
    """


class Transformer(Section):
    """The denoiser."""

    train: bool = fatal(True)
    """false: it stays as it is, and only the text encoder trains (default for
    EMBEDDING: false)
    """
    weight_dtype: WeightDtype = fatal("auto")
    """dtype of its frozen weights (auto: as weight_dtype says)"""
    matmul_dtype: MatmulDtype = fatal("auto")
    """dtype of weights and inputs in its blocks' matrix products (auto: train_dtype);
    FLOAT_8, INT_8: rounded, so another base
    """
    file: str | list[str | None] | None = fatal(None)
    """a .safetensors file whose weights replace the base model's; for two experts a
    list, null: the base's
    """
    layers: Annotated[list[str], Field(min_length=1)] | None = fatal(None)
    """FINE_TUNE: patterns on module or parameter paths that train, the rest frozen
    (default: all)
    """


class TextEncoder(Section):
    """The text encoder."""

    train: bool = fatal(False)
    """FINE_TUNE: its weights train too, in the loop; false: frozen, its states are
    cached
    """
    learning_rate: float | None = override(None, gt=0)
    """its own rate (default: learning_rate)"""
    weight_dtype: WeightDtype = fatal("auto")
    """dtype of its frozen weights (auto: as weight_dtype says)"""
    layers: Annotated[list[str], Field(min_length=1)] | None = fatal(None)
    """patterns on the paths of the weights, or of the modules, that train (default:
    all)
    """
    file: str | list[str | None] | None = fatal(None)
    """a file of ComfyUI's or the authors' whose weights replace the base model's
    (.safetensors, .pth); for several encoders a list, null: the base's
    """
    convention: Literal["diffusers", "authors"] = fatal("diffusers")
    """whose code captions are read like, where the two differ; ComfyUI reads them as the
    model's authors do, and a plan says of which models
    """


class Vae(Section):
    """The VAE."""

    file: str | None = fatal(None, min_length=1)
    """a file of ComfyUI's or the authors' whose weights replace the base model's
    (.safetensors, .pth)
    """


class Embedding(Section):
    """New tokens, whose rows of the text encoder's table train."""

    token: Annotated[str, Field(pattern=r"^[!-%'-~]{2,}$")] = fatal("<videotune>")
    """the word in captions that the new rows belong to; put in front of captions
    without it
    """
    vectors: int = fatal(1, ge=1, le=4096)
    """number of token embeddings that the word stands for"""
    init_text: str | None = fatal(None, min_length=1)
    """words whose token embeddings they are initialised with (default: random)"""

    @property
    def tokens(self) -> tuple[str, ...]:
        """``<name>``, ``<name>_1``, …: the tokenizer's new tokens, one a row."""
        return token_names(self.token, self.vectors)


def token_names(token: str, count: int) -> tuple[str, ...]:
    """Return the names of the rows: ``<name>``, ``<name>_1``, …"""
    return (token, *(f"{token}_{i}" for i in range(1, count)))
