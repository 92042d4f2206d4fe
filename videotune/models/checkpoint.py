"""The parts of a checkpoint in diffusers layout: configs, text encoders, VAE and
denoisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from videotune import cpu_threads
from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch, transformers
from videotune.memory.accelerator import empty_cache
from videotune.model_spec import ModelSpec
from videotune.models.fingerprint import fingerprint
from videotune.models.loading import load_model, read_tokenizer
from videotune.models.model_files import read_config
from videotune.models.pipelines import bare_pipeline, join_encoders
from videotune.models.skeletons import on_meta, pretrained
from videotune.types import PLAIN_WEIGHTS, TextPart

if TYPE_CHECKING:
    from torch import nn

    from videotune.models.weight_changes import WeightChanges
    from videotune.types import FillFn, LogFn, WeightDtypes

OLD_CLIP_END = 2
"""The end mark's number in older configs of CLIP, which is not the number that
tokenizers use.
"""

SOUND_PARTS = ("audio_vae", "vocoder")
"""Parts that encode and decode sound, by their folders."""


IMAGE_ENCODER = "image_encoder"
"""The part that encodes a conditioning image beside the VAE, by its folder."""


class ImageEncoderParts(NamedTuple):
    """What encodes a conditioning image beside the VAE, by names in transformers."""

    encoder_class: str
    processor_class: str
    processor_folder: str


class CheckpointConfigs(NamedTuple):
    """The configs of a checkpoint's transformer and VAE."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    latent_channels: int
    has_image_channels: bool
    """Whether the transformer reads an image on channels of its own."""


