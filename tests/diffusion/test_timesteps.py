import math
from dataclasses import replace
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videotune.diffusion.timesteps import (
    Timesteps,
    mode,
    shift_of_tokens,
    shifted,
    unshifted,
)
from videotune.errors import VideotuneError

N = 20_000
EVEN = (torch.arange(N, dtype=torch.float64) + 0.5) / N
KINDS = [
    Timesteps("UNIFORM"),
    Timesteps("UNIFORM", shift=3.0),
    Timesteps("LOGIT_NORMAL"),
    Timesteps("LOGIT_NORMAL", shift=5.0),
    Timesteps("LOGIT_NORMAL", mean=-0.5, std=0.6),
    Timesteps("MODE"),
    Timesteps("MODE", shift=2.0, mode_scale=-0.7),
    Timesteps("MODE", mode_scale=2 / (math.pi - 2)),
    Timesteps("SIGMOID", shift=3.0, scale=1.7),
    Timesteps("BETA", alpha=2.0, beta=5.0),
    Timesteps("BETA", shift=3.0, alpha=0.6, beta=0.6),
]
RANGES = [(0.0, 1.0), (0.875, 1.0), (0.0, 0.875), (0.9, 1.0), (0.0, 0.9), (0.3, 0.30001)]


def known_cdf(ts: Timesteps, t: float) -> float:
    """Closed forms from the standard library, before truncation."""
    t = t / (ts.shift - (ts.shift - 1) * t)
    if ts.distribution == "UNIFORM" or t in (0.0, 1.0):
        return t
    if ts.distribution == "BETA":
        return float(mpmath.betainc(ts.alpha, ts.beta, 0, t, regularized=True))
    mean, std = (0.0, ts.scale) if ts.distribution == "SIGMOID" else (ts.mean, ts.std)
    return NormalDist(mean, std).cdf(math.log(t / (1 - t)))


@pytest.mark.parametrize("ts", [ts for ts in KINDS if ts.distribution != "MODE"], ids=str)
def test_cdf_is_the_known_one(ts: Timesteps) -> None:
    points = [0.0, 1e-6, 0.01, 0.3, 0.5, 0.875, 0.999, 1.0]
    expected = [known_cdf(ts, t) for t in points]
    assert ts.cdf(torch.tensor(points, dtype=torch.float64)).tolist() == pytest.approx(expected, abs=1e-12)


def test_mode_is_the_papers() -> None:
    scale = 1.29
    u = EVEN
    published = 1 - u - scale * (torch.cos(torch.pi / 2 * u).square() - 1 + u)
    torch.testing.assert_close(mode(u, scale).sort().values, published.sort().values, rtol=0, atol=1e-12)
    # Its mode is the middle, and its density there is 1 / f'(1/2), f' = 1 + s - sπ/2.
    centre = Timesteps("MODE", mode_scale=scale).mass(0.5 - 1e-4, 0.5 + 1e-4) / 2e-4
    assert centre == pytest.approx(1 / (1 + scale - scale * math.pi / 2), rel=1e-5)


@pytest.mark.parametrize("bounds", RANGES, ids=str)
@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_cdf_inverts_the_draw(ts: Timesteps, bounds: tuple[float, float]) -> None:
    ts = replace(ts, lo=bounds[0], hi=bounds[1])
    u = EVEN[::50]
    t = ts.draw(u).double()
    # A draw is rounded to float32: u lies between the probabilities of its two neighbours.
    slack = 1.2e-7 * t + 1e-12
    assert (ts.cdf(t - slack) <= u + 1e-9).all()
    assert (ts.cdf(t + slack) >= u - 1e-9).all()
    assert (t[1:] >= t[:-1]).all()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.floats(0, 0.99, allow_subnormal=False),
    st.floats(1e-4, 1, allow_subnormal=False),
    st.lists(st.floats(0, 1, exclude_max=True, allow_subnormal=False), min_size=1, max_size=8),
)
def test_every_draw_lies_in_its_range(ts: Timesteps, lo: float, width: float, us: list[float]) -> None:
    hi = min(1.0, lo + width)
    us = [0.0, *us, 1 - 2**-53]
    try:
        ts = replace(ts, lo=lo, hi=hi)
    except VideotuneError as error:
        assert "no timestep" in str(error)  # noqa: PT017
        return
    t = ts.draw(torch.tensor(us, dtype=torch.float64))
    assert t.dtype == torch.float32
    assert all(float(np.float32(lo)) <= value < hi for value in t.tolist()), "draws are float32"
    assert ts.draw(torch.tensor(us).float()).isfinite().all()


