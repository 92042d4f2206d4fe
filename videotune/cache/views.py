"""What a view of a window shows, what was drawn for it, and the name of what is cached of it.

Most families draw nothing but pixels, and what shows the same pixels has the same name. Where noise is drawn onto an image
before it is encoded (``ModelSpec.image_noise``), every window has variants, and a variant's name says which noise it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from videotune.cache.keys import latent_key
from videotune.data.frame_sampling import sample_window
from videotune.rng import draws
from videotune.types import PLAIN, Moments, Take, Window

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def view(window: Window, variant: int, seed: int, image_noise: bool) -> Take:
    """What variant ``variant`` of a window shows; with image noise its number tells the noise too."""
    shown = sample_window(window, variant, seed)
    return replace(shown, variant=variant) if image_noise else shown


def view_key(shown: Take, vae: str, seed: int, image_noise: bool) -> str:
    """Names what is cached of a view."""
    if image_noise and shown.variant != PLAIN:
        vae = f"{vae} image noise {seed} {shown.window.id} {shown.variant}"
    return latent_key(shown, vae)


def noise_of(shown: Take, seed: int, image_noise: bool) -> np.random.Generator | None:
    """The draws of a view's image noise; None where there are none: the family's, or the plain view's."""
    if not image_noise or shown.variant == PLAIN:
        return None
    return draws(seed, "image noise", shown.window.id, shown.variant)


def tensors_of(moments: Moments) -> dict[str, Tensor]:
    """What an entry of the cache holds of a view: its moments, and beside them what else its pixels tell."""
    own = {"mean": moments.mean} | ({} if moments.logvar is None else {"logvar": moments.logvar})
    assert not own.keys() & moments.extras.keys(), "an extra is named as the moments are"
    return own | dict(moments.extras)


def moments_of(tensors: Mapping[str, Tensor]) -> Moments:
    """An entry of the cache as it was encoded."""
    extras = {name: value for name, value in tensors.items() if name not in ("mean", "logvar")}
    return Moments(tensors["mean"], tensors.get("logvar"), extras)
