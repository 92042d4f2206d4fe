"""Filling the cache: captions by the text encoder, then clips by the VAE; one model in memory at a time, then freed.

What is there already is left alone, so a killed run goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_index import SLOWEST_DECODER
from videotune.data.media_info import MediaInfo
from videotune.data.workers import DecoderCrash
from videotune.errors import VideotuneError
from videotune.latent_cache.entry import Entry, Name
from videotune.latent_cache.keys import noise_of, sample_key, sample_of, tensors_of, text_key
from videotune.latent_cache.store import Store
from videotune.types import ClipShape, Family, Moments, Take, Window

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from videotune.data.workers import Workers

Progress = Callable[[str, int, int], None]
"""Called with what is being encoded and how fast, how many are done, and how many there are."""

Fits = Callable[[Entry, ClipShape | None], bool]

AHEAD_BYTES = 512 * 2**20
"""Frames that may be decoded and wait for the encoder; one group of takes may always."""

GROUP_BYTES = 96 * 2**20
"""Frames that are decoded in one pass."""


@dataclass(frozen=True)
class Todo:
    """What is not in the cache yet: captions, and takes as (window, variant)."""

    captions: tuple[str, ...]
    takes: tuple[tuple[Window, int], ...]

    def __bool__(self) -> bool:
        return bool(self.captions or self.takes)


@dataclass(frozen=True)
class FillReport:
    """How many captions and takes were encoded, in how many seconds, and for how many of these the VAE had no frames."""

    captions: int
    takes: int
    seconds: float
    waited: float


def missing(
    store: Store,
    prints: Mapping[str, str],
    tokens: int,
    captions: Iterable[str],
    takes: Iterable[tuple[Window, int]],
    seed: int,
    image_noise: bool = False,
    fits: Fits = lambda entry, shape: True,
) -> Todo:
    """Which captions and takes have no entry, in order; each entry once, whatever asks for it.

    An entry that is not ``fits`` to stand for its window or caption counts as missing; so does one that is damaged, among
    those that stay in memory and are therefore read now.
    """
    texts: dict[str, str] = {}
    views: dict[str, tuple[Window, int]] = {}
    for caption in captions:
        texts[text_key(caption, prints["text_encoder"], tokens)] = caption
    for window, variant in takes:
        shown = sample_of(window, variant, seed, image_noise)
        views.setdefault(sample_key(shown, prints["vae"], seed, image_noise), (window, variant))
    asked: dict[Name, ClipShape | None] = {("text", key): None for key in texts}
    store.examine(asked | {("latents", key): window.shape for key, (window, _) in views.items()}, fits)
    return Todo(
        tuple(text for key, text in texts.items() if not store.has("text", key)),
        tuple(pair for key, pair in views.items() if not store.has("latents", key)),
    )


def fits_of(family: Family, some: ClipShape) -> Fits:
    """Whether an entry, as it says of itself, can be what this family made of a window of this shape, or of a caption
    (None): its tensors have the family's names, dtypes and sizes. ``some`` shape will do for captions. A dataset may bring a
    cache that others made."""
    spec = family.spec

    @cache
    def form_of(shape: ClipShape) -> dict[str, tuple[str, tuple[int, ...]]]:
        blank = family.blank_states(shape)
        return {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in blank.items()}

    def fits(entry: Entry, shape: ClipShape | None) -> bool:
        own, form = dict(entry.tensors), form_of(shape or some)
        if shape is not None:
            size = (spec.latent_channels, *spec.rules.latent_size(shape))
            moments = ("mean", "logvar") if spec.keeps_variance else ("mean",)
            if any(own.pop(name, None) != ("float32", size) for name in moments):
                return False
        elif "text" not in own:
            return False
        return all(name in form and _is_of_form(form[name], one) for name, one in own.items())

    return fits


def _is_of_form(whole: tuple[str, tuple[int, ...]], one: tuple[str, tuple[int, ...]]) -> bool:
    """Whether (dtype, shape) is that of the whole one, or of a shorter caption's: fewer rows, as wide."""
    (dtype, size), (own, rows) = whole, one
    short = all(a <= b for a, b in zip(rows, size, strict=False))
    return own == dtype and len(rows) == len(size) and short and (len(rows) < 2 or rows[-1] == size[-1])


def wanted(
    prints: Mapping[str, str],
    tokens: int,
    captions: Iterable[str],
    takes: Iterable[tuple[Window, int]],
    seed: int,
    image_noise: bool = False,
) -> set[Name]:
    """The names of all entries that these captions and takes are read from."""
    texts = {("text", text_key(caption, prints["text_encoder"], tokens)) for caption in captions}
    views = (sample_of(window, variant, seed, image_noise) for window, variant in takes)
    return texts | {("latents", sample_key(shown, prints["vae"], seed, image_noise)) for shown in views}