@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_truncation_keeps_the_shape_inside(ts: Timesteps) -> None:
    # A truncated draw is the whole distribution's draw, given that it fell into the range.
    lo, hi = 0.875, 0.99
    many = 20_000 if ts.distribution == "BETA" else 400_000
    everything = ts.draw(torch.rand(many, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    inside = everything[(everything >= lo) & (everything < hi)].double()
    at = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    ours = replace(ts, lo=lo, hi=hi).cdf(torch.quantile(inside, at))
    spread = (at * (1 - at) / len(inside)).sqrt()
    assert ((ours - at).abs() / spread).max() < 4.5


def test_masses_of_the_high_noise_expert() -> None:
    shifts = (1.0, 3.0, 5.0, 12.0)
    t2v = [100 * Timesteps("LOGIT_NORMAL", shift=s).mass(0.875, 1) for s in shifts]
    i2v = [100 * Timesteps("LOGIT_NORMAL", shift=s).mass(0.9, 1) for s in shifts]
    assert t2v == pytest.approx([2.6, 20, 37, 71], abs=0.6)
    assert i2v == pytest.approx([1.4, 14, 28, 61], abs=0.6)
    assert Timesteps("UNIFORM").mass(0.875, 1) == pytest.approx(0.125)
    whole = Timesteps("LOGIT_NORMAL", shift=5.0)
    assert whole.mass(0, 0.875) + whole.mass(0.875, 1) == pytest.approx(1)
    assert replace(whole, lo=0.875).mass(0.875, 1) == 1


@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_quantiles_split_the_mass_evenly(ts: Timesteps) -> None:
    nine = ts.quantiles(9)
    assert nine.shape == (9,)
    assert nine.dtype == torch.float32
    assert ts.cdf(nine).tolist() == pytest.approx([(i + 0.5) / 9 for i in range(9)], abs=2e-6)


def test_shift_is_the_papers_and_has_an_inverse() -> None:
    assert shifted(torch.tensor(0.5), 3.0).item() == pytest.approx(0.75)
    assert torch.equal(shifted(EVEN, 1.0), EVEN)
    for shift in (0.2, 3.0, 17.0):
        torch.testing.assert_close(unshifted(shifted(EVEN, shift), shift), EVEN, rtol=1e-12, atol=1e-14)


def test_grid_uniform_draws_every_timestep_alike() -> None:
    ts = Timesteps("UNIFORM", num_timesteps=1000)
    k = (ts.draw(EVEN) * 999).round().long()
    assert torch.equal(k.bincount(minlength=1000), torch.full((1000,), N // 1000))
    assert torch.equal(k, (EVEN * 1000).floor().long())


def test_grid_draws_lie_on_the_grid_and_in_the_range() -> None:
    for ts in KINDS:
        grid = replace(ts, num_timesteps=1000)
        u = EVEN[::10] if ts.distribution == "BETA" else EVEN
        t = grid.draw(u)
        k = (t.double() * 999).round()
        assert torch.equal(t, (k / 999).float())
        assert (t.double() - ts.draw(u).double()).abs().max() <= 1.001e-3
        part = replace(grid, lo=0.25, hi=0.5)
        k = (part.draw(u).double() * 999).round().long()
        assert k.unique().tolist() == list(range(250, 500))
    assert replace(grid, distribution="UNIFORM", lo=500 / 999, hi=501 / 999).draw(
        EVEN
    ).unique().tolist() == pytest.approx([500 / 999])


def test_grid_truncation_is_the_conditional_distribution() -> None:
    whole = Timesteps("LOGIT_NORMAL", shift=3.0, num_timesteps=50)
    u = (torch.arange(10**6, dtype=torch.float64) + 0.5) / 10**6
    share = (whole.draw(u) * 49).round().long().bincount(minlength=50).double()
    share[:30] = 0
    part = (replace(whole, lo=30 / 49).draw(u) * 49).round().long().bincount(minlength=50).double()
    torch.testing.assert_close(part / part.sum(), share / share.sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"distribution": "MODE", "mode_scale": 1.8},
        {"distribution": "SIGMOID", "scale": 0.0},
        {"distribution": "BETA", "beta": 1e4},
        {"lo": 0.5, "hi": 0.5},
        {"lo": -0.1},
        {"hi": 1.1},
        {"num_timesteps": 1},
        {"lo": 0.5001, "hi": 0.5002, "num_timesteps": 1000},
        {"distribution": "LOGIT_NORMAL", "hi": 1e-300},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(VideotuneError):
        Timesteps(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("a", "b"), [(2.0, 2.0), (0.3, 4.0), (30.0, 0.7), (40.0, 60.0)])
def test_beta_draws_have_the_known_distribution(a: float, b: float) -> None:
    """The density below each draw is the number that it was drawn from, by an independent integral."""
    ts, p = Timesteps("BETA", alpha=a, beta=b), torch.tensor([1e-3, 0.3, 0.5, 0.77, 0.999], dtype=torch.float64)
    below = [float(mpmath.betainc(a, b, 0, float(x), regularized=True)) for x in ts.draw(p)]
    assert below == pytest.approx(p.tolist(), rel=1e-4)


def test_sigmoid_is_logit_normal_about_the_middle() -> None:
    assert torch.equal(Timesteps("SIGMOID", scale=1.7).draw(EVEN), Timesteps("LOGIT_NORMAL", std=1.7).draw(EVEN))


def test_the_shift_by_tokens_is_that_of_the_pipelines_and_the_scheduler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    rule = (1024, 0.95, 4096, 2.05)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    sigmas = [0.9, 0.5, 0.1]
    for tokens in (100, 1024, 2000, 4096, 9000):
        mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        ours = shifted(torch.tensor(sigmas, dtype=torch.float64), shift_of_tokens(tokens, rule))
        torch.testing.assert_close(scheduler.sigmas[:3].double(), ours, rtol=1e-5, atol=1e-6)
