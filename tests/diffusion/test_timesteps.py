import math
from collections import Counter
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny_networks import no_host_sync
from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.noise_paths import (
    flow_path,
    scaled_linear_alphas_cumprod,
    v_path,
)
from videotune.diffusion.timesteps import (
    TimestepSampler,
    mode,
    shift_of_tokens,
    shifted,
    unshifted,
)
from videotune.errors import VideotuneError
from videotune.types import NoisePath

N = 20_000
EVEN = (torch.arange(N, dtype=torch.float64) + 0.5) / N
KINDS = [
    TimestepSampler("UNIFORM"),
    TimestepSampler("UNIFORM", shift=3.0),
    TimestepSampler("LOGIT_NORMAL"),
    TimestepSampler("LOGIT_NORMAL", shift=5.0),
    TimestepSampler("LOGIT_NORMAL", mean=-0.5, std=0.6),
    TimestepSampler("MODE"),
    TimestepSampler("MODE", shift=2.0, mode_scale=-0.7),
    TimestepSampler("MODE", mode_scale=2 / (math.pi - 2)),
    TimestepSampler("SIGMOID", shift=3.0, scale=1.7),
    TimestepSampler("BETA", alpha=2.0, beta=5.0),
    TimestepSampler("BETA", shift=3.0, alpha=0.6, beta=0.6),
]
RANGES = [
    (0.0, 1.0),
    (0.875, 1.0),
    (0.0, 0.875),
    (0.9, 1.0),
    (0.0, 0.9),
    (0.3, 0.30001),
]


def known_cdf(ts: TimestepSampler, t: float) -> float:
    """Closed forms from the standard library, before truncation."""
    t = t / (ts.shift - (ts.shift - 1) * t)
    if ts.distribution == "UNIFORM" or t in (0.0, 1.0):
        return t
    if ts.distribution == "BETA":
        return float(mpmath.betainc(ts.alpha, ts.beta, 0, t, regularized=True))
    mean, std = (0.0, ts.scale) if ts.distribution == "SIGMOID" else (ts.mean, ts.std)
    return NormalDist(mean, std).cdf(math.log(t / (1 - t)))


@pytest.mark.parametrize(
    "ts", [ts for ts in KINDS if ts.distribution != "MODE"], ids=str
)
def test_cdf_is_the_known_one(ts: TimestepSampler) -> None:
    points = [0.0, 1e-6, 0.01, 0.3, 0.5, 0.875, 0.999, 1.0]
    expected = [known_cdf(ts, t) for t in points]
    assert ts.cdf(torch.tensor(points, dtype=torch.float64)).tolist() == pytest.approx(
        expected, abs=1e-12
    )


def test_mode_is_the_papers() -> None:
    scale = 1.29
    u = EVEN
    published = 1 - u - scale * (torch.cos(torch.pi / 2 * u).square() - 1 + u)
    torch.testing.assert_close(
        mode(u, scale).sort().values, published.sort().values, rtol=0, atol=1e-12
    )
    # Its mode is the middle, and its density there is 1 / f'(1/2), f' = 1 + s - sπ/2.
    centre = (
        TimestepSampler("MODE", mode_scale=scale).mass(0.5 - 1e-4, 0.5 + 1e-4) / 2e-4
    )
    assert centre == pytest.approx(1 / (1 + scale - scale * math.pi / 2), rel=1e-5)


@pytest.mark.parametrize("bounds", RANGES, ids=str)
@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_cdf_inverts_the_draw(ts: TimestepSampler, bounds: tuple[float, float]) -> None:
    ts = replace(ts, lo=bounds[0], hi=bounds[1])
    u = EVEN[::50]
    t = ts.draw(u).double()
    # A draw is rounded to float32: u lies between the probabilities of its two
    # neighbours.
    slack = 1.2e-7 * t + 1e-12
    assert (ts.cdf(t - slack) <= u + 1e-9).all()
    assert (ts.cdf(t + slack) >= u - 1e-9).all()
    assert (t[1:] >= t[:-1]).all()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.floats(0, 0.99, allow_subnormal=False),
    st.floats(1e-4, 1, allow_subnormal=False),
    st.lists(
        st.floats(0, 1, exclude_max=True, allow_subnormal=False), min_size=1, max_size=8
    ),
)
def test_every_draw_lies_in_its_range(
    ts: TimestepSampler, lo: float, width: float, us: list[float]
) -> None:
    hi = min(1.0, lo + width)
    us = [0.0, *us, 1 - 2**-53]
    try:
        ts = replace(ts, lo=lo, hi=hi)
    except VideotuneError as error:
        assert "no timestep" in str(error)  # noqa: PT017
        return
    t = ts.draw(torch.tensor(us, dtype=torch.float64))
    assert t.dtype == torch.float32
    assert all(float(np.float32(lo)) <= value < hi for value in t.tolist()), (
        "draws are float32"
    )
    assert ts.draw(torch.tensor(us).float()).isfinite().all()


