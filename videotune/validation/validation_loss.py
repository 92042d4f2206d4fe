"""The validation loss: the same clips, noise levels and noise at every validation.

Two readings of one set differ only by the model. Held-out clips and some training
clips are read at nine fixed quantiles of the timestep distribution, each clip at a
third of them and with its own fixed noise. The loss is plain v-MSE without caption
dropout. Validation draws no random numbers from the training and changes nothing in it.

A run whose target keeps the base model's guidance is read against that target: against
the clips' own v a model that does what it is trained for would look worse than one that
loses the guidance. The error against the clips stands beside it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from videotune.adapters.lora import adapter_off
from videotune.diffusion.base_targets import BaseGuidance, guided_target
from videotune.diffusion.loss import Objective, loss_between, predict_and_target
from videotune.latent_cache.exposure import CLIP_DIGITS
from videotune.model_spec import Expert
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.trainer.network_pass import tokens_per_sample
from videotune.types import Batch, LossOutput, Window
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
    base_guidance: BaseGuidance | None = None,
) -> dict[str, Any]:
    """Measure the plain MSE of the held-out and the training windows.

    Each noise level is read by its expert.

    Args:
        validation: the windows and the seed of the noise.
        family: the model family.
        nets: network of each expert. They are looked up one after the other, each once.
        objective: the prediction target and the timestep distribution.
        batch_of: loads the batch of a window.
        base_guidance: the guidance of the base model that the run's target keeps.

    Returns:
        {"held_out", "train"}, each {"mean", "by_quantile", "windows", "clips"} or None
        without windows; if video and sound are learnt, "sound" with the same of the
        windows with sound; and with ``base_guidance`` "plain" with the same against
        the clips alone. "clips" has the MSE of each clip at each level (None: not
        read), averaged over the clip's windows, by the first digits of the clip id.
        Means are over clips, so each clip counts the same.
    """
    levels = objective.timesteps.quantiles(QUANTILES).tolist()
    parts = {"held_out": validation.held_out, "train": validation.train}
    tables = {part: _ErrorTables.of(windows) for part, windows in parts.items()}
    plain_tables = {part: _ErrorTables.of(windows) for part, windows in parts.items()}

    for expert in family.spec.experts:
        quantiles = [i for i, t in enumerate(levels) if covers(expert, t)]
        if not quantiles:
            continue
        net = nets[expert.name]
        was_training = net.training
        net.eval()
        reader = _WindowReader(
            validation.seed, family, net, objective, quantiles, base_guidance
        )
        try:
            with torch.no_grad():
                for part, windows in parts.items():
                    reader.read(windows, batch_of, tables[part], plain_tables[part])
        finally:
            net.train(was_training)
            # Otherwise this expert would stay in memory beside the next one.
            del reader, net

    has_sound = family.spec.generates == ("video", "sound")
    reading = _averages(parts, tables, has_sound=has_sound)
    if base_guidance is not None:
        reading["plain"] = _averages(parts, plain_tables, has_sound=has_sound)
    return reading


@dataclass(frozen=True)
class _ErrorTables:
    """MSE of windows (window, quantile), float64."""

    errors: torch.Tensor
    sound_errors: torch.Tensor
    """Those of the sound, where it is learnt beside the video."""

    @classmethod
    def of(cls, windows: Sequence[Window]) -> "_ErrorTables":
        """Return zeros for windows."""
        size = (len(windows), QUANTILES)
        return cls(
            torch.zeros(size, dtype=torch.float64),
            torch.zeros(size, dtype=torch.float64),
        )

    def write(self, window: int, quantiles: Sequence[int], output: LossOutput) -> None:
        """Write the MSE of a window at some quantiles."""
        self.errors[window, quantiles] = output.mse.double().cpu()
        if output.sound_mse is not None:
            self.sound_errors[window, quantiles] = output.sound_mse.double().cpu()

    def average_of_sound(self, windows: Sequence[Window]) -> dict[str, Any] | None:
        """Average over the windows with sound."""
        rows = [index for index, window in enumerate(windows) if window.shape.sound]
        levels = quantiles_by_window(windows)
        return average_over_clips(
            self.sound_errors[rows],
            [windows[index] for index in rows],
            [levels[index] for index in rows],
        )


def _averages(
    parts: Mapping[str, Sequence[Window]],
    tables: Mapping[str, _ErrorTables],
    *,
    has_sound: bool,
) -> dict[str, Any]:
    """Return the averages of tables, as ``read_validation`` does."""
    averages: dict[str, Any] = {
        part: average_over_clips(tables[part].errors, windows)
        for part, windows in parts.items()
    }
    if has_sound:
        averages["sound"] = {
            part: tables[part].average_of_sound(windows)
            for part, windows in parts.items()
        }
    return averages


@dataclass(frozen=True)
class _WindowReader:
    """Reads windows with the network of one expert."""

    seed: int
    family: DiffusersModel
    net: nn.Module
    objective: Objective
    quantiles: Sequence[int]
    """Indices of the expert's noise levels."""
    base_guidance: BaseGuidance | None
    """The guidance of the base model that the target keeps."""

    def read(
        self,
        windows: Sequence[Window],
        batch_of: Callable[[Window], Batch],
        tables: _ErrorTables,
        plain_tables: _ErrorTables,
    ) -> None:
        """Write the MSE of the windows into tables.

        Args:
            windows: the windows.
            batch_of: loads the batch of a window.
            tables: MSE against the run's target.
            plain_tables: MSE against the clips alone.
        """
        device = self.family.device
        levels_by_window = quantiles_by_window(windows)
        for index, (window, levels) in enumerate(
            zip(windows, levels_by_window, strict=True)
        ):
            batch = batch_of(window).map(lambda x: x.to(device))
            tokens = tokens_per_sample(self.family, batch)
            quantiles = [level for level in levels if level in self.quantiles]
            for group in split_by_tokens(quantiles, tokens):
                output, plain_output = self._outputs(window, batch, group)
                tables.write(index, group, output)
                plain_tables.write(index, group, plain_output)

    def _outputs(
        self, window: Window, batch: Batch, quantiles: Sequence[int]
    ) -> tuple[LossOutput, LossOutput]:
        """Return the losses of a window at some quantiles, against the run's target and
        against the clip alone.

        Each quantile has its own noise. Video and sound have the same noise levels.
        """
        device = batch.x0.device
        shape = tuple(batch.x0.shape)
        count = len(quantiles)
        noise = torch.cat(
            [noise_of(self.seed, window, quantile, shape) for quantile in quantiles]
        )

        if count > 1:
            batch = batch.take([0] * count)
        levels = self.objective.timesteps.quantiles(QUANTILES)[list(quantiles)]
        t = levels.float().to(device)
        if batch.sound is not None and not batch.sound.is_conditioning:
            sound_shape = (1, *batch.sound.x0.shape[1:])
            sound_noise = torch.cat(
                [
                    noise_of(self.seed, window, quantile, sound_shape, "ruler sound")
                    for quantile in quantiles
                ]
            )
            sound = replace(batch.sound, t=t, noise=sound_noise.to(device))
            batch = replace(batch, sound=sound)

        arguments = (self.family, self.net, self.objective, batch, t, noise.to(device))
        prediction, velocity = predict_and_target(*arguments)
        plain_output = loss_between(self.objective, batch, t, prediction, velocity)
        if self.base_guidance is None:
            return plain_output, plain_output
        with adapter_off(self.net):
            target = guided_target(*arguments, self.base_guidance)
        return loss_between(self.objective, batch, t, prediction, target), plain_output


