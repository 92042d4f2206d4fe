"""Errors of encoders, with the clip or caption that caused them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from videotune.errors import VideotuneError
from videotune.memory.out_of_memory import is_out_of_memory


@contextmanager
def naming_failures(subject: str, memory_remedy: str | None = None) -> Iterator[None]:
    """Turn an encoder's failure into a VideotuneError that names what it failed on.

    Args:
        subject: The caption or window.
        memory_remedy: What needs less memory. None: an out-of-memory error is raised as it
            is, since the caller tries again with the encoder's blocks on the host.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            if memory_remedy is None:
                raise
            reason = f"there is not enough memory to encode it. {memory_remedy}"
        else:
            reason = f"it cannot be encoded: {error}"
        raise VideotuneError(
            f"{subject}: {reason}\nEverything encoded so far is kept."
        ) from error


def check_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors. Raises RuntimeError if any value is not finite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RuntimeError(
                f"the encoder's {name} holds infinite or undefined numbers"
            )
    return tensors
