"""Targets that the base model corrects: what ``denoising_loss`` may learn in place of
the data's v.

Each runs the base for the same noisy inputs, without a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from videotune.diffusion.loss import (
    Objective,
    Predictor,
    noisy_and_velocity,
    noisy_sound,
    predict_and_target,
)
from videotune.types import Batch, Conditioning, Velocity, take_rows


def prior_target(
    family: Predictor,
    base: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    samples: Sequence[int],
    data: Velocity | None = None,
) -> Velocity:
    """Return a target for ``denoising_loss`` that keeps some samples as the base has
    them.

    A regularization sample is to stay at what the base predicts for the same x_t, t and
    caption (Li & Hoiem 2016, "Learning without forgetting", arXiv 1606.09282). Only
    these samples run through the base, without a graph.

    Args:
        family: Predicts v.
        base: The base model's denoiser.
        objective: The objective.
        batch: The batch.
        t: Noise levels (B,).
        noise: (B,C,F,H,W).
        samples: Indices of the samples whose target the base predicts.
        data: The target of the other samples. None: v of the data.

    Returns:
        ``data`` and, for ``samples``, v of the base.
    """
    prior_batch = batch.take(samples)
    prior_t = take_rows(t, samples)
    prior_noise = take_rows(noise, samples)
    with torch.no_grad():
        prediction, _ = predict_and_target(
            family, base, objective, prior_batch, prior_t, prior_noise
        )

    if data is None:
        data = data_velocity(objective, batch, t, noise)
    video = _with_rows(data.video, samples, prediction.video)
    if data.sound is None or prediction.sound is None:
        return Velocity(video)
    return Velocity(video, _with_rows(data.sound, samples, prediction.sound))


def data_velocity(
    objective: Objective, batch: Batch, t: Tensor, noise: Tensor
) -> Velocity:
    """Return v of the data of a batch, and of its sound."""
    _, v = noisy_and_velocity(objective, batch, t, noise)
    if batch.sound is None:
        return Velocity(v)
    _, sound_v = noisy_sound(objective, batch.sound)
    return Velocity(v, sound_v)


@dataclass(frozen=True)
class BaseGuidance:
    """The guidance that a base model was distilled with."""

    scale: float
    """The guidance scale w, above 1."""
    empty: Conditioning
    """The empty caption's states, of one sample."""


def guided_target(
    family: Predictor,
    base: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    guidance: BaseGuidance,
) -> Velocity:
    """Return a target for ``denoising_loss`` that keeps a base model's guidance.

    A base that was distilled with guidance w predicts v(∅) + w·g, with g the caption's
    effect, while the data has v(∅) + g on average: trained on plain data it loses the
    difference. The target is v + (1 - 1/w)·(v_b(c) - v_b(∅)), where v is the data's and
    v_b the base's, whose effect of the caption is w·g.

    Args:
        family: Predicts v.
        base: The base model's denoiser.
        objective: The objective.
        batch: The batch.
        t: Noise levels (B,).
        noise: (B,C,F,H,W).
        guidance: What the base was distilled with.
    """
    conditioning = guidance.empty.take([0] * len(batch))
    # A clip's own states, such as its first frame, stay; those of the text, which come
    # last here, become those of the empty caption.
    extras = {**batch.conditioning.extras, **conditioning.extras}
    without_caption = replace(batch, conditioning=replace(conditioning, extras=extras))
    with torch.no_grad():
        with_prompt, velocity = predict_and_target(
            family, base, objective, batch, t, noise
        )
        empty, _ = predict_and_target(
            family, base, objective, without_caption, t, noise
        )

    share = 1 - 1 / guidance.scale
    video = velocity.video + share * (with_prompt.video - empty.video)
    if velocity.sound is None or with_prompt.sound is None or empty.sound is None:
        return Velocity(video)
    sound = velocity.sound + share * (with_prompt.sound - empty.sound)
    return Velocity(video, sound)


def _with_rows(x: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return a tensor with some of its first dimension's rows replaced."""
    result = list(x)
    for row, value in zip(rows, values, strict=True):
        result[row] = value
    return torch.stack(result)
