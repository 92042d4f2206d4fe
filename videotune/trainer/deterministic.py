"""Kernels that give the same bits from the same numbers, each time they run: ``deterministic``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from videotune.errors import VideotuneError


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Within, torch takes deterministic kernels alone, of attention's backward pass too. Not ``wanted``: as it was.

    Raises VideotuneError where an operation has none.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # read when the first product of matrices runs
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # writes NaN into new memory, which costs time
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        raise VideotuneError(
            f"deterministic: an operation of this model cannot promise the same bits ({str(error).splitlines()[0][:200]}): "
            "set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
