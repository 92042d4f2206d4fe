"""The validation loss: the same clips, noise levels and noise at every validation.

Two readings of one set differ only by the model. Held-out clips and some training
clips are read at nine fixed quantiles of the timestep distribution, each clip at a
third of them and with its own fixed noise. The loss is plain v-MSE without caption
dropout. Validation draws no random numbers from the training and changes nothing in it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from videotune.diffusion.loss import Objective, denoising_loss
from videotune.latent_cache.exposure import CLIP_DIGITS
from videotune.model_spec import Expert
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.trainer.step import tokens_per_sample
from videotune.types import Batch, Window
from videotune.validation.selection import QUANTILES, quantiles_by_window

TOKENS_PER_PASS = 4096
"""Noise levels of a window share a forward pass up to this many tokens.

This makes small clips cheaper.
"""


@dataclass(frozen=True)
class ValidationLoss:
    """The windows of a validation set and the seed of its noise."""

    held_out: tuple[Window, ...]
    """Empty if no clip is held out; the reading of this part is null then."""

    train: tuple[Window, ...]
    seed: int


def read_validation(
    validation: ValidationLoss,
    family: DiffusersModel,
    nets: Mapping[str, nn.Module],
    objective: Objective,
    batch_of: Callable[[Window], Batch],
) -> dict[str, Any]:
    """Measure the plain MSE of the held-out and the training windows.

    Each noise level is read by its expert.

    Args:
        validation: the windows and the seed of the noise.
        family: the model family.
        nets: network of each expert. They are looked up one after the other, each once.
        objective: the prediction target and the timestep distribution.
        batch_of: loads the batch of a window.

    Returns:
        {"held_out", "train"}, each {"mean", "by_quantile", "windows", "clips"} or None
        without windows. "clips" has the MSE of each clip at each level (None: not
        read), averaged over the clip's windows, by the first digits of the clip id.
        Means are over clips, so each clip counts the same.
    """
    levels = objective.timesteps.quantiles(QUANTILES).tolist()
    parts = {"held_out": validation.held_out, "train": validation.train}
    errors = {
        part: torch.zeros(len(windows), QUANTILES, dtype=torch.float64)
        for part, windows in parts.items()
    }

    for expert in family.spec.experts:
        quantiles = [i for i, t in enumerate(levels) if _covers(expert, t)]
        if not quantiles:
            continue
        net = nets[expert.name]
        was_training = net.training
        net.eval()
        reader = _WindowReader(validation.seed, family, net, objective, quantiles)
        try:
            with torch.no_grad():
                for part, windows in parts.items():
                    reader.read(windows, batch_of, errors[part])
        finally:
            net.train(was_training)
            # Otherwise this expert would stay in memory beside the next one.
            del reader, net

    return {
        part: average_over_clips(errors[part], windows)
        for part, windows in parts.items()
    }


@dataclass(frozen=True)
class _WindowReader:
    """Reads windows with the network of one expert."""

    seed: int
    family: DiffusersModel
    net: nn.Module
    objective: Objective
    quantiles: Sequence[int]
    """Indices of the expert's noise levels."""

    def read(
        self,
        windows: Sequence[Window],
        batch_of: Callable[[Window], Batch],
        errors: torch.Tensor,
    ) -> None:
        """Write the MSE of the windows into a table (window, quantile)."""
        device = next(self.net.parameters()).device
        levels_by_window = quantiles_by_window(windows)
        for index, (window, levels) in enumerate(
            zip(windows, levels_by_window, strict=True)
        ):
            batch = batch_of(window).map(lambda x: x.to(device))
            tokens = tokens_per_sample(self.family, batch)
            quantiles = [level for level in levels if level in self.quantiles]
            for group in _split_by_tokens(quantiles, tokens):
                errors[index, group] = self._errors(window, batch, group)

    def _errors(
        self, window: Window, batch: Batch, quantiles: Sequence[int]
    ) -> torch.Tensor:
        """Return the MSE of a window at some quantiles, float64 on the CPU.

        Each quantile has its own noise.
        """
        device = batch.x0.device
        shape = tuple(batch.x0.shape)
        count = len(quantiles)
        noise = torch.cat(
            [noise_of(self.seed, window, quantile, shape) for quantile in quantiles]
        )

        if count > 1:
            batch = batch.map(lambda x: x.repeat_interleave(count, 0))
        levels = self.objective.timesteps.quantiles(QUANTILES)[list(quantiles)]
        loss = denoising_loss(
            self.family,
            self.net,
            self.objective,
            batch,
            levels.float().to(device),
            noise.to(device),
        )
        return loss.mse.double().cpu()


