"""Knobs that only a v-prediction model has, in whole runs over a tiny checkpoint of that kind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diffusers import CogVideoXDDIMScheduler

from tests.effects.effects_kit import Lab, in_cache, moved, run_steps, trainer_of, watched, weights
from videotune.models.cogvideox import CogVideoX

FAST = {"video_config.target_fps": 16, "steps": 6, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def tiny_cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CogVideoX.tiny(tmp_path_factory.mktemp("models") / "tiny-cogvideox")


@pytest.fixture
def cog(lab: Lab, tiny_cogvideox: Path) -> Lab:
    return replace(in_cache(lab, "cogvideox"), model=tiny_cogvideox)


@pytest.mark.effect("loss_weighting")
def test_min_snr_prices_each_timestep_that_a_run_draws(cog: Lab) -> None:
    """The same draws, the same plain error at step 1, and a loss that is min(ᾱ, 5(1 - ᾱ)) of it; other weights after."""
    bars = CogVideoXDDIMScheduler.from_pretrained(cog.model, subfolder="scheduler").alphas_cumprod.numpy()
    told, lines, trained = {}, {}, {}
    for weighting in ("none", "min_snr"):
        trainer = trainer_of(cog, FAST | {"loss_weighting": weighting})
        before = weights(trainer)
        with watched(trainer.net) as calls:
            lines[weighting] = run_steps(trainer)
        told[weighting] = [call["t"].item() for call in calls]
        trained[weighting] = moved(before, weights(trainer), "lora_B")
    assert told["none"] == told["min_snr"]
    assert len(set(told["none"])) > 3
    for k, plain, priced in zip(told["none"], lines["none"], lines["min_snr"], strict=True):
        assert plain["loss"] == pytest.approx(plain["mse"], rel=1e-6)
        assert priced["loss"] == pytest.approx(min(bars[k], 5 * (1 - bars[k])) * priced["mse"], rel=1e-4)
    assert lines["none"][0]["mse"] == lines["min_snr"][0]["mse"]
    assert lines["none"][-1]["mse"] != lines["min_snr"][-1]["mse"]
    assert (trained["none"] - trained["min_snr"]).abs().max() > 1e-4


@pytest.mark.effect("timestep_distribution")
def test_timesteps_are_uniform_unless_the_config_says_otherwise(cog: Lab) -> None:
    """The network is told whole timesteps, by default from all over the table; LOGIT_NORMAL keeps to its middle."""
    told = {}
    for name in (None, "LOGIT_NORMAL"):
        knobs = FAST | {"steps": 40, "learning_rate": 1e-4} | ({"timestep_distribution": name} if name else {})
        trainer = trainer_of(cog, knobs)
        with watched(trainer.net) as calls:
            run_steps(trainer)
        told[name] = np.array([call["t"].item() for call in calls])
        assert all(call["t"].dtype.is_floating_point is False for call in calls)
    assert told[None].min() < 75
    assert told[None].max() > 925
    assert told[None].std() > 1.2 * told["LOGIT_NORMAL"].std()
