"""The names of entries: hashes of what decides their content."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from videotune.files import digest
from videotune.types import Take

SCHEMA = 2
"""Raised when the meaning of an entry changes, so that older entries are made anew."""

DECODE = 1
"""Raised when ``videotune.data.decode`` makes other pixels of the same file, so that older latents are made anew."""


def latent_key(take: Take, vae: str) -> str:
    """Names a take's latents: the clip's bytes, the frames shown and how they get their size, and the VAE.

    A random crop at the centre is the centre crop, whatever it is called.
    """
    window, shape = take.window, take.window.shape
    crops = window.resize in ("center", "random")
    resize: list[Any] = ["crop", *(round(at, 9) for at in take.place)] if crops else [window.resize]
    times = " ".join(str(round(at * 1e6)) for at in take.times)
    what = [window.clip_id, times, shape.height, shape.width, resize]
    return digest({"schema": SCHEMA, "decode": DECODE, "take": what, "vae": vae})


@lru_cache(maxsize=1 << 16)
def text_key(caption: str, encoder: str, tokens: int) -> str:
    """Names a caption's states: the text, the encoder and how many tokens it may have."""
    return digest({"schema": SCHEMA, "text": caption, "encoder": encoder, "tokens": tokens})
