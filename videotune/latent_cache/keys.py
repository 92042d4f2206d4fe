"""The samples of windows, and the names of their cache entries: hashes of what decides their content.

Most families draw nothing but pixels, and what shows the same pixels has the same name. Where noise is drawn onto an image
before it is encoded (``ModelSpec.image_noise``), every window has variants, and a variant's name says which noise it has.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from videotune.data.frame_sampling import sample_window
from videotune.files import digest
from videotune.rng import generator_for
from videotune.types import DETERMINISTIC_VARIANT, Family, FrameSample, Window

SCHEMA = 2
"""Raised when the meaning of an entry changes, so that older entries are made anew."""

DECODE = 1
"""Raised when ``videotune.data.decode`` makes other pixels of the same file, so that older latents are made anew."""


@dataclass(frozen=True)
class CacheKeys:
    """Names of entries. ``vae`` and ``text_encoder`` are the fingerprints of what encodes, ``tokens`` a caption's limit."""

    vae: str
    text_encoder: str
    tokens: int
    seed: int
    image_noise: bool = False

    @classmethod
    def of(cls, family: Family, seed: int) -> "CacheKeys":
        """The names of what a family encodes in a run with this seed."""
        prints = family.fingerprints()
        spec = family.spec
        return cls(
            prints["vae"], prints["text_encoder"], spec.text_tokens, seed, spec.image_noise
        )

    def sample(self, window: Window, variant: int) -> FrameSample:
        """Variant ``variant`` of a window; with image noise its number decides the noise too."""
        sample = sample_window(window, variant, self.seed)
        return replace(sample, variant=variant) if self.image_noise else sample

    def text(self, caption: str) -> str:
        """Names a caption's states: the text, the encoder and how many tokens it may have."""
        return digest(
            {
                "schema": SCHEMA,
                "text": caption,
                "encoder": self.text_encoder,
                "tokens": self.tokens,
            }
        )

    def latents(self, sample: FrameSample) -> str:
        """Names a sample's latents: the clip's bytes, the frames sampled and how they get their size, the VAE, the noise.

        A random crop at the centre is the centre crop, whatever it is called.
        """
        window = sample.window
        shape = sample.window.shape
        vae = self.vae
        if self._has_noise(sample):
            vae = f"{vae} image noise {self.seed} {window.id} {sample.variant}"
        crops = window.resize in ("center", "random")
        resize: list[Any] = (
            ["crop", *(round(at, 9) for at in sample.place)] if crops else [window.resize]
        )
        times = " ".join(str(round(at * 1e6)) for at in sample.times)
        what = [window.clip_id, times, shape.height, shape.width, resize]
        return digest({"schema": SCHEMA, "decode": DECODE, "take": what, "vae": vae})

    def noise(self, sample: FrameSample) -> np.random.Generator | None:
        """The draws of a sample's image noise; None where there are none: the family's, or the plain sample's."""
        return (
            generator_for(self.seed, "image noise", sample.window.id, sample.variant)
            if self._has_noise(sample)
            else None
        )

    def _has_noise(self, sample: FrameSample) -> bool:
        return self.image_noise and sample.variant != DETERMINISTIC_VARIANT