def fill(
    family: Family,
    store: Store,
    todo: Todo,
    facts: Mapping[str, MediaInfo],
    seed: int,
    workers: Workers | None,
    progress: Progress,
    helps: bool = False,
) -> FillReport:
    """Encode what is missing, with frames decoded ahead by ``workers`` (None: by this process, in turn).

    Each entry is on the disk when the next one begins. ``helps``: another process holds the folder's lock for this one.
    Raises VideotuneError that names the clip where one cannot be
    decoded or encoded, and where another process fills the same cache.
    """
    begun = time.monotonic()
    with nullcontext() if helps else store.filling():
        captions = _fill_captions(family, store, todo.captions, progress)
        takes, waited = _fill_takes(family, store, todo.takes, facts, seed, workers, progress)
    return FillReport(captions, takes, time.monotonic() - begun, waited)


def dealt(todo: Todo, part: int, of: int) -> Todo:
    """What one of several processes encodes of it: every so-manieth caption, and whole clips, nearly as many pixels each.

    Takes of one clip stay together, since they are decoded in one pass.
    """
    clips: dict[str, list[tuple[Window, int]]] = {}
    for pair in todo.takes:
        clips.setdefault(pair[0].clip_id, []).append(pair)
    loads, own = [0] * of, []
    for pairs in sorted(clips.values(), key=_pixels, reverse=True):
        least = loads.index(min(loads))
        loads[least] += _pixels(pairs)
        if least == part:
            own += pairs
    return Todo(todo.captions[part::of], tuple(own))


def _pixels(pairs: Sequence[tuple[Window, int]]) -> int:
    return sum(window.shape.frames * window.shape.height * window.shape.width for window, _ in pairs)


def _fill_captions(family: Family, store: Store, captions: Sequence[str], progress: Progress) -> int:
    """How many were encoded; another process may have made some since ``missing`` looked."""
    encoder, tokens = family.fingerprints()["text_encoder"], family.spec.text_tokens
    left = [text for text in captions if not store.has("text", text_key(text, encoder, tokens))]
    begun = time.monotonic()
    try:
        for done, caption in enumerate(left, 1):
            length = family.text_length(caption)
            about = {"caption": caption, "length": length, "cut": max(0, length - tokens), "encoder": encoder}
            with _named(f"the caption {caption[:60]!r}", "Shorten it, or free memory."):
                states = _finite(family.encode_text([caption])[0])
            store.put("text", text_key(caption, encoder, tokens), states, about)
            progress(_rate("captions", done, begun), done, len(left))
    finally:
        family.free("text_encoder")
    return len(left)


def _fill_takes(
    family: Family,
    store: Store,
    takes: Sequence[tuple[Window, int]],
    facts: Mapping[str, MediaInfo],
    seed: int,
    workers: Workers | None,
    progress: Progress,
) -> tuple[int, float]:
    """How many were encoded, and the seconds for which the VAE waited for frames."""
    vae, waited = family.fingerprints()["vae"], 0.0
    noisy = family.spec.image_noise
    left = [
        pair for pair in takes if not store.has("latents", sample_key(sample_of(*pair, seed, noisy), vae, seed, noisy))
    ]
    views = (sample_of(*pair, seed, noisy) for pair in left)
    begun = time.monotonic()
    try:
        for done, (shown, frames, wait) in enumerate(_decoded(views, facts, workers), 1):
            clip, window = facts[shown.window.clip_id], shown.window
            tensors = tensors_of(_encoded(family, shown, frames, clip, seed))
            about = {"clip": _printable(clip.path), "window": window.id, "variant": shown.variant, "encoder": vae}
            store.put("latents", sample_key(shown, vae, seed, noisy), tensors, about)
            waited += wait
            progress(_rate("windows", done, begun), done, len(left))
    finally:
        family.free("vae")
    return len(left), waited


def encode_take(family: Family, shown: Take, facts: Mapping[str, MediaInfo], seed: int) -> Moments:
    """A take's latents, decoded in this process and encoded now.

    Raises VideotuneError that names the clip.
    """
    return _encoded(family, shown, frames_of(shown, facts), facts[shown.window.clip_id], seed)


def _encoded(family: Family, shown: Take, frames: np.ndarray, clip: MediaInfo, seed: int) -> Moments:
    noise = noise_of(shown, seed, family.spec.image_noise)
    with _named(f"{clip.path}: window {shown.window.id}", "Fewer frames or a lower resolution need less memory."):
        pixels = to_model(frames)
        moments = family.encode_video(pixels) if noise is None else family.encode_video(pixels, noise)
        _finite(tensors_of(moments))
    return moments


def _rate(what: str, made: int, begun: float) -> str:
    seconds = time.monotonic() - begun
    return f"{what}, {made / seconds:.1f} a second" if made and seconds > 0 else what


