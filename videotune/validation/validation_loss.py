"""The validation loss: the same clips, noise levels and noise at every validation, so that two differ by the model alone.

Held-out clips and some training clips, at 9 fixed quantiles of the timestep distribution, each clip at a third of them and
with its own fixed noise; plain v-MSE, no caption dropout. It draws nothing from training and changes nothing in it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from videotune.diffusion.loss import Objective, denoising_loss
from videotune.latent_cache.exposure import CLIP_DIGITS
from videotune.rng import draws
from videotune.types import Batch, Expert, Family, Window
from videotune.validation.selection import QUANTILES, levels_of

AT_ONCE = 4096
"""Noise levels of a window are read together while they are no more tokens than this: small clips cost less that way."""


@dataclass(frozen=True)
class ValidationLoss:
    """Which windows are read; ``held_out`` may be empty: then no validation is possible, and the reading says null."""

    held_out: tuple[Window, ...]
    train: tuple[Window, ...]
    seed: int


def read_validation(
    validation: ValidationLoss,
    family: Family,
    nets: Mapping[str, nn.Module],
    objective: Objective,
    batch_of: Callable[[Window], Batch],
) -> dict[str, Any]:
    """{"held_out": {mean, by_quantile, windows, clips} or None, "train": likewise}; plain mse averaged over the clips.

    ``clips``: the mse at each level of each clip (None: not read there), averaged over its windows, by the first digits of
    its id, as windows name it; each clip counts alike, however many windows it has. Each noise level is read by the expert
    whose it is; of ``nets`` one after the other is looked up, each once.
    """
    levels = objective.timesteps.quantiles(QUANTILES)
    parts = {"held_out": validation.held_out, "train": validation.train}
    errors = {part: torch.zeros(len(windows), QUANTILES, dtype=torch.float64) for part, windows in parts.items()}
    for expert in family.spec.experts:
        own = [i for i, t in enumerate(levels.tolist()) if _has(expert, t)]
        if not own:
            continue
        net = nets[expert.name]
        device, training = next(net.parameters()).device, net.training
        net.eval()
        try:
            with torch.no_grad():
                for part, windows in parts.items():
                    for place, (window, its) in enumerate(zip(windows, levels_of(windows), strict=True)):
                        batch = batch_of(window).map(lambda x, device=device: x.to(device))  # type: ignore[misc]
                        for some in _together([i for i in its if i in own], tokens_of(family, batch)):
                            found = _errors(validation.seed, window, some, levels, family, net, objective, batch)
                            errors[part][place, some] = found
        finally:
            net.train(training)
    return {part: _mean(errors[part], windows) for part, windows in parts.items()}


def noise_of(seed: int, window: Window, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The fixed noise of a window at a quantile, on the CPU."""
    # "ruler" is part of the seed: with another word every run would be validated with other noise
    return torch.from_numpy(draws(seed, "ruler", window.id, number).standard_normal(shape, "float32"))


def tokens_of(family: Family, batch: Batch) -> int:
    """How many tokens a sample of the batch is."""
    sides = zip(batch.x0.shape[2:], family.spec.patch, strict=True)
    return prod(-(-side // patch) for side, patch in sides)


def _together(numbers: Sequence[int], tokens: int) -> list[list[int]]:
    """The quantiles in groups that are read by one forward pass: by the sample's size alone, so that bits repeat."""
    count = max(1, AT_ONCE // tokens)
    return [list(numbers[i : i + count]) for i in range(0, len(numbers), count)]


def _errors(
    seed: int,
    window: Window,
    numbers: Sequence[int],
    levels: torch.Tensor,
    family: Family,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
) -> torch.Tensor:
    """The plain mse of a window at some levels, each with its own noise, float64 on the CPU."""
    device, shape, count = batch.x0.device, tuple(batch.x0.shape), len(numbers)
    noise = torch.cat([noise_of(seed, window, number, shape) for number in numbers])
    several = batch if count == 1 else batch.map(lambda x: x.repeat_interleave(count, 0))
    t = levels[list(numbers)].float().to(device)
    return denoising_loss(family, net, objective, several, t, noise.to(device)).mse.double().cpu()


def _mean(errors: torch.Tensor, windows: Sequence[Window]) -> dict[str, Any] | None:
    """A part of a reading from a (window, level) table; None: there was no window."""
    if not windows:
        return None
    names = [window.clip_id[:CLIP_DIGITS] for window in windows]
    clips: dict[str, list[float | None]] = {}
    for name, its in zip(names, levels_of(windows), strict=True):  # of a clip's windows all have the same levels
        rows = errors[[place for place, other in enumerate(names) if other == name]]
        clips[name] = [value if i in its else None for i, value in enumerate(rows.mean(0).tolist())]
    levels = [[level for level in column if level is not None] for column in zip(*clips.values(), strict=True)]
    means = [sum(level) / len(level) for level in levels]
    return {"mean": sum(means) / len(means), "by_quantile": means, "windows": len(windows), "clips": clips}


def related(
    reading: Mapping[str, Any] | None, first: Mapping[str, Any] | None, owners: Sequence[str] = ()
) -> dict[str, Any] | None:
    """A part of a reading as the journal has it: in relation to the same part of the set's first reading.

    Each clip's value is the mean over its levels of its error's ratio to the first reading's mean over the clips;
    ``normalised`` is the mean of these values. ``owners``: the expert of each quantile, where there are two; then each
    one's own value, the mean ratio at its levels, is given too.
    """
    if reading is None:
        return None
    before = (reading if first is None else first)["by_quantile"]
    out = {key: reading[key] for key in ("mean", "by_quantile", "windows")}
    clips = {name: _ratio(own, before, range(QUANTILES)) for name, own in reading["clips"].items()}
    finite = [value for value in clips.values() if value is not None]
    out["normalised"] = sum(finite) / len(finite) if len(finite) == len(clips) else None
    out["clips"] = clips
    names = list(dict.fromkeys(owners))
    if len(names) > 1:
        own = {name: [i for i, owner in enumerate(owners) if owner == name] for name in names}
        out["experts"] = {name: _ratio(reading["by_quantile"], before, own[name]) for name in names}
    return out


def owners(family: Family, objective: Objective) -> list[str]:
    """The expert whose each of the quantiles is, from little noise to much."""
    levels = objective.timesteps.quantiles(QUANTILES).tolist()
    return [next(expert.name for expert in family.spec.experts if _has(expert, t)) for t in levels]


def _has(expert: Expert, t: float) -> bool:
    return expert.t_lo <= t < expert.t_hi or t == expert.t_hi == 1


def _ratio(now: Sequence[float | None], before: Sequence[float | None], places: Collection[int]) -> float | None:
    """The mean of the ratios at the quantiles that were read; None where the first reading was not finite."""
    ratios = []
    for i in places:
        value, then = now[i], before[i]
        if value is None:
            continue
        if then is None:
            return None
        ratios.append(value / max(then, 1e-12))
    return sum(ratios) / len(ratios)
