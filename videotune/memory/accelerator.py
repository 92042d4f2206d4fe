"""Select the device for training: CUDA (ROCm included), XPU or MPS, else the CPU."""

from __future__ import annotations

import gc
import os

from videotune.lazy import torch

OVERLAPPING = ("cuda", "xpu")
"""Device types whose copies can overlap with computation.

They have their own memory, streams and pinned host memory. MPS computes in the host's
memory: weights and inputs are copied as on the CPU, and a step waits for its copies.
"""


def local_device() -> torch.device:
    """Return this process's accelerator, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))


def has_streams(device: torch.device) -> bool:
    """Return whether a device has its own memory and streams, so that it copies while it
    computes (``OVERLAPPING``).
    """
    return device.type in OVERLAPPING


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream for copies, or None if the device has no streams."""
    return torch.Stream(device) if has_streams(device) else None


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16 natively.

    GPUs before Ampere emulate it, and a CPU is twelve times slower with it.
    """
    if not has_streams(device):
        return False
    with torch.accelerator.device_index(device.index):
        device_module = torch.get_device_module(device)
        return bool(device_module.is_bf16_supported(including_emulation=False))


def needs_float16(device: torch.device) -> bool:
    """Return whether float16 is the only fast half precision of a device: CUDA cards
    before Ampere (T4, V100, RTX 20).
    """
    return device.type == "cuda" and not has_bf16(device)


def empty_cache() -> None:
    """Free cached memory of the device and cached pinned memory of the host.

    Reference cycles are collected first.
    """
    gc.collect()
    if not torch.accelerator.is_available():
        return

    torch.accelerator.empty_cache()
    # torch 2.11 has only the private function.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
    (empty_host_cache or torch._C._host_emptyCache)()
