"""What a training step returns for the journal: losses, norms, learning rates and
seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.accelerator import has_streams
from videotune.trainer.micro_batches import MicroBatch
from videotune.trainer.network_pass import PassOutput

NOISE_LEVEL_BINS = 9
"""Parts of [0, 1] over which the journal averages the error."""

LOSS = 0
GRAD_NORM = 1
LOSS_SCALE = 2
FIRST_MSE = 3
"""Positions in the values of a step, see ``empty_values``."""


def empty_values(step_batch: StepBatch, device: torch.device) -> Tensor:
    """Return zeros for the values of a step: [loss, gradient norm, factor of the loss (0:
    none), mse of each sample]; if video and sound are learnt, the sound's mse of each
    sample follows.
    """
    errors = step_batch.errors_per_sample * len(step_batch.window_ids)
    return torch.zeros(FIRST_MSE + errors, device=device)


def write_values(
    values: Tensor,
    micro_batch: MicroBatch,
    output: PassOutput,
    samples_in_step: int,
) -> None:
    """Add the loss and errors of a micro-batch to the values of a step."""
    values[LOSS] += output.weighted_loss
    first = FIRST_MSE + micro_batch.first_sample
    values[first : first + len(output.mse)] = output.mse
    if output.sound_mse is not None:
        first += samples_in_step
        values[first : first + len(output.mse)] = output.sound_mse


@dataclass(frozen=True)
class StepRecord:
    """The results of a step.

    A record is returned before the device has finished the step. ``read`` waits for its
    values. It is called one step late as a rule, so that the device already has the next
    step while the host waits (``loop.DelayedJournal``).
    """

    step: int
    values: Tensor
    """The values of the step, on the host once ``arrived``."""
    arrived: torch.Event | None
    """When ``values`` have been copied to the host; None if they are there already."""
    t: Tensor
    lr: Mapping[str, float]
    """Learning rates by parameter group."""
    window_ids: tuple[str, ...]
    captions: tuple[str, ...]
    clock: Clock
    expert: str | None = None
    sound_t: Tensor | None = None
    """Noise levels of the sound, if video and sound are learnt."""

    def read(self) -> dict[str, Any]:
        """Return the step's line of the journal, with plain numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, grad_norm, loss_scale, *errors = self.values.tolist()
        samples = len(self.window_ids)
        mse = errors[:samples]

        line: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "loss": loss,
            "mse": sum(mse) / len(mse),
            "by_t": loss_by_noise_level(self.t.tolist(), mse),
            "lr": dict(self.lr),
            "grad_norm": grad_norm,
            "window_ids": list(self.window_ids),
            "seconds": self.clock.read(),
        }
        if self.expert:
            line["expert"] = self.expert
        if self.sound_t is not None:
            sound_mse = errors[samples:]
            line["sound"] = {
                "mse": sum(sound_mse) / len(sound_mse),
                "by_t": loss_by_noise_level(self.sound_t.tolist(), sound_mse),
            }
        if loss_scale:
            line["loss_scale"] = loss_scale
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            line["skipped"] = True
        return line

    def broken(self) -> tuple[str, ...]:
        """Return the windows with an error that is not finite; all windows if only the
        gradient is not finite. ``read`` must have been called.
        """
        errors = self.values.tolist()[FIRST_MSE:]
        samples = len(self.window_ids)
        # errors[index::samples]: the sample's error of the video, and that of its sound.
        broken = tuple(
            window_id
            for index, window_id in enumerate(self.window_ids)
            if not all(map(math.isfinite, errors[index::samples]))
        )
        return broken or self.window_ids


class Clock:
    """Measure the seconds of each phase of a step; ``end_phase(phase)`` ends one.

    On a device with streams a mark is an event, which is read when the step is long
    over.

    "forward" also holds what precedes a pass: copies to the device, captions that are
    encoded in the step and passes of the base model. If the expert has not changed, the
    call that activates it is counted here as well. With CUDA graphs "forward" holds only
    these: a graph, forward and backward, counts as "backward".
    """

    def __init__(
        self, device: torch.device, on_phase: Callable[[str], None] | None = None
    ) -> None:
        self._overlaps = has_streams(device)
        self._on_phase = on_phase
        self._marks: list[tuple[str, float, torch.Event | None]] = []
        self.end_phase("start")

    def end_phase(self, phase: str) -> None:
        """Count the time since the last mark as ``phase``."""
        if self._on_phase is not None:
            self._on_phase(phase)

        event = None
        if self._overlaps:
            event = torch.Event(enable_timing=True)
            event.record()
        self._marks.append((phase, time.perf_counter(), event))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase, summed over micro-batches."""
        seconds_by_phase: dict[str, float] = {}
        for previous, current in zip(self._marks, self._marks[1:], strict=False):
            _, begun, begin_event = previous
            phase, ended, end_event = current
            if begin_event is not None and end_event is not None:
                seconds = begin_event.elapsed_time(end_event) / 1000
            else:
                seconds = ended - begun
            seconds_by_phase[phase] = round(
                seconds_by_phase.get(phase, 0.0) + seconds, 6
            )
        return seconds_by_phase


def loss_by_noise_level(t: Sequence[float], mse: Sequence[float]) -> list[float | None]:
    """Return the mean mse by noise level, for each ninth of [0, 1]; None without a
    sample.
    """
    sums = [0.0] * NOISE_LEVEL_BINS
    counts = [0] * NOISE_LEVEL_BINS
    for noise_level, value in zip(t, mse, strict=True):
        noise_bin = min(NOISE_LEVEL_BINS - 1, int(noise_level * NOISE_LEVEL_BINS))
        sums[noise_bin] += value
        counts[noise_bin] += 1
    return [
        total / count if count else None
        for total, count in zip(sums, counts, strict=True)
    ]