class Checkpoint:
    """A checkpoint in diffusers layout.

    Its encoders load at their first use and stay until freed.

    Hold ``vae_lock`` while using the VAE: ``free`` waits for it, and a VAE that keeps
    state between frames works on one clip at a time.
    """

    spec: ModelSpec
    """Facts of the family's usual checkpoint; an opened checkpoint has its own."""

    transformer_class: ClassVar[str]
    """Class of the denoiser in diffusers."""

    vae_class: ClassVar[str]
    """Class of the VAE in diffusers."""

    channels_key: ClassVar[str] = "in_channels"
    """Key of the transformer's config with the number of its input channels."""

    text_encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "T5EncoderModel"}
    """Class in transformers of each text encoder, by its folder.

    The folder of its tokenizer ends in the same number.
    """

    fixed_text_encoders: ClassVar[tuple[str, ...]] = ()
    """Text encoders that never train and get no new tokens, by their folders."""

    main_encoder: ClassVar[str] = "text_encoder"
    """The text encoder whose states represent all of them in a plan."""

    all_layers: ClassVar[bool] = False
    """Whether the states of all layers of ``main_encoder`` are used."""

    image_encoder_parts: ClassVar[ImageEncoderParts | None] = None
    """None: the family has no image encoder."""

    pipelines: ClassVar[tuple[str, ...]]
    """The diffusers pipelines: from text, and from an image on extra channels if there
    is one.
    """

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
        self.vae_lock = RLock()
        self._loaded: dict[str, Any] = {}

        self.weight_changes: Mapping[str, WeightChanges] = {}
        """Changes of denoisers, by their part, made whenever one is loaded."""

        self.stream_text: LogFn | None = None
        """If set, text encoders that load from now on keep the weights of their blocks
        on the host.

        The function gets a line if that fails.
        """

    @property
    def text_dtype(self) -> torch.dtype:
        """The dtype in which text encoders compute.

        Their activations leave float16's range, so beside it they have float32.
        """
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of the checkpoint in a folder from its configs, without torch.

        Raises:
            VideotuneError: if it is a checkpoint of another kind.
        """
        raise NotImplementedError

    @classmethod
    def read_configs(
        cls, folder: Path, channels_with_image: Callable[[Any], int] | None = None
    ) -> CheckpointConfigs:
        """Read the configs of transformer and VAE and compare their channels.

        Args:
            folder: the checkpoint.
            channels_with_image: returns how many channels the transformer reads if it
                also takes an image, from the VAE's config. None: the family has no such
                checkpoint.

        Raises:
            VideotuneError: if the transformer's channels fit neither case.
        """
        net = read_config(folder / "transformer" / "config.json")
        vae = read_config(folder / "vae" / "config.json")
        channels = net[cls.channels_key]
        latent_channels = vae["z_dim" if "z_dim" in vae else "latent_channels"]
        has_image_channels = (
            channels_with_image is not None and channels == channels_with_image(vae)
        )
        if not has_image_channels and channels != latent_channels:
            raise VideotuneError(
                f"{folder}: its transformer reads {channels} channels, its VAE's latents have "
                f"{latent_channels}. Take both parts from one {cls.spec.name} checkpoint."
            )
        return CheckpointConfigs(net, vae, latent_channels, has_image_channels)

    def _load_once(self, name: str, load: Callable[[], Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]

    def free(self, part: str) -> None:
        """Drop "text_encoder" (all of them) or "vae" from memory, the latter with all that
        encodes and decodes beside it: sound and conditioning images.
        """
        parts = [part, *SOUND_PARTS, IMAGE_ENCODER] if part == "vae" else [part]
        with self.vae_lock:
            for name in parts:
                self._loaded.pop(name, None)
        if self.device.type != "cpu":
            # Hooks of libraries and streamed blocks refer to their networks in cycles.
            empty_cache()

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load the network of "text_encoder" (all of them, joined) or "vae" for the
        caller.

        Args:
            name: the part.
            fill: puts tensors in the place of the parameters instead of reading
                weights.
        """
        if name == "text_encoder":
            encoders = {
                part: self._text_encoder(part, fill) for part in self.text_encoders
            }
            if len(encoders) == 1:
                return encoders[name]
            return join_encoders(
                encoders, self.main_encoder, all_layers=self.all_layers
            )
        cls = getattr(diffusers, self.vae_class)
        return load_model(
            cls, self.folder / name, torch.float32, self.device, fill=fill
        )

    def vae(self) -> Any:
        """Return the VAE in float32, not tiled: tiles change the latents."""
        return self._load_once("vae", lambda: self.part("vae"))

    def image_encoder(self) -> tuple[Any, Any]:
        """Return the processor of conditioning images, and the network in float32."""
        processor, encoder = self._load_once(IMAGE_ENCODER, self._load_image_encoder)
        return processor, encoder

    def _load_image_encoder(self) -> tuple[Any, Any]:
        parts = self.image_encoder_parts
        assert parts is not None
        encoder = load_model(
            getattr(transformers, parts.encoder_class),
            self.folder / IMAGE_ENCODER,
            torch.float32,
            self.device,
        )
        processor_class = getattr(transformers, parts.processor_class)
        processor = pretrained(processor_class, self.folder / parts.processor_folder)
        return processor, encoder

    def denoiser(
        self,
        expert: str | None = None,
        device: torch.device | None = None,
        fill: FillFn = None,
    ) -> nn.Module:
        """Load the transformer, frozen, with its ``weight_changes``; modules that
        diffusers keeps in float32 stay in it.

        Args:
            expert: name of the expert. None: the first.
            device: where the weights go. None: the run's device.
            fill: puts tensors in the place of the parameters instead of reading
                weights.
        """
        part = self.spec.part_of(expert)
        net = load_model(
            getattr(diffusers, self.transformer_class),
            self.folder / part,
            self.dtype,
            self.device,
            packed=self.weights.transformer,
            matmul=self.weights.matmul,
            blocks=self.spec.blocks,
            stay=device,
            fill=fill,
            changes=self.weight_changes.get(part),
        )
        if self.device.type == "cpu" and fill is None:
            cpu_threads.fit_to_model(sum(each.numel() for each in net.parameters()))
        return net

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """Build the transformer on the meta device. None: the first expert's.

        Raises VideotuneError if its config describes one without blocks.
        """
        part = self.spec.part_of(expert)
        net = self.part_skeleton(part)
        # Connectors that the step runs have lists of their own, and are no part of it yet.
        modules = dict(net.named_modules())
        block_lists = [
            modules[path] for path in self.spec.block_lists if path in modules
        ]
        if not any(list(blocks.children()) for blocks in block_lists):
            raise VideotuneError(
                f"{self.folder / part / 'config.json'} describes a network without blocks. "
                "Fetch the model again"
            )
        return net

    def part_skeleton(self, part: str) -> nn.Module:
        """Build a network with an adapter on the meta device, as its folder holds it."""
        cls = getattr(diffusers, self.transformer_class)
        return on_meta(cls, self.folder / part)

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of text encoders, VAE and denoisers, for the caches and the
        journal.
        """
        text_prints = []
        for part in self.text_encoders:
            text_prints.append(fingerprint(self.folder / part))
            text_prints.append(fingerprint(self.folder / tokenizer_of(part)))
        text_prints.append(self.weights.of_text(self.text_dtype))

        prints = {"text_encoder": "-".join(text_prints)}
        prints["vae"] = fingerprint(self.folder / "vae")
        if self.spec.reads_sound:
            prints["audio_vae"] = fingerprint(self.folder / "audio_vae")
        for expert in self.spec.experts:
            part = self.spec.part_of(expert.name)
            prints[part] = fingerprint(self.folder / part)
            if part in self.weight_changes:
                prints[part] += f"+{self.weight_changes[part].digest}"
        return prints

    def pipeline_class(self) -> Any:
        """Return the diffusers pipeline that samples."""
        return getattr(
            diffusers, self.pipelines[self.spec.image_conditioning == "concat"]
        )

    def lora_reader(self) -> Any:
        """Return the class of diffusers that reads LoRA files into the transformer."""
        return self.pipeline_class()

    def class_of_text(self, part: str) -> str:
        """Return the name of a text encoder's class in transformers."""
        return self.text_encoders[part]

    def _text_class(self, part: str) -> Any:
        return getattr(transformers, self.class_of_text(part))

    def _text_encoder(self, part: str, fill: FillFn = None) -> nn.Module:
        return load_model(
            self._text_class(part),
            self.folder / part,
            self.text_dtype,
            self.device,
            packed=self.weights.text_encoder,
            fill=fill,
            stream=self.stream_text,
        )

    def text_pipeline(self) -> Any:
        """Return a diffusers pipeline of only tokenizers and text encoders."""
        return self._load_once("text_encoder", self._load_text)

    def _load_text(self) -> Any:
        tokenizers = dict(self.tokenizers())
        for part in self.fixed_text_encoders:
            tokenizers[part] = self._read_tokenizer(part)

        parts: dict[str, Any] = {}
        for part in self.text_encoders:
            encoder: Any = self._text_encoder(part)
            parts[part] = encoder
            parts[tokenizer_of(part)] = tokenizers[part]
            if not self.class_of_text(part).startswith("CLIP"):
                continue
            # With the old end mark, the token with the highest number counts as a
            # caption's end, which may be a new token. For other captions both rules
            # find the same position.
            for module in encoder.modules():
                if getattr(module, "eos_token_id", None) == OLD_CLIP_END:
                    module.eos_token_id = tokenizers[part].eos_token_id
        return bare_pipeline(self.text_pipeline_class(), **parts)

    def text_pipeline_class(self) -> Any:
        """Return the class of the diffusers pipeline that reads captions."""
        return self.pipeline_class()

    @property
    def trainable_text_encoders(self) -> tuple[str, ...]:
        """Folders of the text encoders that may train and get new tokens."""
        return tuple(
            part for part in self.text_encoders if part not in self.fixed_text_encoders
        )

    def text_parts(self) -> Mapping[str, TextPart]:
        """Return the text encoders that may train with their tokenizers, by the
        encoders' folders.

        Changes to them (added rows, trained weights) apply to everything that is
        encoded until they are freed.
        """
        pipe = self.text_pipeline()
        return {
            part: TextPart(getattr(pipe, tokenizer_of(part)), getattr(pipe, part))
            for part in self.trainable_text_encoders
        }

    def tokenizers(self) -> Mapping[str, Any]:
        """Load a fresh tokenizer of each text encoder that may train, by the encoder's
        folder; no weights.
        """
        return {
            part: self._read_tokenizer(part) for part in self.trainable_text_encoders
        }

    def _read_tokenizer(self, part: str) -> Any:
        return read_tokenizer(self.folder / tokenizer_of(part), self.folder / part)

    def text_skeletons(self) -> Mapping[str, nn.Module]:
        """Build the text encoders that may train without weights, on the meta device,
        by their folders.
        """
        return {
            part: on_meta(self._text_class(part), self.folder / part)
            for part in self.trainable_text_encoders
        }


def tokenizer_of(part: str) -> str:
    """Return the folder of a text encoder's tokenizer."""
    return part.replace("text_encoder", "tokenizer")
