"""Filling the cache: captions by the text encoder, then clips by the VAE; one model in memory at a time, then freed.

What is there already is left alone, so a killed run goes on where it was.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_index import SLOWEST_DECODER
from videotune.data.media_info import MediaInfo
from videotune.data.workers import DecoderCrash, Workers
from videotune.errors import VideotuneError
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import CacheEntry, EntryName, LatentCache, form_of
from videotune.types import ClipShape, Family, FrameSample, LatentDistribution, Window

ProgressFn = Callable[[str, int, int], None]
"""Called with what is being encoded and how fast, how many are done, and how many there are."""

Fits = Callable[[CacheEntry, ClipShape | None], bool]

AHEAD_BYTES = 512 * 2**20
"""Frames that may be decoded and wait for the encoder; one group of samples may always."""

GROUP_BYTES = 96 * 2**20
"""Frames that are decoded in one pass."""


@dataclass(frozen=True)
class CacheItems:
    """Captions and samples, (window, variant) pairs: what is read from a cache, or what is not in it yet."""

    captions: tuple[str, ...]
    samples: tuple[tuple[Window, int], ...]

    def __bool__(self) -> bool:
        return bool(self.captions or self.samples)


def entries_of(keys: CacheKeys, items: CacheItems) -> dict[EntryName, str | tuple[Window, int]]:
    """The names of all entries that these are read from, each with the first caption or sample that asks for it."""
    found: dict[EntryName, str | tuple[Window, int]] = {
        ("text", keys.text(text)): text for text in items.captions
    }
    for pair in items.samples:
        found.setdefault(("latents", keys.latents(keys.sample(*pair))), pair)
    return found


def missing(
    store: LatentCache,
    keys: CacheKeys,
    items: CacheItems,
    fits: Fits = lambda entry, shape: True,
) -> CacheItems:
    """Which captions and samples have no entry, in order; each entry once, whatever asks for it.

    An entry that is not ``fits`` to stand for its window or caption counts as missing; so does one that is damaged, among
    those that stay in memory and are therefore read now.
    """
    found = entries_of(keys, items)
    store.examine(
        {name: None if isinstance(one, str) else one[0].shape for name, one in found.items()},
        fits,
    )
    lacking = [one for name, one in found.items() if not store.has(*name)]
    captions = tuple(one for one in lacking if isinstance(one, str))
    return CacheItems(captions, tuple(one for one in lacking if not isinstance(one, str)))


def fits_of(family: Family, some: ClipShape) -> Fits:
    """Whether an entry, as it says of itself, can be what this family made of a window of this shape, or of a caption
    (None): its tensors have the family's names, dtypes and sizes. ``some`` shape will do for captions. A dataset may bring a
    cache that others made."""
    spec = family.spec

    @cache
    def form(shape: ClipShape) -> dict[str, tuple[str, tuple[int, ...]]]:
        return form_of(family.blank_states(shape))

    def fits(entry: CacheEntry, shape: ClipShape | None) -> bool:
        own = dict(entry.tensors)
        whole = form(shape or some)
        if shape is not None:
            size = (spec.latent_channels, *spec.rules.latent_size(shape))
            moments = ("mean", "logvar") if spec.keeps_variance else ("mean",)
            if any(own.pop(name, None) != ("float32", size) for name in moments):
                return False
        elif "text" not in own:
            return False
        return all(name in whole and _is_of_form(whole[name], one) for name, one in own.items())

    return fits


def _is_of_form(whole: tuple[str, tuple[int, ...]], one: tuple[str, tuple[int, ...]]) -> bool:
    """Whether (dtype, shape) is that of the whole one, or of a shorter caption's: fewer rows, as wide."""
    (dtype, size) = whole
    (own, rows) = one
    short = all(a <= b for a, b in zip(rows, size, strict=False))
    return (
        own == dtype
        and len(rows) == len(size)
        and short
        and (len(rows) < 2 or rows[-1] == size[-1])
    )


