"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(true: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for a condition; its value."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)
    return value
