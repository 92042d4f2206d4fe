"""The ruler: the same clips, noise levels and noise at every reading, so that two readings differ by the model alone.

Held-out clips, and a fixed probe of training clips, at 9 fixed quantiles of the timestep distribution, each with its own
fixed noise; plain v-MSE, no caption dropout. It draws nothing from training and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from videotune.diffusion.loss import denoising_loss
from videotune.diffusion.objective import Objective
from videotune.files import digest
from videotune.randomness import draws
from videotune.types import Batch, Family, Window

QUANTILES = 9


@dataclass(frozen=True)
class Ruler:
    """Which windows are read; ``held_out`` may be empty: then no validation is possible, and the reading says null."""

    held_out: tuple[Window, ...]
    train: tuple[Window, ...]
    seed: int

    def name(self, objective: Objective) -> str:
        """8 hex digits; readings of rulers of one name compare."""
        windows = [[window.id for window in part] for part in (self.held_out, self.train)]
        return digest([windows, self.seed, objective.timesteps.quantiles(QUANTILES).tolist()])[:8]


def read_ruler(
    ruler: Ruler, family: Family, net: nn.Module, objective: Objective, batch_of: Callable[[Window], Batch]
) -> dict[str, Any]:
    """{"held_out": {mean, by_quantile} or None, "train": likewise}; plain mse averaged over the windows."""
    device = next(net.parameters()).device
    levels = objective.timesteps.quantiles(QUANTILES)
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            return {
                "held_out": _read(ruler.held_out, ruler.seed, levels, family, net, objective, batch_of, device),
                "train": _read(ruler.train, ruler.seed, levels, family, net, objective, batch_of, device),
            }
    finally:
        net.train(training)


def _read(
    windows: Sequence[Window],
    seed: int,
    levels: torch.Tensor,
    family: Family,
    net: nn.Module,
    objective: Objective,
    batch_of: Callable[[Window], Batch],
    device: torch.device,
) -> dict[str, Any] | None:
    if not windows:
        return None
    sums = torch.zeros(len(levels), dtype=torch.float64)
    for window in windows:
        batch = batch_of(window).map(lambda x: x.to(device))
        shape = tuple(batch.x0.shape)
        for i, level in enumerate(levels):
            noise = torch.from_numpy(draws(seed, "ruler", window.id, i).standard_normal(shape, "float32"))
            out = denoising_loss(family, net, objective, batch, level.float()[None].to(device), noise.to(device))
            sums[i] += out.mse.double().cpu()[0]
    means = (sums / len(windows)).tolist()
    return {"mean": sum(means) / len(means), "by_quantile": means, "windows": len(windows)}


def normalised(reading: dict[str, Any] | None, first: dict[str, Any] | None) -> float | None:
    """The mean over quantiles of each one's ratio to the first reading: every noise level counts alike."""
    if reading is None or first is None:
        return None
    pairs = list(zip(reading["by_quantile"], first["by_quantile"], strict=True))
    if any(before is None for _, before in pairs):  # the first reading was not finite
        return None
    return sum(now / max(before, 1e-12) for now, before in pairs) / QUANTILES
