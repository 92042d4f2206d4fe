"""The law of noise levels of LTX-2's authors."""

import math

import pytest
import torch

from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.errors import VideotuneError

LAW = "STRETCHED_LOGIT_NORMAL"
BY_TOKENS = (1024.0, 0.95, 4096.0, 2.05)
SHARES = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99]
AUTHORS = {
    1024: [0.0394, 0.1679, 0.2744, 0.4696, 0.6685, 0.8160, 0.9024, 0.9787],
    1820: [0.0453, 0.1925, 0.3129, 0.5211, 0.7141, 0.8463, 0.9198, 0.9825],
    4096: [0.0596, 0.2582, 0.4165, 0.6461, 0.8116, 0.9054, 0.9522, 0.9894],
    8160: [0.0741, 0.3321, 0.5356, 0.7678, 0.8898, 0.9477, 0.9741, 0.9943],
}
"""Quantiles at ``SHARES`` of 20 million draws of ShiftedLogitNormalTimestepSampler in
Lightricks/LTX-2 (400fd310, packages/ltx-trainer), by the tokens of a sample.
"""


@pytest.mark.parametrize("tokens", AUTHORS)
def test_its_quantiles_are_those_of_the_authors_draws(tokens: int) -> None:
    sampler = TimestepSampler(LAW, shift=shift_of_tokens(tokens, BY_TOKENS))
    assert sampler.at(SHARES).tolist() == pytest.approx(AUTHORS[tokens], abs=8e-4)


def drawn_by_the_recipe(count: int, mean: float) -> torch.Tensor:
    """Draws made step by step: shift, stretch, mirror, cut, mix."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    low, high = torch.sigmoid(torch.tensor([mean - 2.5758, mean + 3.0902]).double())
    t = (torch.sigmoid(numbers + mean) - low) / (high - low)
    t = torch.where(t >= 1e-3, t, 2e-3 - t).clamp(0, 1)
    even = 1e-3 + (1 - 1e-3) * torch.rand(
        count, generator=generator, dtype=torch.float64
    )
    is_even = torch.rand(count, generator=generator, dtype=torch.float64) < 0.1
    return torch.where(is_even, even, t).sort().values


@pytest.mark.parametrize("mean", [-1.0, 0.0, 0.95, 3.5])
def test_its_distribution_function_is_that_of_the_recipe(mean: float) -> None:
    count = 400_000
    drawn = drawn_by_the_recipe(count, mean)
    sampler = TimestepSampler(LAW, shift=math.exp(mean))
    at = torch.linspace(0.0005, 0.9999, 401, dtype=torch.float64)
    measured = torch.searchsorted(drawn, at, right=True) / count
    error = (sampler.cdf(at) - measured).abs().max()
    assert error < 1.95 / math.sqrt(count) * 1.2  # Kolmogorov's bound for 1 in 1,000


@pytest.mark.parametrize("limits", [(0.0, 1.0), (0.0, 0.4), (0.4, 0.875), (0.9, 1.0)])
def test_its_inverse_is_exact_within_any_range(limits: tuple[float, float]) -> None:
    sampler = TimestepSampler(LAW, 4.0, *limits)
    shares = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    drawn = sampler.draw(shares)
    assert bool((drawn.diff() >= 0).all())
    assert limits[0] <= drawn.min()
    assert drawn.max() < limits[1]
    inside = shares < 0.99  # a thousandth of the normal draws stand at 1
    torch.testing.assert_close(
        sampler.cdf(drawn[inside].double()), shares[inside], rtol=0, atol=2e-5
    )


def test_nothing_is_drawn_below_a_thousandth() -> None:
    assert float(TimestepSampler(LAW).draw(torch.zeros(1))) == pytest.approx(1e-3)
    with pytest.raises(VideotuneError):
        TimestepSampler(LAW, 1.0, 0.0, 5e-4)


def test_it_is_another_law_than_the_shifted_logit_normal() -> None:
    plain = TimestepSampler("LOGIT_NORMAL", shift=math.exp(0.95)).quantiles(1000)
    stretched = TimestepSampler(LAW, shift=math.exp(0.95)).quantiles(1000)
    assert (plain - stretched).abs().max() > 0.05
