"""Random draws by name instead of by state.

A draw is named by (seed, purpose, step, global sample index), and the same name gives
the same numbers. There is no state to save, and no preview, device, process count or
micro-batch can move another draw; but an adapter's dropout is drawn for each forward
pass, so it depends on the micro-batches. The numbers come from Philox on the CPU (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); for draws on the device, such as
stochastic rounding and dropout, the name seeds torch's generator (``torch_seed``).
"""

import hashlib

import numpy as np


def key(seed: int | str, *parts: str | int) -> int:
    """Return a 128-bit hash of a draw's name."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"
    )


def generator_for(seed: int | str, *parts: str | int) -> np.random.Generator:
    """Return the generator of a draw.

    The noise of a sample is drawn by ``generator_for(seed, "noise", step, index)``. A
    draw that is the same in every run has its purpose in the place of the seed.
    """
    return np.random.Generator(np.random.Philox(key=key(seed, *parts)))


def torch_seed(seed: int, *parts: str | int) -> int:
    """Return a 31-bit seed, for code that only takes one, such as a diffusers pipeline."""
    return key(seed, *parts) & 0x7FFFFFFF
