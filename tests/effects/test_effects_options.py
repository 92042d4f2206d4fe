"""What the keys about the range of noise levels, the loss, groups of parameters and intervals in epochs do."""

from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, source_of, take, trainer_of
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import prepare
from videotune.rng import draws


@pytest.mark.effect("timestep_min", "timestep_max")
@pytest.mark.parametrize(("lo", "hi"), [(0.0, 1.0), (0.25, 1.0), (0.0, 0.5), (0.25, 0.5)])
def test_noise_levels_outside_of_the_range_are_not_drawn(lo: float, hi: float, lab: Lab) -> None:
    """The distribution is truncated, so that the draws within keep their proportions; validation reads it too."""
    knobs = {"timestep_distribution": "UNIFORM", "timestep_shift": 1}
    source = source_of(lab, knobs | {"timestep_min": lo, "timestep_max": hi})
    for step in range(1, 21):
        wanted = lo + (hi - lo) * draws(0, "t", step, 0).random()
        assert prepare(source, step).t.item() == pytest.approx(wanted, abs=1e-6)
    middles = [lo + (hi - lo) * (i + 0.5) / 9 for i in range(9)]
    assert source.objective.timesteps.quantiles(9).tolist() == pytest.approx(middles, abs=1e-6)


@pytest.mark.effect("timestep_min", "timestep_max")
def test_of_two_experts_each_keeps_to_its_own_part_of_the_range(pair: Lab) -> None:
    """The tiny model's experts part at 0.875; one that is left without a noise level is refused."""
    trainer = trainer_of(pair, {"timestep_min": 0.5, "timestep_max": 0.9, "expert_period": 1, "expert_share": 0.5})
    levels = [trainer.source.timesteps_of(step) for step in (1, 2)]
    assert sorted((level.lo, level.hi) for level in levels) == [(0.5, 0.875), (0.875, 0.9)]
    for knobs, lost in (({"timestep_max": 0.8}, "high"), ({"timestep_min": 0.9}, "low")):
        with pytest.raises(VideotuneError, match=f"expert {lost}"):
            trainer_of(pair, knobs)
        trainer_of(pair, knobs | {"experts": "low" if lost == "high" else "high"})


@pytest.mark.effect("loss", "loss_delta")
@pytest.mark.parametrize(
    ("kind", "delta"), [("huber", 0.1), ("huber", 1.0), ("pseudo_huber", 0.1), ("pseudo_huber", 1.0)]
)
def test_the_loss_is_of_its_kind_and_plain_mse_is_logged(kind: str, delta: float, lab: Lab) -> None:
    trainer = trainer_of(lab, {"loss": kind, "loss_delta": delta})
    took, prepared = take(trainer, 1), prepare(trainer.source, 1)
    (line,) = took.lines
    error = (took.calls[0]["answer"] - (prepared.noise - prepared.batch.x0)).double()
    square, size = error.square(), error.abs()
    smooth = 2 * delta * ((square + delta**2).sqrt() - delta)
    costs = torch.where(size <= delta, square, delta * (2 * size - delta)) if kind == "huber" else smooth
    assert line["loss"] == pytest.approx(costs.mean().item(), rel=1e-5)
    assert line["mse"] == pytest.approx(square.mean().item(), rel=1e-5)
    assert line["loss"] < line["mse"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"timestep_min": 0.6, "timestep_max": 0.4}, "timestep_min"),
    ({"loss_delta": 0.5}, "loss_delta"),
    ({"loss": "huber", "video_config.temporal_consistency_weight": 1.0}, "temporal_consistency_weight"),
]
"""Knobs, and the key that the error names."""


@pytest.mark.parametrize(("knobs", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_options_that_do_not_apply_are_refused(lab: Lab, knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, knobs)
