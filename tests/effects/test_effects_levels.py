"""What the keys about noise levels do to the levels that a run draws, and to its loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch

from tests.effects.effects_kit import Lab, job_of, run_steps, source_of, trainer_of
from videotune.config.resolve import resolve
from videotune.diffusion.timesteps import Timesteps
from videotune.latent_cache.batches import prepare, uniforms
from videotune.models.cogvideox import CogVideoX
from videotune.rng import draws
from videotune.trainer.components import make_objective


def levels(lab: Lab, **knobs: Any) -> tuple[list[float], list[float]]:
    """The noise levels of 40 steps without a shift, and the uniform draws that they were made from."""
    source = source_of(lab, {"timestep_shift": 1} | knobs)
    steps = range(1, 41)
    return [prepare(source, k).t.item() for k in steps], [draws(0, "t", k, 0).random() for k in steps]


def probit(u: float) -> float:
    return torch.special.ndtri(torch.tensor(u, dtype=torch.float64)).item()


@pytest.mark.effect("timestep_mean", "timestep_std", "timestep_distribution")
def test_logit_normal_has_the_mean_and_the_spread_that_are_told(lab: Lab) -> None:
    for mean, std in ((0.0, 1.0), (0.7, 1.0), (-0.3, 0.4)):
        t, u = levels(lab, timestep_distribution="LOGIT_NORMAL", timestep_mean=mean, timestep_std=std)
        assert t == pytest.approx([1 / (1 + math.exp(-(mean + std * probit(x)))) for x in u], abs=1e-6)


@pytest.mark.effect("timestep_scale", "timestep_distribution")
def test_sigmoid_and_mode_have_the_scale_that_is_told(lab: Lab) -> None:
    for scale in (1.0, 2.5):
        t, u = levels(lab, timestep_distribution="SIGMOID", timestep_scale=scale)
        assert t == pytest.approx([1 / (1 + math.exp(-scale * probit(x))) for x in u], abs=1e-6)
    for scale in (-0.5, 0.8):
        t, u = levels(lab, timestep_distribution="MODE", timestep_scale=scale)
        assert t == pytest.approx([x - scale * (math.sin(math.pi / 2 * x) ** 2 - x) for x in u], abs=1e-6)


@pytest.mark.effect("timestep_alpha", "timestep_beta", "timestep_distribution")
def test_beta_has_the_numbers_that_are_told(lab: Lab) -> None:
    for a, b in ((2.0, 2.0), (5.0, 2.0), (2.0, 5.0)):
        t, u = levels(lab, timestep_distribution="BETA", timestep_alpha=a, timestep_beta=b)
        below = [float(mpmath.betainc(a, b, 0, x, regularized=True)) for x in t]
        assert below == pytest.approx(u, abs=1e-6)


@pytest.mark.effect("timestep_shift")
def test_the_shift_may_follow_each_bucket_s_tokens(lab: Lab) -> None:
    """A family that publishes the rule: e^μ, μ linear in the tokens. Another size, another shift; the ruler stays."""
    shifts = {}
    for size in ("32x32", "64x64"):
        job = job_of(lab, {"resolution": size, "timestep_distribution": "UNIFORM"})
        spec = replace(job.spec, shift_by_tokens=(10, 0.5, 50, 1.5))
        config = job.config.model_copy(update={"timestep_shift": "resolution"})
        source = source_of(lab, {"resolution": size, "timestep_distribution": "UNIFORM"})
        source = replace(source, objective=make_objective(spec, config), spec=spec, config=config)
        tokens = spec.tokens(job.shapes[0])
        shift = shifts[tokens] = math.exp(0.5 + (tokens - 10) / 40)
        for step in (1, 2, 3):
            u = draws(0, "t", step, 0).random()
            assert prepare(source, step).t.item() == pytest.approx(shift * u / (1 + (shift - 1) * u), abs=1e-6)
        fixed = Timesteps("UNIFORM", spec.timestep_shift)
        assert torch.equal(source.objective.timesteps.quantiles(9), fixed.quantiles(9))
    assert len(shifts) == 2
    assert resolve({"timestep_shift": "resolution"}, {}, spec).config.timestep_shift == "resolution"


@pytest.mark.effect("timestep_stratified")
def test_the_samples_of_a_step_cover_the_distribution_evenly(lab: Lab) -> None:
    """Of a step's n samples each nth of the distribution has exactly one, whatever way the step is split."""
    for stratified in (False, True):
        filled = []
        for split in ({"batch_size": 8}, {"batch_size": 2, "gradient_accumulation_steps": 4}):
            knobs = {"timestep_stratified": stratified, "timestep_distribution": "UNIFORM", "timestep_shift": 1}
            source = source_of(lab, knobs | split)
            drawn = [prepare(source, step).t for step in range(1, 11)]
            filled.append([sorted((t * 8).long().tolist()) == list(range(8)) for t in drawn])
            wanted = [Timesteps().draw(uniforms(0, step, 8, stratified)) for step in range(1, 11)]
            assert all(torch.equal(one, other) for one, other in zip(drawn, wanted, strict=True))
        assert filled[0] == filled[1]
        assert all(filled[0]) if stratified else not any(filled[0])


@pytest.mark.effect("timestep_stratified")
def test_one_sample_a_step_is_drawn_as_ever(lab: Lab) -> None:
    assert levels(lab, timestep_stratified=True)[0] == levels(lab)[0]


@pytest.mark.effect("loss_weighting_gamma")
def test_gamma_is_where_the_weight_is_capped(lab: Lab) -> None:
    """min(ᾱ, γ(1 - ᾱ)) of the plain error at the run's own draws."""
    from diffusers import CogVideoXDDIMScheduler

    cog = replace(lab, model=CogVideoX.tiny(lab.tmp / "model"), cache=lab.tmp / "cog")
    bars = CogVideoXDDIMScheduler.from_pretrained(cog.model, subfolder="scheduler").alphas_cumprod.numpy()
    losses = {}
    for gamma in (0.05, 5.0):
        trainer = trainer_of(
            cog,
            {
                "loss_weighting": "min_snr",
                "loss_weighting_gamma": gamma,
                "video_config.target_fps": 16,
                "learning_rate": 1e-9,
            },
        )
        losses[gamma] = []
        for step, line in enumerate(run_steps(trainer), 1):
            k = round(prepare(trainer.source, step).t.item() * 999)
            assert line["loss"] == pytest.approx(min(bars[k], gamma * (1 - bars[k])) * line["mse"], rel=1e-4)
            losses[gamma].append(line["loss"])
    assert losses[0.05] != losses[5.0]