def fill(
    family: Family,
    store: LatentCache,
    todo: CacheItems,
    media: Mapping[str, MediaInfo],
    seed: int,
    workers: Workers | None,
    progress: ProgressFn,
    helps: bool = False,
) -> float:
    """Encode what is missing, with frames decoded ahead by ``workers`` (None: by this process, in turn).

    Returns the seconds for which the VAE waited for frames.

    Each entry is on the disk when the next one begins. ``helps``: another process holds the folder's lock for this one.
    Raises VideotuneError that names the clip where one cannot be decoded or encoded, and where another process fills the
    same cache.
    """
    keys = CacheKeys.of(family, seed)
    with nullcontext() if helps else store.filling():
        _fill_captions(family, store, keys, todo.captions, progress)
        left = [
            pair
            for pair in todo.samples
            if not store.has("latents", keys.latents(keys.sample(*pair)))
        ]
        begun = time.monotonic()
        waited = 0.0
        try:
            lazily = (keys.sample(*pair) for pair in left)  # all of them would take much memory
            for done, (sample, frames, wait) in enumerate(_decoded(lazily, media, workers), 1):
                clip = media[sample.window.clip_id]
                window = sample.window
                tensors = tensors_of(_encoded(family, keys, sample, frames, clip))
                # a path that any JSON can hold, also where its bytes are no UTF-8
                path = os.fsencode(clip.path).decode("utf-8", "replace")
                about = {"clip": path, "window": window.id, "variant": sample.variant}
                store.put(
                    "latents", keys.latents(sample), tensors, about | {"encoder": keys.vae}
                )
                waited += wait
                progress(_rate("windows", done, begun), done, len(left))
        finally:
            family.free("vae")
        return waited


def shard_work(todo: CacheItems, part: int, of: int) -> CacheItems:
    """What one of several processes encodes of it: every so-manieth caption, and whole clips, nearly as many pixels each.

    Samples of one clip stay together, since they are decoded in one pass.
    """
    clips: dict[str, list[tuple[Window, int]]] = {}
    for pair in todo.samples:
        clips.setdefault(pair[0].clip_id, []).append(pair)
    loads = [0] * of
    own = []
    for pairs in sorted(clips.values(), key=_pixels, reverse=True):
        least = loads.index(min(loads))
        loads[least] += _pixels(pairs)
        if least == part:
            own += pairs
    return CacheItems(todo.captions[part::of], tuple(own))


def _pixels(pairs: Iterable[tuple[Window, int]]) -> int:
    return sum(
        window.shape.frames * window.shape.height * window.shape.width for window, _ in pairs
    )


def _fill_captions(
    family: Family,
    store: LatentCache,
    keys: CacheKeys,
    captions: Sequence[str],
    progress: ProgressFn,
) -> None:
    """Encode those that no other process has made since ``missing`` looked."""
    left = [(text, key) for text in captions if not store.has("text", key := keys.text(text))]
    begun = time.monotonic()
    try:
        for done, (caption, key) in enumerate(left, 1):
            length = family.text_length(caption)
            cut = max(0, length - keys.tokens)
            about = {
                "caption": caption,
                "length": length,
                "cut": cut,
                "encoder": keys.text_encoder,
            }
            with _named(f"the caption {caption[:60]!r}", "Shorten it, or free memory."):
                states = _finite(family.encode_text([caption])[0])
            store.put("text", key, states, about)
            progress(_rate("captions", done, begun), done, len(left))
    finally:
        family.free("text_encoder")


def encode_sample(
    family: Family, keys: CacheKeys, sample: FrameSample, media: Mapping[str, MediaInfo]
) -> LatentDistribution:
    """A sample's latents, decoded in this process and encoded now.

    Raises VideotuneError that names the clip.
    """
    clip = media[sample.window.clip_id]
    return _encoded(family, keys, sample, _frames_of([sample], clip, None), clip)


def _encoded(
    family: Family, keys: CacheKeys, sample: FrameSample, frames: np.ndarray, clip: MediaInfo
) -> LatentDistribution:
    noise = keys.noise(sample)
    with _named(
        f"{clip.path}: window {sample.window.id}",
        "Fewer frames or a lower resolution need less memory.",
    ):
        pixels = to_model(frames)
        moments = (
            family.encode_video(pixels) if noise is None else family.encode_video(pixels, noise)
        )
        _finite(tensors_of(moments))
    return moments


def tensors_of(moments: LatentDistribution) -> dict[str, Tensor]:
    """What an entry of the cache holds of a sample: its moments, and beside them what else its pixels tell."""
    own = {"mean": moments.mean} | (
        {} if moments.logvar is None else {"logvar": moments.logvar}
    )
    assert not own.keys() & moments.extras.keys(), "an extra is named as the moments are"
    return own | dict(moments.extras)


def _rate(what: str, made: int, begun: float) -> str:
    seconds = time.monotonic() - begun
    return f"{what}, {made / seconds:.1f} a second" if made and seconds > 0 else what


