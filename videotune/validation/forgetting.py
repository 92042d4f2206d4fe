"""What a training cost the base model: how far its predictions for prompts that have
nothing to do with the clips have moved.

At fixed draws three things are measured. The distance of a prediction from the base
model's. The guidance that is left: how much of the prompt's effect on the base model's
prediction is still there; a base that was distilled with guidance loses it if it is
trained on plain clips. And few steps: how far a path of few denoising steps ends from one
of four times as many. docs/monitor.md has the formulas and the evidence for the bounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from videotune.rng import generator_for
from videotune.validation.chance import mean_and_chance

FORGETTING = "FORGETTING"
UNDISTILLING = "UNDISTILLING"

LEVELS = 4
"""Noise levels at which a prompt is read."""

FINE_FACTOR = 4
"""How many times more steps the path has that a path of few steps is compared with."""

GUIDANCE_LOSS = 0.2
"""The least share of guidance whose loss is called."""

PATH_GROWTH = 1.5
"""The least growth of the error of few steps that is called."""

FEW_STEP_ERROR = 0.25
"""The largest error of few steps of a base model that was made for few steps."""

DISTILLED_GUIDANCE = 0.54
"""Below this, a base model's own guidance shows that it was distilled; see
``own_guidance``.
"""

OWN_GUIDANCE_AT = (0.98, 0.98)
"""Noise levels at which the own guidance is read, each with its own noise."""


@dataclass(frozen=True)
class Predictions:
    """The velocities that a model predicts for prompts at fixed noisy latents.

    Each is (P,Q,N) float32 on the CPU: P prompts, Q noise levels, N numbers of a sample.
    """

    prompt: Tensor
    """With the prompt."""
    empty: Tensor
    """With the empty prompt."""


@dataclass(frozen=True)
class KeptReading:
    """How far a model's predictions are from those of its base model."""

    distance: Tensor
    """(Q,): the distance, as a share of the size of the base model's prediction."""
    guidance: Tensor
    """(P,): the share of the prompt's effect that is left; 1 is the base model's."""
    guidance_by_level: Tensor
    """(Q,): the same at each noise level, over all prompts."""
    effect: Tensor
    """(P,): the distance, as a share of the prompt's effect on the base model."""


def compare(base: Predictions, prediction: Tensor) -> KeptReading:
    """Compare predictions with those of the base model.

    With v_b(c) and v_b(∅) of the base model and v(c) of the trained one, g = v_b(c) -
    v_b(∅) is the prompt's effect, and the guidance left is ⟨v(c) - v_b(∅), g⟩ / ⟨g, g⟩.
    The sums of a prompt run over its noise levels, so those count most at which the
    prompt has most effect.

    Args:
        base: of the base model.
        prediction: (P,Q,N), with the prompt.
    """
    change = (prediction - base.prompt).double()
    effect = (base.prompt - base.empty).double()
    change_squared = change.square().sum(2)
    effect_squared = effect.square().sum(2)
    base_squared = base.prompt.double().square().sum(2)
    along_effect = ((prediction - base.empty).double() * effect).sum(2)

    return KeptReading(
        distance=(change_squared / base_squared).sqrt().mean(0),
        guidance=along_effect.sum(1) / effect_squared.sum(1),
        guidance_by_level=along_effect.sum(0) / effect_squared.sum(0),
        effect=(change_squared.sum(1) / effect_squared.sum(1)).sqrt(),
    )


def own_guidance(base: Predictions, data: Tensor) -> float:
    """Return how much of the prompt's effect on a model its own samples confirm.

    The velocity of the data is regressed on the prompt's effect, at much noise. A model
    that predicts the mean over the data has about 1. One that was distilled with
    guidance has less: it predicts a multiple of what the data says.

    Args:
        base: of the model.
        data: (P,Q,N), the velocities of the samples that noise was added to.
    """
    effect = (base.prompt - base.empty).double()
    along_effect = ((data - base.empty).double() * effect).sum()
    return float(along_effect / effect.square().sum())


def path_error(coarse: Tensor, fine: Tensor) -> float:
    """Return how far a path of few steps ends from a finer one, as a share of the
    standard deviation of the finer one's latents.
    """
    error = (coarse.double() - fine.double()).square().mean().sqrt()
    return float(error / fine.double().std())


