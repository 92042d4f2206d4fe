"""Fill the cache: captions with the text encoder, then clips with the VAE, one model in
memory at a time.

Entries that exist are left as they are, so a killed run continues where it stopped.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from videotune.data.media_info import MediaInfo
from videotune.data.object_files import address_in_mirror
from videotune.data.sound import read_sound
from videotune.data.workers import Workers
from videotune.diffusion.regions import cell_shares
from videotune.errors import VideotuneError
from videotune.files import name_in_cache
from videotune.latent_cache.cache_items import CacheItems
from videotune.latent_cache.clip_ends import REFERENCE
from videotune.latent_cache.companion_reading import (
    read_companion,
    read_reference_picture,
    read_start_image,
)
from videotune.latent_cache.conditions import (
    KNOWN,
    LATENTS,
    SOUND,
    SeparateCondition,
    companion_sample,
    condition_key,
    encode_condition,
)
from videotune.latent_cache.decode_ahead import decode_ahead, frames_of
from videotune.latent_cache.encoder_failures import (
    check_finite,
    naming_caption,
    naming_window,
)
from videotune.latent_cache.entry_writer import EntryWriter
from videotune.latent_cache.fitting import WindowVariant
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.mask_reading import (
    MASK_TENSOR,
    mask_pixels,
    read_hidden_pixels,
)
from videotune.latent_cache.pixels import pixels_to_model, to_model
from videotune.latent_cache.stage_ahead import stage_ahead
from videotune.latent_cache.store import LatentCache
from videotune.model_spec import VideoRules
from videotune.models.base import DiffusersModel
from videotune.types import FrameSample, LatentDistribution

ProgressFn = Callable[[str, int, int], None]
"""Called with what is being encoded and how fast, how many are done, and how many there
are.
"""

LESS_MEMORY = "Fewer frames or a lower resolution need less memory."


def encode_missing(
    family: DiffusersModel,
    store: LatentCache,
    todo: CacheItems,
    media: Mapping[str, MediaInfo],
    seed: int,
    workers: Workers | None,
    progress: ProgressFn,
    lock_is_held: bool = False,
) -> float:
    """Encode what is missing. With a GPU, a thread writes each entry while the next one is
    encoded.

    Args:
        family: the base model.
        store: the cache.
        todo: what to encode.
        media: facts of the clips, by id.
        seed: the run's seed.
        workers: decode frames ahead; None decodes them in this process.
        progress: called after each caption, window, condition and mask.
        lock_is_held: the caller, or another process for this one, holds the folder's lock.

    Returns:
        The seconds for which the VAE waited for frames.

    Raises:
        VideotuneError: if a clip cannot be decoded or encoded, or if another process
            fills the same cache.
    """
    keys = CacheKeys.of(family, seed)
    lock = nullcontext() if lock_is_held else store.write_lock()
    with lock, EntryWriter(store, family.device) as writer:
        _encode_captions(family, writer, keys, todo.captions, progress)
        try:
            waited = _encode_windows(
                family, writer, keys, todo.samples, media, workers, progress
            )
            _encode_conditions(family, writer, keys, todo.conditions, media, progress)
        finally:
            family.free("vae")

        rules = family.spec.rules
        waited += _write_masks(
            writer, keys, rules, todo.masks, media, workers, progress
        )
        return waited


def _encode_captions(
    family: DiffusersModel,
    writer: EntryWriter,
    keys: CacheKeys,
    captions: Sequence[str],
    progress: ProgressFn,
) -> None:
    """Encode the captions that are still missing: a second try, after memory ran out, goes
    on where the first one ended, and another process may have encoded some.
    """
    remaining: list[tuple[str, str]] = []
    for caption in captions:
        key = keys.text_key(caption)
        if not writer.store.has("text", key):
            remaining.append((caption, key))

    begun = time.monotonic()
    try:
        for done, (caption, key) in enumerate(remaining, start=1):
            with naming_caption(caption):
                length = family.text_length(caption)  # may load the encoder
                states = check_finite(family.encode_text([caption])[0])

            metadata = {
                "caption": caption,
                "length": length,
                "cut": max(0, length - keys.tokens),
                "encoder": keys.text_encoder,
            }
            writer.put("text", key, states, metadata)
            progress(_with_rate("captions", done, begun), done, len(remaining))
    finally:
        family.free("text_encoder")


def _encode_windows(
    family: DiffusersModel,
    writer: EntryWriter,
    keys: CacheKeys,
    samples: Sequence[WindowVariant],
    media: Mapping[str, MediaInfo],
    workers: Workers | None,
    progress: ProgressFn,
) -> float:
    """Encode the samples that no other process has encoded in the meantime; return the
    seconds waited for frames.
    """
    remaining = []
    for window, variant in samples:
        key = keys.latents_key(keys.frame_sample(window, variant))
        if not writer.store.has("latents", key):
            remaining.append((window, variant))

    begun = time.monotonic()
    waited = 0.0
    # Made one at a time: all frame samples together would take much memory.
    frame_samples = (
        keys.frame_sample(window, variant) for window, variant in remaining
    )
    decoded = _decode(frame_samples, media, workers)
    with closing(stage_ahead(decoded, family.device)) as staged:
        for done, (sample, frames, wait) in enumerate(staged, start=1):
            clip = media[sample.window.clip_id]
            latents = _encode_frames(family, keys, sample, frames, media)
            metadata = {
                "clip": _clip_name(writer.store, clip),
                "window": sample.window.id,
                "variant": sample.variant,
                "encoder": keys.vae,
            }
            key = keys.latents_key(sample)
            writer.put("latents", key, tensors_of(latents), metadata)

            waited += wait
            progress(_with_rate("windows", done, begun), done, len(remaining))
    return waited


def _write_masks(
    writer: EntryWriter,
    keys: CacheKeys,
    rules: VideoRules,
    samples: Sequence[WindowVariant],
    media: Mapping[str, MediaInfo],
    workers: Workers | None,
    progress: ProgressFn,
) -> float:
    """Write the loss masks of samples; return the seconds waited for frames."""
    remaining: list[tuple[str, FrameSample]] = []
    for window, variant in samples:
        sample = keys.frame_sample(window, variant)
        key = keys.mask_key(sample)
        if key is not None and not writer.store.has("masks", key):
            mask = companion_sample(sample, "loss_mask", media)
            remaining.append((key, mask))

    begun = time.monotonic()
    waited = 0.0
    decoded = _decode((mask for _, mask in remaining), media, workers)
    pairs = zip(remaining, decoded, strict=True)
    for done, ((key, _), (sample, frames, wait)) in enumerate(pairs, start=1):
        metadata = {
            "clip": _clip_name(writer.store, media[sample.window.clip_id]),
            "window": sample.window.id,
            "variant": sample.variant,
        }
        covered_shares = cell_shares(mask_pixels(frames), rules)
        writer.put("masks", key, {MASK_TENSOR: covered_shares}, metadata)

        waited += wait
        progress(_with_rate("masks", done, begun), done, len(remaining))
    return waited


def _encode_conditions(
    family: DiffusersModel,
    writer: EntryWriter,
    keys: CacheKeys,
    conditions: Sequence[SeparateCondition],
    media: Mapping[str, MediaInfo],
    progress: ProgressFn,
) -> None:
    """Encode the conditions that no other process has encoded in the meantime."""
    begun = time.monotonic()
    for done, condition in enumerate(conditions, start=1):
        key = condition_key(keys, condition)
        if not writer.store.has("conditions", key):
            tensors = encode_condition_sample(family, keys, condition, media)
            if KNOWN in tensors and len(tensors[KNOWN].unique()) == 1:
                writer.store.masks_without_effect += 1
            metadata = {
                "clip": _clip_name(writer.store, media[condition.window.clip_id]),
                "window": f"{condition.window.id} {condition.text}",
                "variant": condition.variant,
                "encoder": keys.vae,
            }
            writer.put("conditions", key, tensors, metadata)
        progress(_with_rate("conditions", done, begun), done, len(conditions))


def _clip_name(store: LatentCache, clip: MediaInfo) -> str:
    """Return a file's name in the cache, which any JSON can hold even if its bytes are
    not UTF-8.
    """
    mirrored = address_in_mirror(clip.path)
    name = mirrored or name_in_cache(store.folder, Path(clip.path))
    return os.fsencode(name).decode("utf-8", "replace")


def encode_condition_sample(
    family: DiffusersModel,
    keys: CacheKeys,
    condition: SeparateCondition,
    media: Mapping[str, MediaInfo],
) -> dict[str, Tensor]:
    """Decode a clip and encode one of its conditions now, in this process.

    Raises VideotuneError that names the clip.
    """
    sample = keys.frame_sample(condition.window, condition.variant)
    clip = media[condition.window.clip_id]
    subject = f"{clip.path}: window {condition.window.id}: {condition.text}"
    with naming_window(subject, LESS_MEMORY):
        if condition.type == SOUND:
            tensors = _encode_sound(family, sample, media)
        elif condition.type == REFERENCE:
            tensors = _encode_reference(family, condition, sample, media)
        else:
            tensors = _encode_shown(family, keys, condition, sample, media)
        return check_finite(tensors)


def _encode_shown(
    family: DiffusersModel,
    keys: CacheKeys,
    condition: SeparateCondition,
    sample: FrameSample,
    media: Mapping[str, MediaInfo],
) -> dict[str, Tensor]:
    """Decode and encode what a condition shows of the clip itself."""
    clip = media[condition.window.clip_id]
    frames = to_model(frames_of([sample], clip, None))
    start_image = read_start_image(sample, media)
    types_on_channels = {name for name, _ in condition.on_channels}
    # A prefix shows the clip's own first frames, so a start image has no place there.
    shows_first_frame = (
        "first_frame" in types_on_channels and "prefix" not in types_on_channels
    )
    if start_image is not None and shows_first_frame:
        frames = torch.cat([start_image, frames[:, 1:]], dim=1)

    hidden = read_hidden_pixels(condition, sample, keys.seed, media)
    control = None
    if "control" in types_on_channels:
        control = read_companion("control", sample, len(sample.times), media)
    return encode_condition(family, frames, condition, hidden, control)


def _encode_reference(
    family: DiffusersModel,
    condition: SeparateCondition,
    sample: FrameSample,
    media: Mapping[str, MediaInfo],
) -> dict[str, Tensor]:
    """Decode and encode the first latent frames of a sample's reference. An image stands
    for each of them, or is fitted into the picture.
    """
    if family.spec.has_reference_image:
        image = read_reference_picture(sample, media)
        return {LATENTS: family.encode_reference_image(image, sample.window.shape)}

    stride = family.spec.rules.temporal_stride
    count = (condition.latent_frames - 1) * stride + 1
    frames = read_companion(REFERENCE, sample, count, media)
    return {LATENTS: family.encode_video(frames).mean}


def _encode_sound(
    family: DiffusersModel, sample: FrameSample, media: Mapping[str, MediaInfo]
) -> dict[str, Tensor]:
    """Decode and encode the sound of a sample."""
    clip = media[sample.window.clip_id]
    shape = sample.window.shape
    assert family.spec.sound is not None
    waveform = read_sound(
        clip, sample.times[0], shape.frames / shape.fps, family.spec.sound.sample_rate
    )
    return {LATENTS: family.encode_sound(torch.from_numpy(waveform), shape)}


def encode_sample(
    family: DiffusersModel,
    keys: CacheKeys,
    sample: FrameSample,
    media: Mapping[str, MediaInfo],
) -> LatentDistribution:
    """Decode and encode a sample now, in this process.

    Raises VideotuneError that names the clip.
    """
    clip = media[sample.window.clip_id]
    frames = frames_of([sample], clip, None)
    return _encode_frames(family, keys, sample, torch.from_numpy(frames), media)


def _encode_frames(
    family: DiffusersModel,
    keys: CacheKeys,
    sample: FrameSample,
    frames: Tensor,
    media: Mapping[str, MediaInfo],
) -> LatentDistribution:
    """Encode the decoded frames of a sample, uint8 (T,H,W,3) on the host, and its start
    image if it has one.
    """
    arguments: dict[str, Any] = {}
    noise = keys.noise_generator(sample)
    if noise is not None:
        arguments["random"] = noise

    clip = media[sample.window.clip_id]
    subject = f"{clip.path}: window {sample.window.id}"
    with naming_window(subject, LESS_MEMORY):
        start_image = read_start_image(sample, media)
        if start_image is not None:
            arguments["start_image"] = start_image

        # The family's ``image_states`` and start images combine pixels on the CPU, so the
        # frames stay there. ``encode_video`` moves the result to the device.
        on_channels = family.spec.image_conditioning == "concat"
        stays_on_host = on_channels or start_image is not None
        device = torch.device("cpu") if stays_on_host else family.device
        # With no cached variants, a thread encodes samples of the next steps while previews
        # are decoded, by the same VAE.
        with family.vae_lock:
            pixels = pixels_to_model(frames, device)
            distribution = family.encode_video(pixels, **arguments)
            check_finite(tensors_of(distribution))
        return distribution


def tensors_of(distribution: LatentDistribution) -> dict[str, Tensor]:
    """Return the tensors of a cache entry: the latent distribution, and the other states
    that were encoded from the same pixels.
    """
    tensors = {"mean": distribution.mean}
    if distribution.logvar is not None:
        tensors["logvar"] = distribution.logvar
    if distribution.start is not None:
        tensors["start"] = distribution.start
    assert not tensors.keys() & distribution.extras.keys(), (
        "an extra has the name of a latent"
    )
    return tensors | dict(distribution.extras)


def _with_rate(subject: str, done: int, begun: float) -> str:
    """Return e.g. "captions, 3.1 a second"."""
    seconds = time.monotonic() - begun
    if not done or seconds <= 0:
        return subject
    return f"{subject}, {done / seconds:.1f} a second"


def _decode(
    frame_samples: Iterator[FrameSample],
    media: Mapping[str, MediaInfo],
    workers: Workers | None,
) -> Generator[tuple[FrameSample, np.ndarray, float], None, None]:
    """Yield what ``decode_ahead`` does.

    Raises VideotuneError if memory runs out.
    """
    with closing(decode_ahead(frame_samples, media, workers)) as decoded:
        while True:
            try:
                item = next(decoded, None)
            except MemoryError as error:
                raise VideotuneError(
                    "there is not enough memory to decode a clip. "
                    "Set fewer frames or a smaller resolution"
                ) from error
            if item is None:
                return
            yield item


def cut_captions(
    store: LatentCache, keys: CacheKeys, captions: Sequence[str]
) -> list[str]:
    """Return the captions that are longer than the model reads."""
    too_long = []
    for caption in captions:
        entry = store.entry("text", keys.text_key(caption))
        if entry is not None and entry.about.get("cut"):
            too_long.append(caption)
    return too_long
