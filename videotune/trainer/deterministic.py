"""Use only kernels that give the same bits from the same numbers each time:
``deterministic``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from videotune.errors import VideotuneError


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Within the block torch uses only deterministic kernels, also for attention's
    backward pass, if ``wanted``.

    Raises VideotuneError if an operation has none.
    """
    if not wanted:
        yield
        return

    # cuBLAS reads it when the first product of matrices runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    filled_memory = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # writing NaN into new memory costs time
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        reason = str(error).splitlines()[0][:200]
        raise VideotuneError(
            f"deterministic: an operation of this model has no deterministic kernel ({reason}). Set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        settings.fill_uninitialized_memory = filled_memory
