"""Positions of tokens that are the same tensor at each call.

Making them copies factors to the device, which makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def cached_positions(
    cache: dict[object, Tensor],
    key: tuple[object, ...],
    device: torch.device,
    make: Callable[[], Tensor],
) -> Tensor:
    """Return the positions under a key, made at its first use.

    Args:
        cache: of the network.
        key: what the positions depend on; the device is added.
        device: device of the positions.
        make: makes them.
    """
    # Fake tensors are neither cached nor combined with real ones.
    if type(torch.empty(0, device=device)) is not torch.Tensor:
        return make()
    key = (*key, device)
    if key not in cache:
        cache[key] = make()
    return cache[key]