@contextmanager
def _named(what: str, remedy: str) -> Iterator[None]:
    """An encoder's failure becomes a sentence that says on what it failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in str(
            error
        )
        reason = (
            f"there is not enough memory to encode it. {remedy}"
            if short
            else f"it cannot be encoded: {error}"
        )
        raise VideotuneError(f"{what}: {reason}\nWhat was encoded before is kept.") from error


def _finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; RuntimeError where a number is none."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RuntimeError(f"the encoder's {name} holds infinite or undefined numbers")
    return tensors


def cut_captions(store: LatentCache, keys: CacheKeys, captions: Sequence[str]) -> list[str]:
    """The captions that are longer than the model reads."""
    found = ((text, store.entry("text", keys.text(text))) for text in captions)
    return [text for text, entry in found if entry is not None and entry.about.get("cut")]


def to_model(frames: np.ndarray) -> Tensor:
    """uint8 (T,H,W,3) -> float32 (3,T,H,W) in [-1, 1]."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float().div_(127.5).sub_(1.0)


def decode_arguments(group: Sequence[FrameSample], media: MediaInfo) -> dict[str, Any]:
    """Arguments of a worker's task "decode" for samples that share a picture."""
    first = group[0]
    times = tuple(time for sample in group for time in sample.times)
    size = {"height": first.window.shape.height, "width": first.window.shape.width}
    return {
        "info": media,
        "times": times,
        **size,
        "resize": first.window.resize,
        "crop_position": first.place,
    }


def _decoded(
    samples: Iterable[FrameSample], media: Mapping[str, MediaInfo], workers: Workers | None
) -> Iterator[tuple[FrameSample, np.ndarray, float]]:
    """Each take, in order, its frames, and the seconds waited for them; workers decode ahead, within AHEAD_BYTES.

    Samples of one clip are decoded together, in one pass over the file: clips of a few seconds mostly have one keyframe, and
    each window by itself would decode all that comes before it.
    """
    ahead: deque[tuple[list[FrameSample], MediaInfo, Future[Any] | None]] = deque()
    most = 4 * workers.count if workers else 1
    held = 0
    try:
        for following in chain(
            _groups(samples), [[]]
        ):  # what comes last is nothing, for which all others are waited
            while ahead and (
                not following
                or len(ahead) >= most
                or held + _frame_bytes(following) > AHEAD_BYTES
            ):
                group, clip, future = ahead.popleft()
                begun = time.monotonic()
                frames = _frames_of(group, clip, future)
                waited = time.monotonic() - begun
                for sample in group:
                    yield sample, frames[: len(sample.times)], waited
                    frames = frames[len(sample.times) :]
                    waited = 0.0
                held -= _frame_bytes(group)
                del future, frames  # before more are asked for
            if following:
                clip = media[following[0].window.clip_id]
                last = max(max(sample.times) for sample in following)
                asked = decode_arguments(following, clip)
                coming = (
                    workers.submit("decode", asked, workers.limit + SLOWEST_DECODER * last)
                    if workers
                    else None
                )
                ahead.append((following, clip, coming))
                held += _frame_bytes(following)
    finally:
        for *_, future in ahead:
            if future is not None:
                future.cancel()


def _groups(samples: Iterable[FrameSample]) -> Iterator[list[FrameSample]]:
    """Neighbouring samples of one clip that are cropped alike, together within GROUP_BYTES; one take may always."""
    group: list[FrameSample] = []
    for sample in samples:
        if group and (
            _picture(group[0]) != _picture(sample)
            or _frame_bytes([*group, sample]) > GROUP_BYTES
        ):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _picture(sample: FrameSample) -> tuple[Any, ...]:
    """What the frames of two samples must share to be decoded together."""
    window = sample.window
    return window.clip_id, window.shape.height, window.shape.width, window.resize, sample.place


def _frames_of(
    group: Sequence[FrameSample], clip: MediaInfo, future: Future[Any] | None
) -> np.ndarray:
    """The frames of all samples of a group, uint8 (T,H,W,3), one take after the other; None: decoded now, here.

    Raises VideotuneError that names the clip.
    """
    try:
        return decode(**decode_arguments(group, clip)) if future is None else future.result()
    except ClipProblem as problem:
        remedy = "Its frames were counted but cannot be decoded: the file is damaged. Repair it or take it out."
        if isinstance(problem, DecoderCrash):
            remedy = "It may go well next time: start again. If it does not, take the clip out of the dataset."
        raise VideotuneError(
            f"{clip.path}: {problem}\n{remedy} What was encoded before is kept."
        ) from problem


def _frame_bytes(group: Sequence[FrameSample]) -> int:
    return 3 * _pixels((sample.window, sample.variant) for sample in group)
