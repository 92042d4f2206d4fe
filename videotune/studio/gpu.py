"""The NVIDIA GPUs of this computer, as their driver reports them."""

import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pynvml

READ_INTERVAL = 1.0
"""Seconds between two readings, shared by all pages."""


@dataclass(frozen=True)
class Gpu:
    """A GPU; None for readings that its driver does not give."""

    index: int
    name: str

    memory_used: int
    """In bytes."""

    memory_total: int
    """In bytes."""

    utilization: int | None
    """In percent."""

    celsius: int | None
    watts: float | None


class GpuReader:
    """Reads the GPUs at most once per interval, for all pages together."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._read_at = -READ_INTERVAL
        self._gpus: list[Gpu] = []

    def gpus(self) -> list[Gpu]:
        """Return the GPUs as of at most one interval ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= READ_INTERVAL:
                self._read_at = now
                self._gpus = _read()
            return self._gpus


_reader = GpuReader()


def list_gpus() -> list[Gpu]:
    """Return the GPUs as of at most a second ago; an empty list if there is no driver."""
    return _reader.gpus()


def _read() -> list[Gpu]:
    try:
        pynvml.nvmlInit()
        return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except (pynvml.NVMLError, OSError):  # no driver, or it lost its GPU
        return []


def _gpu(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(device)
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    utilization = _reading("UtilizationRates", device)
    temperature = _reading("Temperature", device, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = _reading("PowerUsage", device)

    return Gpu(
        index=index,
        name=name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        memory_used=int(memory.used),
        memory_total=int(memory.total),
        utilization=utilization and int(utilization.gpu),
        celsius=temperature,
        watts=None if milliwatts is None else milliwatts / 1000,
    )


def _reading(quantity: str, *arguments: Any) -> Any:
    """Return a reading that not every GPU supports, or None."""
    with suppress(pynvml.NVMLError):
        return getattr(pynvml, f"nvmlDeviceGet{quantity}")(*arguments)
    return None