def noise_of(
    seed: int,
    window: Window,
    quantile: int,
    shape: tuple[int, ...],
    name: str = "ruler",
) -> torch.Tensor:
    """Return the fixed noise of a window at a quantile, on the CPU."""
    # The name is part of the seed; another one would change the noise of every run.
    generator = generator_for(seed, name, window.id, quantile)
    return torch.from_numpy(generator.standard_normal(shape, "float32"))


def split_by_tokens(quantiles: Sequence[int], tokens: int) -> list[list[int]]:
    """Split quantiles into groups of one forward pass each.

    The group size depends only on the size of the sample, so results are reproducible.
    """
    size = max(1, TOKENS_PER_PASS // tokens)
    return [
        list(quantiles[start : start + size])
        for start in range(0, len(quantiles), size)
    ]


def average_over_clips(
    errors: torch.Tensor,
    windows: Sequence[Window],
    levels: Sequence[range] | None = None,
) -> dict[str, Any] | None:
    """Average a table (window, quantile) over the windows of a clip, then over clips.

    Args:
        errors: the table.
        windows: of its rows.
        levels: the quantiles at which each window was read. None: those of a set of just
            these windows.

    Returns:
        One part of a reading, see ``read_validation``; None without windows.
    """
    if not windows:
        return None
    names = [window.clip_id[:CLIP_DIGITS] for window in windows]

    # All windows of a clip have the same levels.
    if levels is None:
        levels = quantiles_by_window(windows)
    levels_by_clip = dict(zip(names, levels, strict=True))
    clips: dict[str, list[float | None]] = {}
    for name, clip_levels in levels_by_clip.items():
        rows = [index for index, row_name in enumerate(names) if row_name == name]
        means = errors[rows].mean(0).tolist()
        clips[name] = [
            mean if quantile in clip_levels else None
            for quantile, mean in enumerate(means)
        ]

    by_quantile: list[float | None] = []
    for column in zip(*clips.values(), strict=True):
        values = [value for value in column if value is not None]
        # Of few clips with sound, some levels are read by none.
        by_quantile.append(sum(values) / len(values) if values else None)
    means = [mean for mean in by_quantile if mean is not None]
    return {
        "mean": sum(means) / len(means),
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
        expert = next(item for item in family.spec.experts if covers(item, t))
        names.append(expert.name)
    return names


def covers(expert: Expert, t: float) -> bool:
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