@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_truncation_keeps_the_shape_inside(ts: TimestepSampler) -> None:
    # A truncated draw is the whole distribution's draw, given that it fell into the
    # range.
    lo, hi = 0.875, 0.99
    many = 20_000 if ts.distribution == "BETA" else 400_000
    everything = ts.draw(
        torch.rand(
            many, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
    )
    inside = everything[(everything >= lo) & (everything < hi)].double()
    at = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    ours = replace(ts, lo=lo, hi=hi).cdf(torch.quantile(inside, at))
    spread = (at * (1 - at) / len(inside)).sqrt()
    assert ((ours - at).abs() / spread).max() < 4.5


def test_masses_of_the_high_noise_expert() -> None:
    shifts = (1.0, 3.0, 5.0, 12.0)
    t2v = [
        100 * TimestepSampler("LOGIT_NORMAL", shift=s).mass(0.875, 1) for s in shifts
    ]
    i2v = [100 * TimestepSampler("LOGIT_NORMAL", shift=s).mass(0.9, 1) for s in shifts]
    assert t2v == pytest.approx([2.6, 20, 37, 71], abs=0.6)
    assert i2v == pytest.approx([1.4, 14, 28, 61], abs=0.6)
    assert TimestepSampler("UNIFORM").mass(0.875, 1) == pytest.approx(0.125)
    whole = TimestepSampler("LOGIT_NORMAL", shift=5.0)
    assert whole.mass(0, 0.875) + whole.mass(0.875, 1) == pytest.approx(1)
    assert replace(whole, lo=0.875).mass(0.875, 1) == 1


@pytest.mark.parametrize("ts", KINDS, ids=str)
def test_quantiles_split_the_mass_evenly(ts: TimestepSampler) -> None:
    nine = ts.quantiles(9)
    assert nine.shape == (9,)
    assert nine.dtype == torch.float32
    assert ts.cdf(nine).tolist() == pytest.approx(
        [(i + 0.5) / 9 for i in range(9)], abs=2e-6
    )


def test_shift_is_the_papers_and_has_an_inverse() -> None:
    assert shifted(torch.tensor(0.5), 3.0).item() == pytest.approx(0.75)
    assert torch.equal(shifted(EVEN, 1.0), EVEN)
    for shift in (0.2, 3.0, 17.0):
        torch.testing.assert_close(
            unshifted(shifted(EVEN, shift), shift), EVEN, rtol=1e-12, atol=1e-14
        )


def test_grid_uniform_draws_every_timestep_alike() -> None:
    ts = TimestepSampler("UNIFORM", num_timesteps=1000)
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
    one = replace(grid, distribution="UNIFORM", lo=500 / 999, hi=501 / 999)
    assert one.draw(EVEN).unique().tolist() == pytest.approx([500 / 999])


def test_grid_truncation_is_the_conditional_distribution() -> None:
    whole = TimestepSampler("LOGIT_NORMAL", shift=3.0, num_timesteps=50)
    u = (torch.arange(10**6, dtype=torch.float64) + 0.5) / 10**6
    share = (whole.draw(u) * 49).round().long().bincount(minlength=50).double()
    share[:30] = 0
    part = (
        (replace(whole, lo=30 / 49).draw(u) * 49)
        .round()
        .long()
        .bincount(minlength=50)
        .double()
    )
    torch.testing.assert_close(
        part / part.sum(), share / share.sum(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"distribution": "MODE", "mode_scale": 1.76},
        {"distribution": "MODE", "mode_scale": -1.01},
        {"distribution": "SIGMOID", "scale": 0.0},
        {"distribution": "BETA", "alpha": 1000.5},
        {"distribution": "BETA", "beta": 1000.5},
        {"distribution": "BETA", "alpha": 0.0},
        {"distribution": "BETA", "beta": 0.0},
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
        TimestepSampler(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bounds",
    [
        {"distribution": "MODE", "mode_scale": -1.0},
        {"distribution": "BETA", "alpha": 1000.0, "beta": 1000.0},
        {"num_timesteps": 2},
    ],
)
def test_bounds_are_accepted(bounds: dict[str, float]) -> None:
    drawn = TimestepSampler(**bounds).draw(EVEN)  # type: ignore[arg-type]
    assert 0 <= drawn.min() < drawn.max() <= 1


@pytest.mark.parametrize(
    ("a", "b"), [(2.0, 2.0), (0.3, 4.0), (30.0, 0.7), (40.0, 60.0)]
)
def test_beta_draws_have_the_known_distribution(a: float, b: float) -> None:
    """The density below each draw is the number that it was drawn from, by an
    independent integral.
    """
    ts, p = (
        TimestepSampler("BETA", alpha=a, beta=b),
        torch.tensor([1e-3, 0.3, 0.5, 0.77, 0.999], dtype=torch.float64),
    )
    below = [
        float(mpmath.betainc(a, b, 0, float(x), regularized=True)) for x in ts.draw(p)
    ]
    assert below == pytest.approx(p.tolist(), rel=1e-4)


def test_the_shift_by_tokens_is_that_of_the_pipelines_and_the_scheduler() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    rule = (1024, 0.95, 4096, 2.05)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="exponential"
    )
    sigmas = [0.9, 0.5, 0.1]
    for tokens in (100, 1024, 2000, 4096, 9000):
        mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        ours = shifted(
            torch.tensor(sigmas, dtype=torch.float64), shift_of_tokens(tokens, rule)
        )
        torch.testing.assert_close(
            scheduler.sigmas[:3].double(), ours, rtol=1e-5, atol=1e-6
        )


K = 1000
CONSTANTS = {
    "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": K, "snr_shift_scale": 1.0,
    "rescale_betas_zero_snr": True,
}  # fmt: skip
TABLES = [(3.0, True), (1.0, True), (3.0, False), (1.0, False)]


def table(shift: float, zero_snr: bool) -> torch.Tensor:
    return scaled_linear_alphas_cumprod(0.00085, 0.012, K, shift, zero_snr)


def v_at(t: torch.Tensor, alphas_cumprod: torch.Tensor) -> NoisePath:
    return v_path(lambda: alphas_cumprod)(t)


def latents(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, batch, 4, 3, 5, 6, generator=generator))  # type: ignore[return-value]


