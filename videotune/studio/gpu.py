"""The NVIDIA cards of this computer, as their driver reports them."""

import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pynvml

EVERY = 1.0
"""Seconds between two readings, for all pages together."""

_lock = Lock()
_last: tuple[float, list["Gpu"]] = (-EVERY, [])


@dataclass(frozen=True)
class Gpu:
    """A card: memory in bytes, use in percent, temperature in °C, power in W; None where the driver does not say."""

    index: int
    name: str
    used: int
    total: int
    use: int | None
    celsius: int | None
    watts: float | None

    @property
    def gb(self) -> float:
        """Its memory in GB (10^9 bytes)."""
        return round(self.total / 1e9, 1)


def cards() -> list[Gpu]:
    """The cards as they were at most a second ago; none without a driver."""
    global _last
    with _lock:
        if time.monotonic() - _last[0] >= EVERY:
            _last = time.monotonic(), _read()
        return _last[1]


def _read() -> list[Gpu]:
    try:
        pynvml.nvmlInit()
        return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except (pynvml.NVMLError, OSError):  # no driver, or one that lost its card
        return []


def _gpu(index: int) -> Gpu:
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(card)
    memory = pynvml.nvmlDeviceGetMemoryInfo(card)
    use = _asked("UtilizationRates", card)
    heat = _asked("Temperature", card, pynvml.NVML_TEMPERATURE_GPU)
    power = _asked("PowerUsage", card)
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    watts = None if power is None else power / 1000
    return Gpu(
        index, name, int(memory.used), int(memory.total), use and int(use.gpu), heat, watts
    )


def _asked(what: str, *given: Any) -> Any:
    """A reading that not every card gives."""
    with suppress(pynvml.NVMLError):
        return getattr(pynvml, f"nvmlDeviceGet{what}")(*given)
    return None