def noise_of(
    seed: int, window: Window, quantile: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the fixed noise of a window at a quantile, on the CPU."""
    # "ruler" is part of the seed; another string would change the noise of every run.
    generator = generator_for(seed, "ruler", window.id, quantile)
    return torch.from_numpy(generator.standard_normal(shape, "float32"))


def _split_by_tokens(quantiles: Sequence[int], tokens: int) -> list[list[int]]:
    """Split quantiles into groups of one forward pass each.

    The group size depends only on the size of the sample, so results are reproducible.
    """
    size = max(1, TOKENS_PER_PASS // tokens)
    return [
        list(quantiles[start : start + size])
        for start in range(0, len(quantiles), size)
    ]


def average_over_clips(
    errors: torch.Tensor, windows: Sequence[Window]
) -> dict[str, Any] | None:
    """Average a table (window, quantile) over the windows of a clip, then over clips.

    Returns:
        One part of a reading, see ``read_validation``; None without windows.
    """
    if not windows:
        return None
    names = [window.clip_id[:CLIP_DIGITS] for window in windows]

    # All windows of a clip have the same levels.
    levels_by_clip = dict(zip(names, quantiles_by_window(windows), strict=True))
    clips: dict[str, list[float | None]] = {}
    for name, levels in levels_by_clip.items():
        rows = [index for index, row_name in enumerate(names) if row_name == name]
        means = errors[rows].mean(0).tolist()
        clips[name] = [
            mean if quantile in levels else None for quantile, mean in enumerate(means)
        ]

    by_quantile = []
    for column in zip(*clips.values(), strict=True):
        values = [value for value in column if value is not None]
        by_quantile.append(sum(values) / len(values))
    return {
        "mean": sum(by_quantile) / len(by_quantile),
        "by_quantile": by_quantile,
        "windows": len(windows),
        "clips": clips,
    }


def relative_to_first(
    reading: Mapping[str, Any] | None,
    first: Mapping[str, Any] | None,
    experts: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Relate one part of a reading to the same part of the set's first reading.

    A clip's value is the mean over its levels of the ratio of its error to the mean
    over clips of the first reading; "normalised" is the mean of these values.

    Args:
        reading: one part of ``read_validation``, or None.
        first: that part of the first reading; None: ``reading`` is the first.
        experts: the expert of each quantile. With two experts, the mean ratio of each
            at its own levels is added.

    Returns:
        The part as written to the journal, or None.
    """
    if reading is None:
        return None
    base = (reading if first is None else first)["by_quantile"]
    all_quantiles = range(QUANTILES)
    clips = {
        name: _mean_ratio(errors, base, all_quantiles)
        for name, errors in reading["clips"].items()
    }
    values = [value for value in clips.values() if value is not None]
    is_complete = len(values) == len(clips)

    part = {key: reading[key] for key in ("mean", "by_quantile", "windows")}
    part["normalised"] = sum(values) / len(values) if is_complete else None
    part["clips"] = clips
    names = list(dict.fromkeys(experts))
    if len(names) > 1:
        part["experts"] = {}
        for name in names:
            quantiles = [i for i, expert in enumerate(experts) if expert == name]
            ratio = _mean_ratio(reading["by_quantile"], base, quantiles)
            part["experts"][name] = ratio
    return part


def expert_by_quantile(family: DiffusersModel, objective: Objective) -> list[str]:
    """Return the name of the expert of each quantile, from least to most noise."""
    names = []
    for t in objective.timesteps.quantiles(QUANTILES).tolist():
        expert = next(item for item in family.spec.experts if _covers(item, t))
        names.append(expert.name)
    return names


def _covers(expert: Expert, t: float) -> bool:
    """Whether an expert is used at timestep ``t``."""
    return expert.t_lo <= t < expert.t_hi or t == expert.t_hi == 1


def _mean_ratio(
    errors: Sequence[float | None],
    base: Sequence[float | None],
    quantiles: Collection[int],
) -> float | None:
    """Return the mean of the ratios at the quantiles that were read.

    None if the first reading is not finite at one of them.
    """
    ratios = []
    for quantile in quantiles:
        error = errors[quantile]
        base_error = base[quantile]
        if error is None:
            continue
        if base_error is None:
            return None
        ratios.append(error / max(base_error, 1e-12))
    return sum(ratios) / len(ratios)