def paths(t: torch.Tensor) -> list[NoisePath]:
    return [flow_path(t), *(v_at(t, table(*which)) for which in TABLES)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=6)
)
def test_identities_hold_on_both_paths(ts: list[float]) -> None:
    x0, noise = latents(len(ts))
    for path in paths(torch.tensor(ts)):
        assert path.alpha.shape == path.d_sigma.shape == (len(ts), 1, 1, 1, 1)
        assert path.alpha.dtype == path.d_alpha.dtype == torch.float32
        one = path.alpha * path.d_sigma - path.sigma * path.d_alpha
        torch.testing.assert_close(one, torch.ones_like(one), rtol=0, atol=5e-7)
        x_t = path.alpha * x0 + path.sigma * noise
        v = path.d_alpha * x0 + path.d_sigma * noise
        torch.testing.assert_close(
            path.d_sigma * x_t - path.sigma * v, x0, rtol=0, atol=3e-6
        )
        torch.testing.assert_close(
            path.alpha * v - path.d_alpha * x_t, noise, rtol=0, atol=3e-6
        )


def test_ends_are_data_and_noise() -> None:
    x0, noise = latents(2)
    ends = torch.tensor([0.0, 1.0])
    flow, v = flow_path(ends), v_at(ends, table(3.0, True))
    assert torch.equal(
        flow.alpha * x0 + flow.sigma * noise, torch.stack([x0[0], noise[1]])
    )
    assert v.alpha[1].item() == 0
    assert v.sigma[1].item() == 1
    assert v_at(ends, table(3.0, False)).alpha[1].item() > 0.03


def test_flow_derivative_is_the_derivative() -> None:
    t = torch.rand(5, requires_grad=True)
    path = flow_path(t)
    for value, derivative in ((path.alpha, path.d_alpha), (path.sigma, path.d_sigma)):
        (slope,) = torch.autograd.grad(value.sum(), t, retain_graph=True)
        assert torch.equal(slope, derivative.flatten())


