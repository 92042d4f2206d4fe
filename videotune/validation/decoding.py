"""Decoding sampled latents beside a network in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from videotune.console import echo
from videotune.sampling.pipeline import decode
from videotune.trainer.step import of_memory
from videotune.trainer.trainer import Trainer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def decoded(trainer: Trainer, latents: list[Tensor]) -> list[np.ndarray]:
    """The frames of a preview.

    Where the device has no room for the autoencoder, the denoiser is set aside meanwhile; where it has none then either,
    they are decoded in tiles, and that is said.
    """
    try:
        return decode(trainer.family, latents)
    except (MemoryError, RuntimeError) as error:
        if not of_memory(error):
            raise
    name = trainer.pool.current
    echo("note: the device has no room to decode a preview beside the denoiser, which is set aside meanwhile")
    trainer.pool.drop()
    try:
        try:
            return decode(trainer.family, latents)
        except (MemoryError, RuntimeError) as error:
            if not of_memory(error):
                raise
        echo(
            "note: the device has no room to decode a preview whole; it is decoded in tiles, so its pixels differ slightly"
        )
        return decode(trainer.family, latents, tiled=True)
    finally:
        _ = trainer.pool[name]
