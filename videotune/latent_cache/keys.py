"""The samples of windows, and the names of their entries: hashes of what decides their content.

Most families draw nothing but pixels, and what shows the same pixels has the same name. Where noise is drawn onto an image
before it is encoded (``ModelSpec.image_noise``), every window has variants, and a variant's name says which noise it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from videotune.data.frame_sampling import sample_window
from videotune.files import digest
from videotune.rng import draws
from videotune.types import PLAIN, Moments, Take, Window

SCHEMA = 2
"""Raised when the meaning of an entry changes, so that older entries are made anew."""

DECODE = 1
"""Raised when ``videotune.data.decode`` makes other pixels of the same file, so that older latents are made anew."""


def latent_key(take: Take, vae: str) -> str:
    """Names a take's latents: the clip's bytes, the frames sampled and how they get their size, and the VAE.

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


def sample_of(window: Window, variant: int, seed: int, image_noise: bool) -> Take:
    """Variant ``variant`` of a window; with image noise its number decides the noise too."""
    sample = sample_window(window, variant, seed)
    return replace(sample, variant=variant) if image_noise else sample


def sample_key(sample: Take, vae: str, seed: int, image_noise: bool) -> str:
    """Names what is cached of a sample."""
    if image_noise and sample.variant != PLAIN:
        vae = f"{vae} image noise {seed} {sample.window.id} {sample.variant}"
    return latent_key(sample, vae)


def noise_of(sample: Take, seed: int, image_noise: bool) -> np.random.Generator | None:
    """The draws of a sample's image noise; None where there are none: the family's, or the plain sample's."""
    if not image_noise or sample.variant == PLAIN:
        return None
    return draws(seed, "image noise", sample.window.id, sample.variant)


def tensors_of(moments: Moments) -> dict[str, Tensor]:
    """What an entry of the cache holds of a sample: its moments, and beside them what else its pixels tell."""
    own = {"mean": moments.mean} | ({} if moments.logvar is None else {"logvar": moments.logvar})
    assert not own.keys() & moments.extras.keys(), "an extra is named as the moments are"
    return own | dict(moments.extras)


def moments_of(tensors: Mapping[str, Tensor]) -> Moments:
    """An entry of the cache as it was encoded."""
    extras = {name: value for name, value in tensors.items() if name not in ("mean", "logvar")}
    return Moments(tensors["mean"], tensors.get("logvar"), extras)
