"""The bytes of state that an optimizer keeps, measured on small tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from videotune.config.optimizer_classes import is_class
from videotune.config.optimizers import OPTIMIZERS, Optimizer
from videotune.trainer.optimizers import make_optimizer, parts_of

Shape = Sequence[int]

MEASURED = (
    (64, 64),
    (64, 96),
    (96, 64),
    (128, 64),
    (64, 160),
    (160, 96),
    (112, 128),
    (144, 80),
    (80, 176),
    (128, 128),
)
"""Matrices that are measured; each is large enough for 8 bits."""

VECTORS = (96, 128, 192)
"""Lengths of vectors that are measured: few, since a preconditioner has their square."""


def state_bytes(settings: Optimizer, shapes: Iterable[Shape]) -> int:
    """Return the bytes of state for parameters of these shapes.

    That of a class is measured on small matrices, and what it keeps for rows, columns
    and their squares (preconditioners) is told apart.

    Raises:
        VideotuneError: if the class cannot be built.
    """
    if not is_class(settings.name):
        numbers = sum(int(np.prod(shape)) for shape in shapes)
        return round(numbers * OPTIMIZERS[settings.name].state_bytes)

    matrices, vectors = _measured(settings.name, json.dumps(settings.args))
    total = 0.0
    for shape in shapes:
        if len(shape) < 2:
            size = float(_vector_features(int(np.prod(shape))) @ vectors)
        else:
            columns = int(np.prod(shape[1:]))
            size = float(_features(shape[0], columns) @ matrices)
        total += max(0.0, size)
    return round(total)


def _features(rows: int, columns: int) -> np.ndarray:
    """Return what bytes may grow with: numbers, rows, columns, and their squares."""
    return np.array(
        [
            rows * columns,
            rows,
            columns,
            rows**2,
            columns**2,
            min(rows, columns) ** 2,
            1.0,
        ]
    )


def _vector_features(length: int) -> np.ndarray:
    return np.array([length, length**2, 1.0])


@cache
def _measured(name: str, args: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes for each feature of a matrix, and of a vector."""
    settings = Optimizer(name=name, args=json.loads(args))
    matrices = [_features(*shape) for shape in MEASURED]
    vectors = [_vector_features(length) for length in VECTORS]
    return (
        _fitted(matrices, [_bytes_of(settings, shape) for shape in MEASURED]),
        _fitted(vectors, [_bytes_of(settings, (length,)) for length in VECTORS]),
    )


def _fitted(points: Sequence[np.ndarray], measured: Sequence[int]) -> np.ndarray:
    """Return the bytes for each feature."""
    weights, *_ = np.linalg.lstsq(np.stack(points), np.array(measured), rcond=None)
    # The noise of the fit would be large for the squares of real sizes.
    weights[np.abs(weights) < 1e-6] = 0.0
    return weights


def _bytes_of(settings: Optimizer, shape: Shape) -> int:
    """Return the bytes of state for a tensor of that shape; 0 if the optimizer does not
    take such a tensor, which building the real one tells.
    """
    parameter = nn.Parameter(torch.full(tuple(shape), 0.1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            optimizer = make_optimizer({"all": [parameter]}, settings)
            for _ in range(2):
                parameter.grad = torch.randn(tuple(shape))
                for part in parts_of(optimizer):
                    part.step()
        except Exception:
            if len(shape) < 2:
                return 0
            raise
    return sum(_tensor_bytes(part.state[parameter]) for part in parts_of(optimizer))


def _tensor_bytes(value: object) -> int:
    """Return the bytes of all tensors within a state."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return 0
