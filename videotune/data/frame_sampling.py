"""Frame sampling: which frames of a window a sample shows."""

from numpy.random import Generator

from videotune.rng import generator_for
from videotune.types import DETERMINISTIC_VARIANT, FrameSample, Window

SWAP_PROBABILITY = 0.1
"""Probability that two neighbouring frames change places under temporal augmentation.
"""


def frame_times(start: float, frames: int, fps: float) -> tuple[float, ...]:
    """Return the seconds of ``frames`` frames at ``fps``: frame i is at start + i /
    fps.
    """
    return tuple(start + i / fps for i in range(frames))


def draw_frames(window: Window, variant: int, seed: int) -> FrameSample:
    """Draw the frames of a window, as a pure function of (seed, window, variant).

    A window that does not vary gives the same frames in every variant.

    Args:
        window: the window, with its clip's id.
        variant: its number; with DETERMINISTIC_VARIANT nothing is random.
        seed: the run's seed.
    """
    shape = window.shape
    is_random = variant != DETERMINISTIC_VARIANT and window.varies
    if is_random:
        # The purpose keeps an old name: another one would draw other frames.
        random = generator_for(seed, "take", window.id, f"{window.end:.6f}", variant)

    times: tuple[float, ...]
    if window.sampling == "start":
        latest_delay = max(0.0, window.end - window.start - shape.frames / shape.fps)
        delay_share = random.random() if is_random else 0.5
        times = frame_times(
            window.start + latest_delay * delay_share, shape.frames, shape.fps
        )
    elif window.sampling == "hold":
        unclamped = frame_times(window.start, shape.frames, shape.fps)
        times = tuple(min(time, window.end) for time in unclamped)
    elif window.sampling == "frames" and is_random:
        window_seconds = window.end - window.start
        times = tuple(
            sorted(window.start + window_seconds * random.random(shape.frames))
        )
    else:
        fps = shape.frames / (window.end - window.start)
        times = frame_times(window.start, shape.frames, fps)

    if window.swaps and is_random:
        times = _swap_neighbours(times, random)

    crop_position = (0.5, 0.5)
    if window.resize == "random" and is_random:
        crop_position = (float(random.random()), float(random.random()))

    # All variants of a window that does not vary are the same, under one name.
    effective_variant = variant if window.varies else 0
    seconds = tuple(float(time) for time in times)
    return FrameSample(
        window,
        effective_variant,
        seconds,
        crop_position,
        flipped=is_random and _is_flipped(window, variant, seed),
    )


def _is_flipped(window: Window, variant: int, seed: int) -> bool:
    """Return whether a variant is mirrored.

    Some windows mirror their even variants and the others their odd ones, so each epoch
    mirrors about half of the windows.
    """
    if not window.flip:
        return False
    offset = int(generator_for(seed, "flip", window.id).integers(2))
    return (variant + offset) % 2 == 1


def _swap_neighbours(times: tuple[float, ...], random: Generator) -> tuple[float, ...]:
    """Swap each frame with its right neighbour at SWAP_PROBABILITY, no frame twice."""
    order = list(times)
    index = 0
    while index < len(order) - 1:
        if random.random() < SWAP_PROBABILITY:
            order[index] = times[index + 1]
            order[index + 1] = times[index]
            index += 1
        index += 1
    return tuple(order)
