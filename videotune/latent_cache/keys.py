"""The samples of windows, and the keys of their cache entries: hashes of everything
that decides their content.

Samples with the same pixels have the same key. If a family draws noise onto an image
before it is encoded (``ModelSpec.image_noise``), every window has variants, and the
key of a variant depends on its noise.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from videotune.data.decode import DECODE_VERSION
from videotune.data.frame_sampling import draw_frames
from videotune.data.sound import SOUND_VERSION
from videotune.files import digest
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.types import DETERMINISTIC_VARIANT, FrameSample, Window

SCHEMA = 2
"""Increased when the meaning of an entry changes, so that older entries are encoded
again.
"""


@dataclass(frozen=True)
class CacheKeys:
    """Makes the keys of cache entries for one model and seed."""

    vae: str
    """Fingerprint of the VAE, and the family's ``encoding`` if it has one."""
    text_encoder: str
    """Fingerprint of the text encoder, and "before connectors" if states are cached before
    the text connectors.
    """
    tokens: int
    """Tokens of a caption, at most."""
    seed: int
    image_noise: bool = False
    """Whether noise is drawn onto the conditioning frame before it is encoded."""
    cell_size: tuple[int, int] = (1, 1)
    """Pixel frames and pixels of a latent cell's sides, (frames, pixels)."""
    audio_vae: str = ""
    """Fingerprint of the sound's VAE, if the run reads sound."""

    @classmethod
    def of(cls, family: DiffusersModel, seed: int) -> "CacheKeys":
        """Return the keys of what a family encodes in a run with this seed."""
        fingerprints = family.fingerprints()
        text_stage = "before connectors" if family.spec.connectors_in_step else ""
        return cls(
            vae=" ".join(filter(None, (fingerprints["vae"], family.encoding))),
            text_encoder=" ".join(
                filter(None, (fingerprints["text_encoder"], text_stage))
            ),
            tokens=family.spec.text_tokens,
            seed=seed,
            image_noise=family.spec.image_noise,
            cell_size=(
                family.spec.rules.temporal_stride,
                family.spec.rules.spatial_stride,
            ),
            audio_vae=fingerprints.get("audio_vae", ""),
        )

    def frame_sample(self, window: Window, variant: int) -> FrameSample:
        """Return a variant of a window.

        With image noise, its number decides the noise too.
        """
        sample = draw_frames(window, variant, self.seed)
        return replace(sample, variant=variant) if self.image_noise else sample

    def text_key(self, caption: str) -> str:
        """Return the key of a caption's states: by the text, the encoder and the limit
        of tokens.
        """
        content = {
            "schema": SCHEMA,
            "text": caption,
            "encoder": self.text_encoder,
            "tokens": self.tokens,
        }
        return digest(content)

    def latents_key(self, sample: FrameSample) -> str:
        """Return the key of a sample's latents: by the clip's bytes, frame times,
        size, crop, VAE and image noise.

        A random crop that is at the centre has the key of the centre crop.
        """
        window = sample.window
        vae = self.vae
        if self._has_noise(sample):
            vae = f"{vae} image noise {self.seed} {window.id} {sample.variant}"

        pixels = _what_decides_pixels(sample, window.clip_id)
        start_image = window.companion("start_image")
        if start_image is not None:
            pixels.append(f"start image {start_image}")
        # "take" is the name that frame samples had when the first caches were written.
        content = {
            "schema": SCHEMA,
            "decode": DECODE_VERSION,
            "take": pixels,
            "vae": vae,
        }
        return digest(content)

    def mask_key(self, sample: FrameSample) -> str | None:
        """Return the key of a sample's loss mask, or None if its clip has none."""
        mask_id = sample.window.companion("loss_mask")
        if mask_id is None:
            return None
        content = {
            "schema": SCHEMA,
            "decode": DECODE_VERSION,
            "mask": _what_decides_pixels(sample, mask_id),
            "cell": self.cell_size,
        }
        return digest(content)

    def sound_key(self, sample: FrameSample) -> str:
        """Return the key of the latents of a sample's sound: by the clip's bytes, the
        seconds and the VAE.
        """
        shape = sample.window.shape
        content = {
            "schema": SCHEMA,
            "read": SOUND_VERSION,
            "sound": sample.window.clip_id,
            "start": round(sample.times[0] * 1e6),
            "frames": [shape.frames, shape.fps],
            "vae": self.audio_vae,
        }
        return digest(content)

    def noise_generator(self, sample: FrameSample) -> np.random.Generator | None:
        """Return the generator of a sample's image noise, or None if it has none."""
        if not self._has_noise(sample):
            return None
        return generator_for(self.seed, "image noise", sample.window.id, sample.variant)

    def _has_noise(self, sample: FrameSample) -> bool:
        return self.image_noise and sample.variant != DETERMINISTIC_VARIANT


def _what_decides_pixels(sample: FrameSample, file_id: str) -> list[Any]:
    """Return everything that decides the pixels of a sample, decoded from a file."""
    window = sample.window
    resize: list[Any] = [window.resize]
    if window.resize in ("center", "random"):
        resize = ["crop", *(round(position, 9) for position in sample.crop_position)]

    times = " ".join(str(round(time * 1e6)) for time in sample.times)
    pixels = [file_id, times, window.shape.height, window.shape.width, resize]
    if sample.flipped:
        pixels.append("flipped")
    return pixels
