"""Averages of weights against their closed form, and saved ones that do not fit."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from videotune.trainer.ema import EmaWeights


def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(2, 2))}


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.9])
def test_averages_follow_the_ramp_until_their_decay(decay: float) -> None:
    """e ← d·e + (1 - d)·w with d = min(decay, (1 + k)/(10 + k)), in float64."""
    weights = parameters()
    ema = EmaWeights(weights, decay)
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    for step in range(1, 9):
        d = min(decay, (1 + step) / (10 + step))
        for number, (name, weight) in enumerate(weights.items()):
            weight.data += step + number
            expected[name] = d * expected[name] + (1 - d) * weight.detach().double()
        ema.update(step)
        for name, average in ema.values.items():
            assert average.dtype == torch.float32
            torch.testing.assert_close(average.double(), expected[name])


def test_a_step_that_was_skipped_changes_no_average() -> None:
    weights = parameters()
    ema = EmaWeights(weights, 0.5)
    plain = EmaWeights(weights, 0.5)
    before = {name: value.clone() for name, value in ema.values.items()}
    for weight in weights.values():
        weight.data += 1
    ema.update(1, torch.tensor(0.0))
    assert all(torch.equal(ema.values[name], before[name]) for name in before)

    ema.update(1, torch.tensor(1.0))
    plain.update(1)
    assert all(torch.equal(ema.values[name], plain.values[name]) for name in before)


def test_averages_are_beside_their_weights_unless_they_are_kept_on_the_host() -> None:
    weights = {"a": nn.Parameter(torch.zeros(3, device="meta", dtype=torch.bfloat16))}
    for average in EmaWeights(weights, 0.5).values.values():
        assert average.is_meta
        assert average.dtype == torch.float32


def test_saved_averages_are_loaded_at_their_place() -> None:
    ema = EmaWeights(parameters(), 0.5)
    places = {name: value.data_ptr() for name, value in ema.values.items()}
    saved = {"b": torch.full((2, 2), 5.0), "a": torch.arange(3.0)}
    ema.load(saved)
    for name, value in ema.values.items():
        assert torch.equal(value, saved[name])
        assert value.data_ptr() == places[name]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"a": torch.ones(3)}, "1 averages do not fit, the first is b"),
        (
            {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1)},
            "1 averages do not fit, the first is c",
        ),
        (
            {"a": torch.ones(3), "b": torch.ones(4)},
            "1 averages do not fit, the first is b",
        ),
        ({"a": torch.ones(4), "c": torch.ones(1)}, "3 averages do not fit"),
    ],
    ids=["one is missing", "one too many", "another shape", "all of them"],
)
def test_averages_that_do_not_fit_are_refused_and_none_is_loaded(
    saved: Mapping[str, Tensor], message: str
) -> None:
    weights = parameters()
    ema = EmaWeights(weights, 0.5)
    with pytest.raises(ValueError, match=f"^{message}"):
        ema.load(saved)
    for name, value in ema.values.items():
        assert torch.equal(value, weights[name])
