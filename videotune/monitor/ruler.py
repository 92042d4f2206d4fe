"""The ruler: the same clips, noise levels and noise at every reading, so that two readings differ by the model alone.

Held-out clips, and a fixed probe of training clips, at 9 fixed quantiles of the timestep distribution, each with its own
fixed noise; plain v-MSE, no caption dropout. It draws nothing from training and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    ruler: Ruler,
    family: Family,
    nets: Mapping[str, nn.Module],
    objective: Objective,
    batch_of: Callable[[Window], Batch],
) -> dict[str, Any]:
    """{"held_out": {mean, by_quantile} or None, "train": likewise}; plain mse averaged over the windows.

    Each noise level is read by the expert whose it is; of ``nets`` one after the other is looked up, each once.
    """
    levels = objective.timesteps.quantiles(QUANTILES)
    sums = {part: torch.zeros(QUANTILES, dtype=torch.float64) for part in ("held_out", "train")}
    for expert in family.spec.experts:
        own = [i for i, t in enumerate(levels.tolist()) if expert.t_lo <= t < expert.t_hi or t == expert.t_hi == 1]
        if not own:
            continue
        net = nets[expert.name]
        device, training = next(net.parameters()).device, net.training
        net.eval()
        try:
            with torch.no_grad():
                for part, windows in (("held_out", ruler.held_out), ("train", ruler.train)):
                    for window in windows:
                        batch = batch_of(window).map(lambda x, device=device: x.to(device))  # type: ignore[misc]
                        for i in own:
                            sums[part][i] += _error(ruler.seed, window, i, levels[i], family, net, objective, batch)
        finally:
            net.train(training)
    return {"held_out": _mean(sums["held_out"], ruler.held_out), "train": _mean(sums["train"], ruler.train)}


def _error(
    seed: int,
    window: Window,
    number: int,
    level: torch.Tensor,
    family: Family,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
) -> torch.Tensor:
    """The plain mse of a window at a level with its own noise, float64 on the CPU."""
    device, shape = batch.x0.device, tuple(batch.x0.shape)
    noise = torch.from_numpy(draws(seed, "ruler", window.id, number).standard_normal(shape, "float32"))
    out = denoising_loss(family, net, objective, batch, level.float()[None].to(device), noise.to(device))
    return out.mse.double().cpu()[0]


def _mean(sums: torch.Tensor, windows: Sequence[Window]) -> dict[str, Any] | None:
    """A part of a reading; None where there was nothing to read."""
    if not windows:
        return None
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
