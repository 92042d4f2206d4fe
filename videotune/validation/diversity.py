"""How many different things a set of samples shows: the Vendi score."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def vendi(vectors: NDArray[np.float64]) -> float:
    """The Vendi score of vectors (n, D), 1 (all the same) to n (nothing in common): an effective number of different ones.

    exp of the entropy of the eigenvalues of K / n, K the cosines (Friedman and Dieng 2023, arXiv 2210.02410), in float64.
    Raises ValueError for no vector, and for one of length 0.
    """
    x = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(x, axis=1, keepdims=True) if x.ndim == 2 and len(x) else np.zeros(1)
    if not (lengths > 0).all():
        raise ValueError("the Vendi score is of one or more vectors (n, D), none of length 0")
    x = x / lengths
    values = np.linalg.eigvalsh(x @ x.T / len(x))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


def diversity(by_prompt: Sequence[Sequence[Tensor]]) -> float | None:
    """The mean over prompts of the Vendi score of each one's samples, given as vectors of frames (T, D) each.

    Samples of different prompts are different anyway, so they are not compared. None where no prompt has two samples.
    """
    scores = [
        vendi(np.stack([one.flatten().double().numpy() for one in samples]))
        for samples in by_prompt
        if len(samples) > 1
    ]
    return sum(scores) / len(scores) if scores else None
