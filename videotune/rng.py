"""Randomness is counted, not carried.

A draw belongs to (seed, purpose, step, global sample index): whoever asks again gets the same numbers. Nothing has a state
to save, and no preview, device, process count or micro-batch can move another draw. The numbers come from Philox (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on the CPU.
"""

import hashlib

import numpy as np


def key(seed: int, *parts: str | int) -> int:
    """A 128-bit integer that names a draw; unequal names give unequal keys for every practical purpose."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator_for(seed: int, *parts: str | int) -> np.random.Generator:
    """A generator of its own for the draw named by ``parts``, e.g. ``draws(seed, "noise", step, index)``."""
    return np.random.Generator(np.random.Philox(key=key(seed, *parts)))


def seed32(seed: int, *parts: str | int) -> int:
    """A 31-bit seed for code that only takes one (a network's dropout, a diffusers pipeline)."""
    return key(seed, *parts) & 0x7FFFFFFF