@pytest.mark.parametrize(("shift", "zero_snr"), TABLES)
@pytest.mark.parametrize(
    "scheduler_class", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler]
)
def test_v_path_is_the_schedulers(
    scheduler_class: type, shift: float, zero_snr: bool
) -> None:
    # The class's own defaults are no checkpoint's: every number is passed.
    constants = CONSTANTS | {
        "rescale_betas_zero_snr": zero_snr,
        "snr_shift_scale": shift,
    }
    scheduler = scheduler_class(
        **constants, beta_schedule="scaled_linear", prediction_type="v_prediction"
    )
    assert torch.equal(table(shift, zero_snr), scheduler.alphas_cumprod)
    k = torch.tensor([0, 1, 17, 250, 500, 998, 999])
    x0, noise = latents(len(k))
    path = v_at(k / (K - 1), table(shift, zero_snr))
    noisy = path.alpha * x0 + path.sigma * noise
    velocity = path.d_alpha * x0 + path.d_sigma * noise
    torch.testing.assert_close(
        noisy, scheduler.add_noise(x0, noise, k), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(
        velocity, scheduler.get_velocity(x0, noise, k), rtol=0, atol=2e-6
    )
    # In float64 the scheduler itself is exact, and ours is its rounding to float32.
    exact = scheduler.add_noise(x0.double(), noise.double(), k)
    torch.testing.assert_close(noisy.double(), exact, rtol=0, atol=5e-7)


def test_v_path_recovers_every_integer_timestep() -> None:
    k = torch.arange(K)
    alphas_cumprod = table(1.0, True)
    expected = alphas_cumprod.sqrt().float()
    for near in (-0.4, 0.0, 0.4):  # rounded to the nearest, not cut off
        t = ((k + near) / (K - 1)).clamp(0, 1)
        assert torch.equal(v_at(t, alphas_cumprod).alpha.flatten(), expected)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_flow_path_is_the_schedulers(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=K, shift=shift)
    some = torch.tensor([0, 10, 400, 999])
    x0, noise = latents(len(some))
    path = flow_path(scheduler.sigmas[some])
    noisy = path.alpha * x0 + path.sigma * noise
    torch.testing.assert_close(
        noisy,
        scheduler.scale_noise(x0, scheduler.timesteps[some], noise),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(("shift", "zero_snr"), TABLES)
def test_weighted_x0_form_is_plain_v_mse(shift: float, zero_snr: bool) -> None:
    # x̂0 - x0 = -σ(v̂ - v): the published weight 1/(1 - ᾱ) on the error of x0 cancels.
    alphas_cumprod = table(shift, zero_snr)[
        torch.tensor([0, 1, 100, 500, 900, 999])
    ].view(-1, 1, 1, 1, 1)
    alpha, sigma = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    path = NoisePath(alpha, sigma, -sigma, alpha)
    x0, noise = (x.double() for x in latents(6))
    x_t, v = alpha * x0 + sigma * noise, alpha * noise - sigma * x0
    predicted = v + 0.3 * torch.randn(
        v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    x0_form = (path.d_sigma * x_t - path.sigma * predicted - x0).square() / (
        1 - alphas_cumprod
    )
    wanted = (predicted - v).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(x0_form.mean((1, 2, 3, 4)), wanted, rtol=1e-9, atol=0)


class Operations(TorchDispatchMode):
    """Counts what torch does, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_table_is_made_once_and_never_of_fake_numbers() -> None:
    path, t = (
        objective_for_prediction("v", CONSTANTS, TimestepSampler()).noise_path,
        torch.tensor([0.0, 0.3, 1.0]),
    )
    with FakeTensorMode():  # a plan may come first …
        assert path(torch.rand(3)).alpha.shape == (3, 1, 1, 1, 1)
    with Operations() as first:
        made = path(t)
    with Operations() as second:
        again = path(t)
    assert first.seen["cumprod"] == 1
    assert second.seen["cumprod"] == 0
    with FakeTensorMode():  # … or later
        path(torch.rand(2))
    truth = v_at(t, table(1.0, True))
    for one in (made, again, path(t)):
        assert torch.equal(one.alpha, truth.alpha)
        assert torch.equal(one.sigma, truth.sigma)


@pytest.mark.cuda
def test_the_host_does_not_wait_for_the_table() -> None:
    path, t = (
        objective_for_prediction("v", CONSTANTS, TimestepSampler()).noise_path,
        torch.rand(3, device="cuda"),
    )
    path(t)
    with no_host_sync():
        alpha = path(t).alpha
    assert torch.equal(alpha.cpu(), v_at(t.cpu(), table(1.0, True)).alpha)


def test_within_cuts_on_both_sides_and_never_widens() -> None:
    sampler = TimestepSampler(lo=0.2, hi=0.8)
    for asked, cut in {
        (0.0, 1.0): (0.2, 0.8),
        (0.3, 0.6): (0.3, 0.6),
        (0.1, 0.5): (0.2, 0.5),
        (0.5, 0.9): (0.5, 0.8),
    }.items():
        narrow = sampler.within(*asked)
        assert (narrow.lo, narrow.hi) == cut
    with pytest.raises(VideotuneError):
        sampler.within(0.8, 1.0)


@pytest.mark.parametrize("scale", [-1.0, 2 / (math.pi - 2)])
def test_the_ends_of_the_scale_of_mode_are_allowed(scale: float) -> None:
    sampler = TimestepSampler("MODE", mode_scale=scale)
    t = sampler.draw(torch.tensor([0.0, 0.5, 1.0]))
    assert t[1] == pytest.approx(0.5)


def test_no_draw_leaves_the_last_step_of_a_grid() -> None:
    """The probability of 1 is that of the end of the range, which is not in it."""
    sampler = TimestepSampler("UNIFORM", hi=0.5, num_timesteps=1000)
    last = sampler.draw(torch.ones(1, dtype=torch.float64))
    assert 0.5 - 1 / 999 < last < 0.5