def to_json(
    reading: KeptReading, path_errors: Sequence[float], base_errors: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a reading for the journal.

    Args:
        reading: the reading.
        path_errors: error of few steps for each prompt.
        base_errors: that of the base model.
    """
    growth = [
        error / max(base_error, 1e-9)
        for error, base_error in zip(path_errors, base_errors, strict=True)
    ]

    return {
        "distance": {
            "mean": rounded(float(reading.distance.mean())),
            "by_level": _rounded_all(reading.distance.tolist()),
        },
        "guidance": {
            "mean": rounded(float(reading.guidance.mean())),
            "by_level": _rounded_all(reading.guidance_by_level.tolist()),
            "by_prompt": _rounded_all(reading.guidance.tolist()),
        },
        "effect": {
            "mean": rounded(float(reading.effect.mean())),
            "by_prompt": _rounded_all(reading.effect.tolist()),
        },
        "few_steps": {
            "error": rounded(sum(path_errors) / len(path_errors)),
            "base": rounded(sum(base_errors) / len(base_errors)),
            "growth_by_prompt": _rounded_all(growth),
        },
    }


def rounded(value: float) -> float | None:
    """Round to five significant digits; None if it is not finite."""
    if value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.5g}")


def _rounded_all(values: Sequence[float]) -> list[float | None]:
    return [rounded(value) for value in values]


@dataclass(frozen=True)
class KeptVerdict:
    """What a reading says of the base model's abilities."""

    label: str | None
    """FORGETTING or UNDISTILLING; None: nothing is lost."""
    reason: str
    """A sentence for the user."""


def judge_kept(figures: Mapping[str, Any], *, is_distilled: bool) -> KeptVerdict:
    """Return the verdict of a reading.

    Whatever is called exceeds both a fixed bound and what the scatter over the prompts
    explains by chance.

    Args:
        figures: as ``to_json`` gives them.
        is_distilled: whether the base model was distilled, with guidance or for few
            steps.
    """
    guidance = figures["guidance"]
    effect = figures["effect"]
    growths = figures["few_steps"]["growth_by_prompt"]
    if None in (*guidance["by_prompt"], *effect["by_prompt"], *growths):
        return KeptVerdict(None, "a prediction is not finite")

    lost = [1 - share for share in guidance["by_prompt"]]
    has_lost_guidance = _exceeds(lost, GUIDANCE_LOSS)
    guidance_left = f"{100 * guidance['mean']:.0f}% of the prompts' effect is left"
    if is_distilled and has_lost_guidance:
        return KeptVerdict(
            UNDISTILLING,
            f"{guidance_left} on prompts that have nothing to do with the clips: what "
            "the base model was distilled to do without guidance is trained away",
        )

    few_steps = figures["few_steps"]
    is_for_few_steps = is_distilled and few_steps["base"] < FEW_STEP_ERROR
    log_growth = [log(max(growth, 1e-9)) for growth in growths]
    if is_for_few_steps and _exceeds(log_growth, log(PATH_GROWTH)):
        return KeptVerdict(
            UNDISTILLING,
            f"the error of few denoising steps grew from {few_steps['base']:.3g} to "
            f"{few_steps['error']:.3g}: what the base model was distilled to do in few "
            "steps is trained away",
        )

    if has_lost_guidance:
        return KeptVerdict(
            FORGETTING,
            f"only {guidance_left} on prompts that have nothing to do with the clips: "
            "the model no longer follows them as it did before training",
        )
    if _exceeds(effect["by_prompt"], 1.0):
        return KeptVerdict(
            FORGETTING,
            "the training changes videos of prompts that have nothing to do with the "
            f"clips {effect['mean']:.2g} times as much as leaving the prompt out would",
        )
    return KeptVerdict(
        None,
        f"{guidance_left} on prompts that have nothing to do with the clips, and their "
        f"videos change {effect['mean']:.2g} times as much as leaving the prompt out "
        "would",
    )


def _exceeds(values: Sequence[float], bound: float) -> bool:
    """Whether the mean of values is above a bound by more than chance."""
    mean, chance = mean_and_chance([value - bound for value in values])
    return mean > chance


def noise_of(
    seed: int,
    prompt: int,
    level: int,
    shape: Sequence[int],
    name: str = "forgetting",
) -> Tensor:
    """Return the fixed noise of a prompt at a noise level, on the CPU."""
    generator = generator_for(seed, name, prompt, level)
    return torch.from_numpy(generator.standard_normal(tuple(shape), "float32"))