@contextmanager
def _named(what: str, remedy: str) -> Iterator[None]:
    """An encoder's failure becomes a sentence that says on what it failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in str(error)
        reason = f"there is not enough memory to encode it. {remedy}" if short else f"it cannot be encoded: {error}"
        raise VideotuneError(f"{what}: {reason}\nWhat was encoded before is kept.") from error


def _finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; RuntimeError where a number is none."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RuntimeError(f"the encoder's {name} holds infinite or undefined numbers")
    return tensors


def _printable(path: str) -> str:
    """A path that any JSON can hold, also where its bytes are no UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def cut_captions(store: Store, encoder: str, tokens: int, captions: Sequence[str]) -> list[str]:
    """The captions that are longer than the model reads."""
    return [
        text
        for text in captions
        if (entry := store.entry("text", text_key(text, encoder, tokens))) and entry.about.get("cut")
    ]


def to_model(frames: np.ndarray) -> Tensor:
    """uint8 (T,H,W,3) -> float32 (3,T,H,W) in [-1, 1]."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float().div_(127.5).sub_(1.0)


def decode_words(group: Sequence[Take], facts: MediaInfo) -> dict[str, Any]:
    """What the decoder is told of takes that share a picture: the words of a worker's task "decode"."""
    first, times = group[0], tuple(time for shown in group for time in shown.times)
    size = {"height": first.window.shape.height, "width": first.window.shape.width}
    return {"info": facts, "times": times, **size, "resize": first.window.resize, "place": first.place}


def frames_of(shown: Take, facts: Mapping[str, MediaInfo]) -> np.ndarray:
    """A take's frames, decoded in this process, uint8 (T,H,W,3).

    Raises VideotuneError that names the clip.
    """
    return _frames_to_come([shown], facts, None)


@contextmanager
def _clip_named(clip: MediaInfo) -> Iterator[None]:
    try:
        yield
    except ClipProblem as problem:
        remedy = "Its frames were counted but cannot be decoded: the file is damaged. Repair it or take it out."
        if isinstance(problem, DecoderCrash):
            remedy = "It may go well next time: start again. If it does not, take the clip out of the dataset."
        raise VideotuneError(
            f"{clip.path}: {problem.reason}: {problem.detail}\n{remedy} What was encoded before is kept."
        ) from problem


def _decoded(
    takes: Iterable[Take], facts: Mapping[str, MediaInfo], workers: Workers | None
) -> Iterator[tuple[Take, np.ndarray, float]]:
    """Each take, in order, its frames, and the seconds waited for them; workers decode ahead, within AHEAD_BYTES.

    Takes of one clip are decoded together, in one pass over the file: clips of a few seconds mostly have one keyframe, and
    each window by itself would decode all that comes before it.
    """
    rest, held = _groups(takes), 0
    ahead: deque[tuple[list[Take], Future[Any]]] = deque()
    following = next(rest, None)
    try:
        while ahead or following is not None:
            while following is not None and (not ahead or _room(held, len(ahead), following, workers)):
                ahead.append((following, _asked(following, facts[following[0].window.clip_id], workers)))
                held += _frame_bytes(following)
                following = next(rest, None)
            group, future = ahead.popleft()
            begun = time.monotonic()
            frames = _frames_to_come(group, facts, future if workers else None)
            waited = time.monotonic() - begun
            for shown in group:
                yield shown, frames[: len(shown.times)], waited
                frames, waited = frames[len(shown.times) :], 0.0
            held -= _frame_bytes(group)
            del future, frames  # before more are asked for
    finally:
        for _, future in ahead:
            future.cancel()


def _groups(takes: Iterable[Take]) -> Iterator[list[Take]]:
    """Neighbouring takes of one clip that are cropped alike, together within GROUP_BYTES; one take may always."""
    group: list[Take] = []
    for shown in takes:
        alike = group and _picture(group[0]) == _picture(shown)
        if group and not (alike and _frame_bytes([*group, shown]) <= GROUP_BYTES):
            yield group
            group = []
        group.append(shown)
    if group:
        yield group


def _picture(shown: Take) -> tuple[Any, ...]:
    """What the frames of two takes must share to be decoded together."""
    window = shown.window
    return window.clip_id, window.shape.height, window.shape.width, window.resize, shown.place


def _room(held: int, waiting: int, following: Sequence[Take], workers: Workers | None) -> bool:
    """Whether one more group may be decoded ahead."""
    return workers is not None and held + _frame_bytes(following) <= AHEAD_BYTES and waiting < 4 * workers.count


def _asked(group: Sequence[Take], clip: MediaInfo, workers: Workers | None) -> Future[Any]:
    """The frames to come; without workers they are decoded when they are waited for."""
    if workers is None:
        return Future()
    last = max(max(shown.times) for shown in group)
    return workers.submit("decode", decode_words(group, clip), workers.limit + SLOWEST_DECODER * last)


def _frames_to_come(group: Sequence[Take], facts: Mapping[str, MediaInfo], future: Future[Any] | None) -> np.ndarray:
    """The frames of all takes of a group, uint8 (T,H,W,3), one take after the other."""
    clip = facts[group[0].window.clip_id]
    with _clip_named(clip):
        return decode(**decode_words(group, clip)) if future is None else future.result()


def _frame_bytes(group: Sequence[Take]) -> int:
    return sum(3 * shown.window.shape.frames * shown.window.shape.height * shown.window.shape.width for shown in group)
