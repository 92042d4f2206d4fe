"""Filling the cache: captions by the text encoder, then clips by the VAE; one model in memory at a time, then freed.

What is there already is left alone, so a killed run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from videotune.cache.store import Store, latent_key, text_key
from videotune.data.decode import decode
from videotune.data.facts import ClipProblem, Facts
from videotune.data.windows import window_times
from videotune.errors import VideotuneError
from videotune.types import Family, Window

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Progress = Callable[[str, int, int], None]
"""Called with what is being encoded, how many are done, and how many there are."""


@dataclass(frozen=True)
class Todo:
    """What is not in the cache yet."""

    captions: tuple[str, ...]
    windows: tuple[Window, ...]

    def __bool__(self) -> bool:
        return bool(self.captions or self.windows)


def missing(
    store: Store, prints: Mapping[str, str], tokens: int, captions: Sequence[str], windows: Sequence[Window]
) -> Todo:
    """Which captions and windows have no entry, in order and without repeats."""
    texts = dict.fromkeys(captions)
    return Todo(
        tuple(text for text in texts if not store.has("text", text_key(text, prints["text_encoder"], tokens))),
        tuple(window for window in windows if not store.has("latents", latent_key(window, prints["vae"]))),
    )


def fill(
    family: Family, store: Store, todo: Todo, facts: Mapping[str, Facts], threads: int, progress: Progress
) -> None:
    """Encode what is missing.

    Raises VideotuneError that names the clip where one cannot be decoded.
    """
    prints, tokens = family.fingerprints(), family.spec.text_tokens
    try:
        for done, caption in enumerate(todo.captions, 1):
            length = family.text_length(caption)
            about = {"caption": caption, "length": length, "cut": max(0, length - tokens)}
            store.put(
                "text", text_key(caption, prints["text_encoder"], tokens), family.encode_text([caption])[0], about
            )
            progress("captions", done, len(todo.captions))
    finally:
        family.free("text_encoder")
    try:
        for done, (window, frames) in enumerate(_decoded(todo.windows, facts, threads), 1):
            moments = family.encode_video(to_model(frames))
            tensors = {"mean": moments.mean} | ({} if moments.logvar is None else {"logvar": moments.logvar})
            store.put("latents", latent_key(window, prints["vae"]), tensors, {"window": window.id})
            progress("clips", done, len(todo.windows))
    finally:
        family.free("vae")


def cut_captions(store: Store, encoder: str, tokens: int, captions: Sequence[str]) -> list[str]:
    """The captions that are longer than the model reads."""
    return [text for text in captions if store.about("text", text_key(text, encoder, tokens))["about"]["cut"]]


def to_model(frames: np.ndarray) -> Tensor:
    """uint8 (T,H,W,3) -> float32 (3,T,H,W) in [-1, 1]."""
    import torch

    return torch.from_numpy(frames).permute(3, 0, 1, 2).float().div_(127.5).sub_(1.0)


def _decoded(
    windows: Sequence[Window], facts: Mapping[str, Facts], threads: int
) -> Iterator[tuple[Window, np.ndarray]]:
    """Each window with its frames, decoded a few ahead by ``threads`` threads (0: none), in order."""
    if threads == 0:
        yield from ((window, _frames(window, facts)) for window in windows)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        rest = iter(windows)
        ahead: list[tuple[Window, Future[np.ndarray]]] = []
        ahead += [(window, pool.submit(_frames, window, facts)) for window in islice(rest, threads)]
        while ahead:
            window, future = ahead.pop(0)
            ahead += [(later, pool.submit(_frames, later, facts)) for later in islice(rest, 1)]
            yield window, future.result()


def _frames(window: Window, facts: Mapping[str, Facts]) -> np.ndarray:
    shape, clip = window.shape, facts[window.clip_id]
    try:
        return decode(clip, window_times(window), shape.height, shape.width)
    except ClipProblem as problem:
        raise VideotuneError(
            f"{clip.path}: {problem.reason}: {problem.detail}\n"
            "Its frames were counted but cannot be decoded: the file is damaged. Repair it or take it out of the dataset."
        ) from problem
