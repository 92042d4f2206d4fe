"""What the keys about two experts do to the steps and to the weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, run_steps, trainer_of, weights


@pytest.fixture
def pair(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    """The lab over a model with two experts."""
    return replace(lab, model=tiny_bases("wan", "t2v-a14b"))


def dealt(pair: Lab, **knobs: Any) -> str:
    """H or L for each step."""
    lines = run_steps(trainer_of(pair, {"steps": 8, "expert_period": 1, "expert_share": 0.5} | knobs))
    return "".join(str(line["expert"])[0] for line in lines)


@pytest.mark.effect("expert_period")
def test_so_many_steps_in_a_row_are_one_expert_s(pair: Lab) -> None:
    assert dealt(pair, expert_period=1) == "hlhlhlhl"
    assert dealt(pair, expert_period=3) == "hhhlllhh"


@pytest.mark.effect("expert_share")
def test_the_high_expert_has_its_share_of_the_steps(pair: Lab) -> None:
    assert dealt(pair, expert_share=0.25) == "lhlllhll"
    assert dealt(pair, expert_share=0.75) == "hhlhhhlh"


@pytest.mark.effect("experts")
def test_the_experts_that_are_named_train(pair: Lab) -> None:
    for word, moved in (("both", {"high", "low"}), ("high", {"high"}), ("low", {"low"})):
        share = {"expert_share": 0.5} if word == "both" else {}
        trainer = trainer_of(pair, {"experts": word, "expert_period": 1, "steps": 2} | share)
        before = weights(trainer)
        run_steps(trainer)
        changed = {
            name.split(".")[0] for name, value in weights(trainer).items() if not torch.equal(value, before[name])
        }
        assert changed == moved == {name.split(".")[0] for name in before}


@pytest.mark.effect("learning_rate_low")
def test_the_low_expert_s_first_update_has_its_own_rate(pair: Lab) -> None:
    """AdamW's first step moves each weight of B by the rate."""
    reach = {}
    for rate in (None, 0.003):
        knobs = {"learning_rate": 0.001, "learning_rate_low": rate, "expert_share": 0.5, "expert_period": 1, "steps": 2}
        trainer = trainer_of(pair, knobs)
        run_steps(trainer)
        ends = {name: value for name, value in weights(trainer).items() if "lora_B" in name}
        for expert in ("high", "low"):
            reach[expert, rate] = max(float(v.abs().max()) for name, v in ends.items() if name.startswith(expert))
    assert reach["high", None] == reach["high", 0.003] == pytest.approx(0.001, rel=1e-2)
    assert reach["low", None] == pytest.approx(0.001, rel=1e-2)
    assert reach["low", 0.003] == pytest.approx(0.003, rel=1e-2)
