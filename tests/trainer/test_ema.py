"""Averages of weights against their closed form, and saved ones that do not fit."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.parametrize("host", [None, False, True])
def test_averages_are_on_the_device_or_if_so_configured_on_the_host(
    host: bool | None,
) -> None:
    """Float32 in both places, and weights on the host have theirs there."""
    dtypes = {"a": torch.float32, "b": torch.bfloat16}
    with FakeTensorMode():
        weights = {
            f"{name} on {device}": nn.Parameter(
                torch.empty(2, 3 + index, device=device, dtype=dtype)
            )
            for index, (name, dtype) in enumerate(dtypes.items())
            for device in ("cuda", "cpu")
        }
        if host is None:
            ema = EmaWeights(weights, 0.5)
        else:
            ema = EmaWeights(weights, 0.5, host)
        assert ema.host is bool(host)
        ema.update(1)
    for name, value in ema.values.items():
        device = "cuda" if "cuda" in name and not host else "cpu"
        assert value.device.type == device
        assert (value.dtype, value.shape) == (torch.float32, weights[name].shape)


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
