"""``plan --timesteps``: the curve, the bands and the experts' shares are those of what a run draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.shell import plan
from videotune.cli.plan import ROWS, curve
from videotune.commands.noise_levels import COLUMNS, levels, noise_levels
from videotune.diffusion.timesteps import Timesteps
from videotune.trainer.resolve_config import Overrides, resolve_config


def test_bands_density_and_validation_levels_are_those_of_the_distribution() -> None:
    settings = Overrides(family="wan", sets=("timestep_distribution=BETA", "timestep_alpha=3", "timestep_shift=2"))
    facts = noise_levels(settings)
    (one,) = facts["distributions"]
    ts = Timesteps("BETA", 2.0, alpha=3.0)
    drawn = ts.draw((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    counted = drawn.mul(9).long().clamp(max=8).bincount(minlength=9) / len(drawn)
    assert one["bands"] == pytest.approx(counted.tolist(), abs=1e-3)
    assert sum(one["density"]) / COLUMNS == pytest.approx(1, abs=1e-3)
    assert facts["validation"] == pytest.approx(ts.quantiles(9).tolist(), abs=1e-4)


def test_of_two_experts_each_has_its_share(
    tiny_bases: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """37 % at shift 5 for the one above 0.875."""
    base = tiny_bases("wan", "t2v-a14b")
    plan(
        Overrides(sets=(f"base_model_name={base}", "timestep_distribution=LOGIT_NORMAL", "timestep_shift=5")),
        timesteps=True,
    )
    out = capsys.readouterr().out
    assert "noise levels: LOGIT_NORMAL, shift 5" in out
    assert "experts: high 36.8%, low 63.2%" in out


def test_a_shift_by_resolution_has_a_curve_for_each_bucket() -> None:
    resolved, spec, _ = resolve_config(Overrides(family="wan"))
    spec = replace(spec, shift_by_tokens=(100, 0.5, 1000, 1.5))
    facts = levels(spec, resolved.config, {"5x32x32": (100, 0.25), "9x64x64": (1000, 0.75)})
    small, large = facts["distributions"]
    assert (small["bucket"], small["share_of_steps"], small["shift"]) == ("5x32x32", 0.25, 1.6487)
    assert large["shift"] == 4.4817
    assert large["bands"][8] > small["bands"][8]


def test_the_curve_is_as_high_as_the_density() -> None:
    lines = curve([0.0, 1.0, 2.0])
    assert len(lines) == ROWS
    assert [sum(line[i] == "█" for line in lines) for i in range(3)] == [0, ROWS // 2, ROWS]
