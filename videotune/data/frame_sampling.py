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
    random = None
    if variant != DETERMINISTIC_VARIANT and window.varies:
        # The purpose keeps an old name: another one would draw other frames.
        random = generator_for(seed, "take", window.id, f"{window.end:.6f}", variant)

    # One generator gives times, swaps and crop, in this order: another order would draw
    # other frames.
    times = _draw_times(window, random)
    if window.swaps and random is not None:
        times = _swap_neighbours(times, random)
    crop_position = (0.5, 0.5)
    if window.resize == "random" and random is not None:
        down = float(random.random())
        right = float(random.random())
        crop_position = (down, right)
    is_flipped = random is not None and _is_flipped(window, variant, seed)

    # All variants of a window that does not vary are the same, under one name.
    effective_variant = variant if window.varies else 0
    seconds = tuple(float(time) for time in times)
    return FrameSample(
        window,
        variant=effective_variant,
        times=seconds,
        crop_position=crop_position,
        flipped=is_flipped,
    )


def _draw_times(window: Window, random: Generator | None) -> tuple[float, ...]:
    """Return the seconds of the frames, before any swap; without a generator nothing is
    random.
    """
    shape = window.shape
    window_seconds = window.end - window.start
    if window.sampling == "start":
        sample_seconds = shape.frames / shape.fps
        latest_delay = max(0.0, window_seconds - sample_seconds)
        delay_share = 0.5 if random is None else random.random()
        start = window.start + latest_delay * delay_share
        return frame_times(start, shape.frames, shape.fps)

    if window.sampling == "hold":
        unclamped = frame_times(window.start, shape.frames, shape.fps)
        return tuple(min(time, window.end) for time in unclamped)

    if window.sampling == "frames" and random is not None:
        times = window.start + window_seconds * random.random(shape.frames)
        return tuple(sorted(times))
    fps = shape.frames / window_seconds
    return frame_times(window.start, shape.frames, fps)


def _is_flipped(window: Window, variant: int, seed: int) -> bool:
    """Return whether a variant is mirrored.

    Some windows mirror their even variants and the others their odd ones, so each epoch
    mirrors about half of the windows.
    """
    if not window.flip:
        return False
    generator = generator_for(seed, "flip", window.id)
    offset = int(generator.integers(2))
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
