"""Changes of a network's weights that are made while the weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[["Tensor"], "Tensor"]
"""A weight in float32 or float64 -> the new one, on the same device."""


@dataclass(frozen=True)
class WeightChanges:
    """Changes of one part of a base model."""

    digest: str
    """A hash of all changes, for the part's fingerprint."""

    read: Callable[[], Mapping[str, Change]]
    """Reads the changes, by the weights' names in diffusers."""

    def apply(
        self,
        states: Iterable[dict[str, Tensor]],
        device: torch.device,
    ) -> Iterable[dict[str, Tensor]]:
        """Yield states with changed weights, computed in float32 on a device, where they
        stay.
        """
        changes = self.read()
        missing = set(changes)
        for state in states:
            for name in missing & set(state):
                weight = state[name].to(device, torch.float32)
                state[name] = changes[name](weight)
                missing.remove(name)
            yield state
        assert not missing, f"no weights are named {sorted(missing)[:3]}"
