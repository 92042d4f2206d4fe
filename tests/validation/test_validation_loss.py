"""The fixed noise of validation, and which expert a noise level belongs to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from videotune.model_spec import Expert
from videotune.validation.validation_loss import (
    QUANTILES,
    covers,
    noise_of,
    relative_to_first,
)


def window(name: str) -> Any:
    return SimpleNamespace(id=name)


def test_the_noise_of_a_window_is_that_of_every_version() -> None:
    """Journals of older runs are compared with those of new ones."""
    noise = noise_of(3, window("w"), 2, (3,))
    expected = torch.tensor([-0.27572593, -0.94208431, 0.36623633])
    torch.testing.assert_close(noise, expected)
    for other in (
        noise_of(4, window("w"), 2, (3,)),
        noise_of(3, window("v"), 2, (3,)),
        noise_of(3, window("w"), 1, (3,)),
    ):
        assert not torch.equal(noise, other)


def test_a_level_between_two_experts_belongs_to_the_noisier_one() -> None:
    low = Expert("low", 0.0, 0.875)
    high = Expert("high", 0.875, 1.0)
    for level, names in (
        (0.0, ["low"]),
        (0.874, ["low"]),
        (0.875, ["high"]),
        (1.0, ["high"]),
    ):
        covering = [expert.name for expert in (low, high) if covers(expert, level)]
        assert covering == names, level


def reading_of(*errors: float) -> dict[str, Any]:
    """A reading of one clip with these errors by noise level."""
    clips = {"a": list(errors)}
    mean = sum(errors) / len(errors)
    return {"mean": mean, "by_quantile": list(errors), "windows": 1, "clips": clips}


def test_a_reading_is_relative_to_the_first_which_is_relative_to_itself() -> None:
    errors = [1.0 + number for number in range(QUANTILES)]
    first = reading_of(*errors)
    itself = relative_to_first(first, None)
    assert itself is not None
    assert itself["normalised"] == pytest.approx(1.0)
    half = relative_to_first(reading_of(*(error / 2 for error in errors)), first)
    assert half is not None
    assert half["normalised"] == pytest.approx(0.5)
    assert relative_to_first(None, first) is None
