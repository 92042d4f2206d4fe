"""Fetch the decoded frames of the next sample while the encoder computes."""

import time
from collections.abc import Generator, Iterator
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from videotune.latent_cache.thread_pool import pool_without_openmp
from videotune.memory.accelerator import has_streams
from videotune.types import FrameSample


def stage_ahead(
    decoded: Generator[tuple[FrameSample, np.ndarray, float], None, None],
    device: torch.device,
) -> Generator[tuple[FrameSample, Tensor, float], None, None]:
    """Yield each sample, in order, with its frames, uint8 (T,H,W,3) on the host, and the
    seconds that the caller waited for them.

    For a card, a thread fetches one sample ahead. If the card copies by itself, the frames
    lie in pinned memory, which torch reuses once they have been copied. On a CPU the
    thread would take the encoder's time.

    Args:
        decoded: what ``decode_ahead`` yields; it is closed at the end.
        device: where the frames will be encoded.
    """
    if device.type == "cpu":
        with closing(decoded):
            for sample, array, waited in decoded:
                yield sample, torch.from_numpy(array), waited
        return

    pool = pool_without_openmp(1, "frames")
    with closing(decoded):
        try:
            upcoming = pool.submit(_stage_next, decoded, device)
            while True:
                begun = time.monotonic()
                staged = upcoming.result()
                waited = time.monotonic() - begun
                if staged is None:
                    return

                upcoming = pool.submit(_stage_next, decoded, device)
                sample, frames = staged
                yield sample, frames, waited
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _stage_next(
    decoded: Iterator[tuple[FrameSample, np.ndarray, float]], device: torch.device
) -> tuple[FrameSample, Tensor] | None:
    """Return the next sample with its frames, or None after the last one."""
    item = next(decoded, None)
    if item is None:
        return None
    sample, array, _ = item
    frames = torch.from_numpy(array)
    return sample, frames.pin_memory() if has_streams(device) else frames
