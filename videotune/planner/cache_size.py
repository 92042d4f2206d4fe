"""What a run encodes into its cache: entries, bytes and seconds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from videotune.job.job import Job
from videotune.latent_cache.cache_items import CacheItems
from videotune.latent_cache.clip_ends import latents_of_end
from videotune.latent_cache.conditions import (
    CHANNELS,
    ENCODED_ALONE,
    SOUND,
    SeparateCondition,
)
from videotune.latent_cache.keys import CacheKeys
from videotune.model_spec import ModelSpec
from videotune.planner.gpus import Card
from videotune.types import ClipShape, Window
from videotune.validation.callbacks import cache_items_of

FLOAT32_SHARE = 0.5
"""Rate of float32 convolutions (TF32) on a card, as a share of its bfloat16 rate."""


@dataclass(frozen=True)
class EncodedEntries:
    """Entries of the cache of one kind."""

    count: int
    bytes: int
    """Calculated bytes of their tensors."""
    pixels: int
    """Pixels of all frames that the autoencoder reads for them."""


@dataclass(frozen=True)
class CacheSize:
    """Everything that a run reads from its cache."""

    windows: EncodedEntries
    conditions: EncodedEntries
    """Conditions that are encoded on their own."""
    captions: int


def cache_size(job: Job) -> CacheSize:
    """Return what a run encodes. Samples with the same pixels are one entry."""
    items = cache_items_of(job)
    names = SampleNames(job)
    return CacheSize(
        _window_entries(items, names, job.spec),
        _condition_entries(items.conditions, names, job.spec),
        len(items.captions),
    )


class SampleNames:
    """Names of samples that are equal if their entries are. No weights are read."""

    def __init__(self, job: Job) -> None:
        self._keys = CacheKeys(
            vae="",
            text_encoder="",
            tokens=job.spec.text_tokens,
            seed=job.config.seed,
            image_noise=job.spec.image_noise,
        )
        self._names: dict[tuple[Window, int], str] = {}

    def of(self, window: Window, variant: int) -> str:
        """Return the name of a window's variant."""
        if (window, variant) not in self._names:
            sample = self._keys.frame_sample(window, variant)
            self._names[window, variant] = self._keys.latents_key(sample)
        return self._names[window, variant]


def _window_entries(
    items: CacheItems, names: SampleNames, spec: ModelSpec
) -> EncodedEntries:
    """Return the entries of windows."""
    shapes = {}
    for window, variant in items.samples:
        shapes[names.of(window, variant)] = window.shape

    # A video in the channels of the image is encoded beside the clip.
    passes = 2 if spec.image_channels[0] else 1
    return EncodedEntries(
        count=len(shapes),
        bytes=sum(4 * spec.cached_numbers(shape) for shape in shapes.values()),
        pixels=passes * sum(map(pixels_of, shapes.values())),
    )


def _condition_entries(
    conditions: Iterable[SeparateCondition], names: SampleNames, spec: ModelSpec
) -> EncodedEntries:
    """Return the entries of conditions. A drawn box belongs to a window's variant."""
    entries: dict[tuple[object, ...], SeparateCondition] = {}
    for sample in conditions:
        window = sample.window
        hidden: tuple[object, ...] = (
            window.companion("mask"),
            window.companion("reference"),
        )
        if sample.draws_box:
            hidden = (window.id, sample.variant, sample.box)
        # What it shows is compared without the window that it shows it of.
        content = (sample.type, sample.latent_frames, sample.on_channels)
        entries[names.of(window, sample.variant), hidden, content] = sample

    samples = list(entries.values())
    return EncodedEntries(
        count=len(samples),
        bytes=sum(condition_bytes(sample, spec) for sample in samples),
        pixels=sum(_condition_pixels(sample, spec) for sample in samples),
    )


def _condition_pixels(sample: SeparateCondition, spec: ModelSpec) -> int:
    """Return the pixels that are encoded of a condition."""
    if sample.type == SOUND:
        return 0
    shape = sample.window.shape
    if spec.is_appended(sample.type):
        latent_frames = sample.latent_frames
        if sample.type in ENCODED_ALONE:
            latent_frames = latents_of_end(sample.type, latent_frames, shape, spec)
        frames = (latent_frames - 1) * spec.rules.temporal_stride + 1
        shape = replace(shape, frames=frames)
    return pixels_of(shape)


def condition_bytes(sample: SeparateCondition, spec: ModelSpec) -> int:
    """Return the bytes of a condition's tensors, at 4 bytes a number."""
    shape = sample.window.shape
    if sample.type == SOUND:
        assert spec.sound is not None
        return 4 * spec.sound.channels * spec.sound.latents(shape)
    frames, rows, columns = spec.rules.latent_size(shape)
    cells_per_frame = rows * columns
    if sample.type == CHANNELS:
        channels = spec.control_channels or spec.image_channels[0]
        return 4 * (channels * frames * cells_per_frame + spec.image_numbers)
    if sample.type == "mask":
        # All latents in float32, and a byte for each cell: whether it is known.
        return frames * cells_per_frame * (4 * spec.latent_channels + 1)
    latent_frames = sample.latent_frames
    if sample.type in ENCODED_ALONE:
        latent_frames = latents_of_end(sample.type, latent_frames, shape, spec)
    return 4 * spec.latent_channels * latent_frames * cells_per_frame


def pixels_of(shape: ClipShape) -> int:
    """Return the pixels of all frames of a clip."""
    return shape.frames * shape.height * shape.width


def encoding_seconds(
    pixels: int, flops_per_pixel: float, card: Card, *, is_cpu: bool = False
) -> float:
    """Return the calculated seconds that the autoencoder needs; decoding of the files
    is not counted.

    Args:
        pixels: Pixels that it reads.
        flops_per_pixel: Its operations for each.
        card: The device.
        is_cpu: The device's rate is one of float32 already.
    """
    rate = card.reached * card.flops
    if not is_cpu:
        rate *= FLOAT32_SHARE
    return pixels * flops_per_pixel / rate
