"""Host memory: what a training on the CPU keeps of it, and whether there is enough."""

import ctypes
import platform

import psutil

from videotune.errors import DoesNotFit

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""glibc's names (malloc.h)."""

_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed for the next allocation; True where it is glibc and it agreed.

    By default it gives the top of the heap back to the system and takes large blocks from it one by one. A training step
    frees and takes the same blocks over and over, and each time every page is faulted in anew: about a tenth of a step of
    the toy model (docs/measurements.md). The process then keeps its peak until it ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, _BLOCK)) and bool(
        mallopt(M_TRIM_THRESHOLD, 2 * _BLOCK - 1)
    )


def refuse_if_short(needed: int, what: str) -> None:
    """Raise DoesNotFit where the host has not so many bytes free; what the system keeps of files counts as free."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise DoesNotFit(
            f"{what} need {needed / 1e9:.1f} GB of host memory, and {free / 1e9:.1f} GB are free: close other programs, or "
            "set layer_offload_fraction lower"
        )
