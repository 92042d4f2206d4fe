"""Errors of encoders, with the clip or caption that caused them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from videotune.data.file_checks import ClipProblem
from videotune.errors import VideotuneError
from videotune.memory.out_of_memory import is_out_of_memory

KEPT = "Everything encoded so far is kept."


class TextEncoderFull(MemoryError):
    """There is no room for the text encoder, or for what it computes of a caption."""


@contextmanager
def naming_caption(caption: str) -> Iterator[None]:
    """Turn a failure of the text encoder into a VideotuneError that names the caption.

    Raises:
        TextEncoderFull: if memory runs out: the caller tries again with the encoder's
            blocks on the host.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise TextEncoderFull(str(error)) from error
        raise VideotuneError(
            f"the caption {caption[:60]!r}: it cannot be encoded: {error}\n{KEPT}"
        ) from error


@contextmanager
def naming_window(subject: str, memory_remedy: str) -> Iterator[None]:
    """Turn a failure to decode or encode a part of a window into a VideotuneError that
    names it.

    Args:
        subject: The clip, the window, and which part of it.
        memory_remedy: What needs less memory.
    """
    try:
        yield
    except ClipProblem as problem:
        raise VideotuneError(f"{subject}: {problem}\n{KEPT}") from problem
    except (RuntimeError, MemoryError) as error:
        reason = f"it cannot be encoded: {error}"
        if is_out_of_memory(error):
            reason = f"there is not enough memory to encode it. {memory_remedy}"
        raise VideotuneError(f"{subject}: {reason}\n{KEPT}") from error


def check_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors. Raises RuntimeError if any value is not finite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RuntimeError(
                f"the encoder's {name} holds infinite or undefined numbers"
            )
    return tensors
