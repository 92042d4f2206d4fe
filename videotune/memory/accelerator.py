"""The device that computes, whatever torch.accelerator finds: CUDA (so torch calls ROCm too), XPU or MPS; else the CPU."""

from __future__ import annotations

import gc
import os

from videotune.lazy import torch

OVERLAPPING = ("cuda", "xpu")
"""Kinds with memory of their own, and streams and pinned host memory, so that copies run beside the computation.

MPS computes in the host's memory. There weights and inputs are copied as on the CPU, and a step waits for its copies.
"""


def local_device() -> torch.device:
    """This process's accelerator where there is one, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return (
        torch.device("cpu")
        if found is None
        else torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))
    )


def overlaps(device: torch.device) -> bool:
    """Whether copies run beside the computation."""
    return device.type in OVERLAPPING


def copy_stream(device: torch.device) -> torch.Stream | None:
    """A stream for copies; None where the device has none."""
    return torch.Stream(device) if overlaps(device) else None


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by itself: cards before Ampere emulate it, and a CPU is twelve times slower."""
    if not overlaps(device):
        return False
    with torch.accelerator.device_index(device.index):
        return bool(
            torch.get_device_module(device).is_bf16_supported(including_emulation=False)
        )


def empty_cache() -> None:
    """Give back memory of the device, and pinned memory of the host, that no tensor holds; cycles are collected first."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
        # pinned host memory too; torch 2.11 has the private name alone
        (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()
