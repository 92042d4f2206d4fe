"""What the keys about noise levels do to the levels that a run draws, and to its loss."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mpmath
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler

from tests.effects.effects_kit import Lab, job_of, moved, run_steps, source_of, trainer_of, watched, weights
from videotune.config.resolve import resolve
from videotune.diffusion.timesteps import Timesteps
from videotune.latent_cache.batches import prepare, uniforms
from videotune.rng import draws
from videotune.trainer.components import make_objective


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mode(u: float, scale: float) -> float:
    """In the paper's own time, where 1 is data."""
    return 1 - (1 - u) - scale * (math.cos(math.pi / 2 * (1 - u)) ** 2 - u)


def probit(u: float) -> float:
    return torch.special.ndtri(torch.tensor(u, dtype=torch.float64)).item()


LEVELS: list[tuple[str | None, dict[str, float], Callable[[float], float]]] = [
    ("UNIFORM", {}, lambda u: u),
    ("UNIFORM", {"shift": 5}, lambda u: 5 * u / (1 + 4 * u)),
    ("UNIFORM", {"shift": 0}, lambda u: 3 * u / (1 + 2 * u)),  # left to the family
    (None, {}, lambda u: logistic(probit(u))),
    ("LOGIT_NORMAL", {}, lambda u: logistic(probit(u))),
    ("LOGIT_NORMAL", {"mean": 0.7}, lambda u: logistic(0.7 + probit(u))),
    ("LOGIT_NORMAL", {"mean": -0.3, "std": 0.4}, lambda u: logistic(-0.3 + 0.4 * probit(u))),
    ("SIGMOID", {"scale": 1.0}, lambda u: logistic(probit(u))),
    ("SIGMOID", {"scale": 2.5}, lambda u: logistic(2.5 * probit(u))),
    ("MODE", {}, lambda u: mode(u, 1.29)),
    ("MODE", {"scale": -0.5}, lambda u: mode(u, -0.5)),
    ("MODE", {"scale": 0.8}, lambda u: mode(u, 0.8)),
]
"""Distribution, its numbers, and its inverse CDF."""


@pytest.mark.effect("timestep_mean", "timestep_std", "timestep_scale", "timestep_distribution", "timestep_shift")
@pytest.mark.parametrize(("name", "numbers", "inverse"), LEVELS)
def test_noise_levels_are_the_inverse_cdf_at_the_uniform_draws(
    name: str | None, numbers: dict[str, float], inverse: Callable[[float], float], lab: Lab
) -> None:
    knobs = {"timestep_shift": 1} | {f"timestep_{key}": value or None for key, value in numbers.items()}
    source = source_of(lab, knobs | ({"timestep_distribution": name} if name else {}))
    levels = [prepare(source, step).t.item() for step in range(1, 41)]
    assert levels == pytest.approx([inverse(draws(0, "t", step, 0).random()) for step in range(1, 41)], abs=1e-6)


@pytest.mark.effect("timestep_alpha", "timestep_beta", "timestep_distribution")
@pytest.mark.parametrize(("a", "b"), [(2.0, 2.0), (5.0, 2.0), (2.0, 5.0)])
def test_noise_levels_of_beta_have_its_cdf(a: float, b: float, lab: Lab) -> None:
    knobs = {"timestep_distribution": "BETA", "timestep_alpha": a, "timestep_beta": b, "timestep_shift": 1}
    source = source_of(lab, knobs)
    for step in range(1, 41):
        below = float(mpmath.betainc(a, b, 0, prepare(source, step).t.item(), regularized=True))
        assert below == pytest.approx(draws(0, "t", step, 0).random(), abs=1e-6)


@pytest.mark.effect("timestep_shift")
def test_the_shift_may_follow_each_bucket_s_tokens(lab: Lab) -> None:
    """A family that publishes the rule: e^μ, μ linear in the tokens. Another size, another shift, the same validation."""
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
    one, plain = (source_of(lab, {"timestep_stratified": stratified}) for stratified in (True, False))
    assert all(torch.equal(prepare(one, step).t, prepare(plain, step).t) for step in range(1, 11)), "one sample a step"


@pytest.mark.effect("loss_weighting", "loss_weighting_gamma")
def test_min_snr_prices_each_timestep_that_a_run_draws(lab: Lab, tiny_bases: Callable[..., Path]) -> None:
    """Of a v-prediction model: min(ᾱ, γ(1 - ᾱ)) of the plain error at each whole timestep, γ 5 where none is named."""
    cog = replace(lab, model=tiny_bases("cogvideox"), cache=lab.tmp / "cog")
    bars = CogVideoXDDIMScheduler.from_pretrained(cog.model, subfolder="scheduler").alphas_cumprod.numpy()
    levels, moves = [], []
    for weighting, gamma in (("none", None), ("min_snr", None), ("min_snr", 0.05)):
        knobs = {"loss_weighting": weighting, "loss_weighting_gamma": gamma, "steps": 6, "learning_rate": 1e-2}
        trainer = trainer_of(cog, knobs | {"video_config.target_fps": 16})
        before = weights(trainer)
        with watched(trainer.net) as calls:
            lines = run_steps(trainer)
        levels.append([call["t"].item() for call in calls])
        moves.append(moved(before, weights(trainer), "lora_B"))
        for k, line in zip(levels[0], lines, strict=True):
            price = 1 if weighting == "none" else min(bars[k], (gamma or 5) * (1 - bars[k]))
            assert line["loss"] == pytest.approx(price * line["mse"], rel=1e-4)
    assert trainer.source.objective.timesteps.distribution == "UNIFORM", "the family's own"
    assert levels[0] == levels[1] == levels[2]
    assert len(set(levels[0])) > 3
    assert min((one - other).abs().max() for one, other in itertools.combinations(moves, 2)) > 1e-4
