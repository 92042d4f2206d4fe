"""Knobs that only a v-prediction model has, in whole runs over a tiny checkpoint of that kind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diffusers import CogVideoXDDIMScheduler

from tests.effects.effects_kit import Lab, in_cache, moved, run_steps, trainer_of, watched, weights

FAST = {"video_config.target_fps": 16, "steps": 6, "learning_rate": 1e-2}


@pytest.fixture
def cog(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    return replace(in_cache(lab, "cogvideox"), model=tiny_bases("cogvideox"))


@pytest.mark.effect("loss_weighting")
def test_min_snr_prices_each_timestep_that_a_run_draws(cog: Lab) -> None:
    """The same draws, the same plain error at step 1, and a loss that is min(ᾱ, 5(1 - ᾱ)) of it; other weights after."""
    bars = CogVideoXDDIMScheduler.from_pretrained(cog.model, subfolder="scheduler").alphas_cumprod.numpy()
    levels, lines, trained = {}, {}, {}
    for weighting in ("none", "min_snr"):
        trainer = trainer_of(cog, FAST | {"loss_weighting": weighting})
        before = weights(trainer)
        with watched(trainer.net) as calls:
            lines[weighting] = run_steps(trainer)
        levels[weighting] = [call["t"].item() for call in calls]
        trained[weighting] = moved(before, weights(trainer), "lora_B")
    assert levels["none"] == levels["min_snr"]
    assert len(set(levels["none"])) > 3
    for k, plain, priced in zip(levels["none"], lines["none"], lines["min_snr"], strict=True):
        assert plain["loss"] == pytest.approx(plain["mse"], rel=1e-6)
        assert priced["loss"] == pytest.approx(min(bars[k], 5 * (1 - bars[k])) * priced["mse"], rel=1e-4)
    assert lines["none"][0]["mse"] == lines["min_snr"][0]["mse"]
    assert lines["none"][-1]["mse"] != lines["min_snr"][-1]["mse"]
    assert (trained["none"] - trained["min_snr"]).abs().max() > 1e-4


@pytest.mark.effect("timestep_distribution")
def test_timesteps_are_uniform_unless_the_config_says_otherwise(cog: Lab) -> None:
    """The network gets whole timesteps, by default from all over the table; LOGIT_NORMAL keeps to its middle."""
    levels = {}
    for name in (None, "LOGIT_NORMAL"):
        knobs = FAST | {"steps": 40, "learning_rate": 1e-4} | ({"timestep_distribution": name} if name else {})
        trainer = trainer_of(cog, knobs)
        with watched(trainer.net) as calls:
            run_steps(trainer)
        levels[name] = np.array([call["t"].item() for call in calls])
        assert all(call["t"].dtype.is_floating_point is False for call in calls)
    assert levels[None].min() < 75
    assert levels[None].max() > 925
    assert levels[None].std() > 1.2 * levels["LOGIT_NORMAL"].std()
