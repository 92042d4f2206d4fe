"""Configure the host allocator and check for free host memory."""

import ctypes
import platform

import psutil

from videotune.errors import DoesNotFit

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameter numbers of glibc's mallopt (malloc.h)."""

_GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; return whether it does.

    By default glibc returns the top of the heap to the system and maps large blocks
    individually. A training step frees and allocates the same blocks over and over, and
    every page is faulted in again each time: about a tenth of a step of the toy model
    (docs/measurements.md). With this setting the process holds its peak until it ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(M_MMAP_THRESHOLD, _GIB):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, 2 * _GIB - 1))


def refuse_if_short(needed: int, purpose: str) -> None:
    """Raise DoesNotFit if the host has less than ``needed`` bytes free.

    The system's file cache counts as free. ``purpose`` is the plural subject of the
    message.
    """
    free = psutil.virtual_memory().available
    if needed > free:
        raise DoesNotFit(
            f"{purpose} need {needed / 1e9:.1f} GB of host memory, but only "
            f"{free / 1e9:.1f} GB are free. Close other programs, or lower "
            "layer_offload_fraction."
        )
