"""Which expert a step trains, and the learning rate that each one has in its own steps."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, job_of, run_steps, trainer_of, weights
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.trainer.build import make_objective
from videotune.trainer.expert_pool import make_expert_schedule, shares
from videotune.trainer.export import experts_of
from videotune.trainer.loop import remaining_batches, train_steps

BOUNDARY = 0.875
"""Noise level from which the high expert of the tiny model runs."""


@pytest.fixture
def pair(tmp_path: Path, small_clips: Path, tiny_bases: Callable[..., Path]) -> Lab:
    base = tiny_bases("wan", "t2v-a14b")
    return Lab(base, small_clips, tmp_path / "cache", tmp_path)


def schedule_of(pair: Lab, **settings: Any) -> Any:
    job = job_of(pair)
    config = job.config.model_copy(update=settings)
    return make_expert_schedule(job.spec, config, make_objective(job.spec, config))


def test_an_expert_s_share_is_that_of_the_noise_levels_that_are_drawn(
    pair: Lab,
) -> None:
    job = job_of(pair)
    objective = make_objective(job.spec, job.config)
    grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    drawn = objective.timesteps.draw(grid)
    expected = float((drawn >= BOUNDARY).double().mean())
    assert 0.05 < expected < 0.95
    schedule = schedule_of(pair)
    assert float(schedule.share) == pytest.approx(expected, abs=2e-4)
    assert shares(schedule) == {
        "high": float(schedule.share),
        "low": pytest.approx(1 - float(schedule.share)),
    }


def test_a_share_and_a_period_that_are_set_are_taken(pair: Lab) -> None:
    schedule = schedule_of(pair, expert_share=0.3, expert_period=7)
    assert schedule.share == Fraction(3, 10)
    assert schedule.turn_length == 7
    assert schedule.names == ("high", "low")
    alone = schedule_of(pair, experts="low", expert_share=0.3, expert_period=7)
    assert alone.names == ("low",)
    assert shares(alone) == {"low": 1.0}


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"timestep_min": BOUNDARY}, "low"),
        ({"timestep_min": BOUNDARY - 0.01}, None),
        ({"timestep_max": BOUNDARY}, "high"),
        ({"timestep_max": BOUNDARY + 0.01}, None),
        ({"timestep_min": BOUNDARY, "experts": "high"}, None),
        ({"timestep_max": BOUNDARY, "experts": "low"}, None),
        ({"timestep_max": BOUNDARY, "experts": "high"}, "high"),
    ],
)
def test_an_expert_that_trains_must_have_noise_levels(
    settings: dict[str, Any], refused: str | None, pair: Lab
) -> None:
    if refused is None:
        schedule_of(pair, **settings)
        return
    with pytest.raises(VideotuneError, match=f"for the expert {refused} of"):
        schedule_of(pair, **settings)


def test_a_step_draws_noise_levels_of_its_expert_only(pair: Lab) -> None:
    knobs = {"steps": 12, "expert_share": 0.5, "expert_period": 1, "batch_size": 2}
    trainer = trainer_of(pair, knobs)
    trainer.journal.close()
    levels: dict[str, list[float]] = {"high": [], "low": []}
    for batch in remaining_batches(trainer):
        levels[trainer.pool.expert_schedule.at(batch.step)] += batch.t.tolist()
    assert min(levels["high"]) >= BOUNDARY > max(levels["low"])


def test_each_expert_s_rate_falls_over_its_own_steps(pair: Lab) -> None:
    """A linear fall without warm-up: n steps have rate · (n - k) / n after k of them."""
    knobs = {
        "steps": 6,
        "expert_share": 0.34,
        "expert_period": 1,
        "learning_rate": 0.001,
        "learning_rate_low": 0.003,
        "learning_rate_scheduler": "LINEAR",
        "learning_rate_min": 0.0,
        "warmup_steps": 0,
    }
    trainer = trainer_of(pair, knobs)
    rates: dict[str, list[float]] = {"high": [], "low": []}
    expert_before = None
    for line in run_steps(trainer):
        assert list(line["lr"]) == [line["expert"]]
        rates[line["expert"]] += line["lr"].values()
        # Only a step that changes the expert counts the seconds of loading it.
        assert ("experts" in line["seconds"]) is (line["expert"] != expert_before)
        expert_before = line["expert"]
    trainer.journal.close()

    for expert, peak, steps in (("high", 0.001, 2), ("low", 0.003, 4)):
        expected = [peak * (steps - done) / steps for done in range(steps)]
        assert rates[expert] == pytest.approx(expected)


def adapter_of(high: float, low: float) -> dict[str, torch.Tensor]:
    """An adapter's weights, by the largest of each expert's B."""
    return {
        "high.blocks.0.lora_A": torch.ones(2, 3),
        "high.blocks.0.lora_B": torch.tensor([[0.0, high]]),
        "low.blocks.0.lora_A": torch.ones(2, 3),
        "low.blocks.0.lora_B": torch.tensor([[0.0, low]]),
    }


@pytest.mark.parametrize(
    ("settings", "high", "low", "names", "left_out"),
    [
        ({}, 1.0, 1.0, ("high", "low"), None),
        ({}, 0.0, 1.0, ("low",), "high"),
        ({}, 1.0, 0.0, ("high",), "low"),
        ({}, 0.0, 0.0, ("high", "low"), None),
        ({"experts": "low"}, 0.0, 0.0, ("low",), None),
        ({"training_method": "EMBEDDING"}, 0.0, 1.0, ("high", "low"), None),
    ],
)
def test_an_expert_that_has_learnt_nothing_gets_no_file(
    settings: dict[str, Any],
    high: float,
    low: float,
    names: tuple[str, ...],
    left_out: str | None,
    tiny_family: Callable[..., Any],
) -> None:
    """Unless neither has: then the export itself refuses."""
    family = tiny_family("wan", variant="t2v-a14b")
    config = Config().model_copy(update=settings)
    notes: list[str] = []
    experts = experts_of(family, config, adapter_of(high, low), notes.append)
    assert experts == names
    if left_out is None:
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith(f"the expert {left_out} ")


def test_what_belongs_to_no_expert_gets_one_file(
    tiny_family: Callable[..., Any],
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    config = Config()
    transformer = config.transformer.model_copy(update={"train": False})
    config = config.model_copy(update={"transformer": transformer})
    assert experts_of(family, config, {}, pytest.fail) == (None,)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"training_method": "FINE_TUNE"},
        {"training_method": "FINE_TUNE", "layer_offload_fraction": 0.5},
        {"layer_offload_fraction": 0.5},
        {
            "training_method": "FINE_TUNE",
            "layer_offload_fraction": 0.5,
            "text_encoder.train": True,
        },
    ],
    ids=[
        "adapter",
        "all weights",
        "streamed weights",
        "adapter beside streamed",
        "text beside streamed weights",
    ],
)
def test_an_expert_that_is_loaded_again_goes_on_with_what_it_has_learnt(
    knobs: dict[str, Any], pair: Lab
) -> None:
    """As after previews, which run both experts."""
    settings = {
        "steps": 2,
        "experts": "low",
        "learning_rate": 0.01,
        "gradient_checkpointing": "ON",
        **knobs,
    }
    ends = []
    for is_loaded_again in (False, True):
        trainer = trainer_of(pair, settings)
        steps = train_steps(trainer)
        lines = [next(steps).read()["loss"]]
        if is_loaded_again:
            del steps
            before = weights(trainer)
            first = trainer.pool.loaded
            trainer.pool.load("high")
            assert trainer.pool.current == "high"
            trainer.pool.load("low")
            assert trainer.pool.loaded is not first
            for name, value in weights(trainer).items():
                assert torch.equal(value, before[name]), name
            trainer.first_step = 2
            steps = train_steps(trainer)
        lines += [record.read()["loss"] for record in steps]
        ends.append((lines, weights(trainer)))
        trainer.journal.close()
    (lines, plain), (lines_again, again) = ends
    assert lines_again == lines
    for name, value in plain.items():
        assert torch.equal(again[name], value), name
