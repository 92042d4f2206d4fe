"""Pictures as rich as photographs for tests: noise whose detail falls off as in nature,
and motion over it.
"""

from collections.abc import Sequence

import numpy as np


def landscape(
    seed: int, height: int = 120, width: int = 160, contrast: float = 45.0
) -> np.ndarray:
    """A colourful landscape of noise (1/f amplitudes), another for each seed. uint8 (H,
    W, 3).
    """
    rng = np.random.default_rng(seed)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    scale = (
        1
        / np.maximum(np.hypot(rows * height / 120, columns * width / 120), 1 / 120)
        ** 1.3
    )
    waves = scale * (
        rng.normal(size=(3, *scale.shape)) + 1j * rng.normal(size=(3, *scale.shape))
    )
    light = np.fft.irfft2(waves, (height, width))
    light = (light - light.mean((1, 2), keepdims=True)) / light.std(
        (1, 2), keepdims=True
    )
    grey = light[0] * contrast
    colours = [grey + light[1] * 12, grey, grey + light[2] * 12]
    return (np.stack(colours, -1).clip(-105, 105) + rng.uniform(110, 140)).astype(
        np.uint8
    )


def pan(
    seed: int, offsets: Sequence[float], height: int = 120, width: int = 160
) -> np.ndarray:
    """A camera that has turned by ``offsets`` pixels to the right over one landscape.
    uint8 (T, H, W, 3).
    """
    reach = int(np.ceil(max(offsets))) + 2
    wide = landscape(seed, height, width + reach).astype(np.float32)
    frames = []
    for offset in offsets:
        left = int(offset)
        part = offset - left
        frames.append(
            (1 - part) * wide[:, left : left + width]
            + part * wide[:, left + 1 : left + 1 + width]
        )
    return np.stack(frames).astype(np.uint8)


def shots(seeds: Sequence[int], frames: int, step: float = 1.0) -> np.ndarray:
    """One slow pan after the other, each over its own landscape; a hard cut between.
    uint8 (T, H, W, 3).
    """
    return np.concatenate(
        [pan(seed, [i * step for i in range(frames)]) for seed in seeds]
    )
