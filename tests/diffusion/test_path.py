from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from videotune.diffusion.loss import flow_path, objective, scaled_linear_alphas_cumprod, v_path
from videotune.diffusion.timesteps import Timesteps
from videotune.types import Path

K = 1000
TABLES = [(3.0, True), (1.0, True), (3.0, False), (1.0, False)]


def table(shift: float, zero_snr: bool) -> torch.Tensor:
    return scaled_linear_alphas_cumprod(0.00085, 0.012, K, shift, zero_snr)


def v_at(t: torch.Tensor, alphas_cumprod: torch.Tensor) -> Path:
    return v_path(lambda: alphas_cumprod)(t)


def latents(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, batch, 4, 3, 5, 6, generator=generator))  # type: ignore[return-value]


def paths(t: torch.Tensor) -> list[Path]:
    return [flow_path(t), *(v_at(t, table(*which)) for which in TABLES)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=6))
def test_identities_hold_on_both_paths(ts: list[float]) -> None:
    x0, noise = latents(len(ts))
    for path in paths(torch.tensor(ts)):
        assert path.alpha.shape == path.d_sigma.shape == (len(ts), 1, 1, 1, 1)
        assert path.alpha.dtype == path.d_alpha.dtype == torch.float32
        one = path.alpha * path.d_sigma - path.sigma * path.d_alpha
        torch.testing.assert_close(one, torch.ones_like(one), rtol=0, atol=5e-7)
        x_t = path.alpha * x0 + path.sigma * noise
        v = path.d_alpha * x0 + path.d_sigma * noise
        torch.testing.assert_close(path.d_sigma * x_t - path.sigma * v, x0, rtol=0, atol=3e-6)
        torch.testing.assert_close(path.alpha * v - path.d_alpha * x_t, noise, rtol=0, atol=3e-6)


def test_ends_are_data_and_noise() -> None:
    x0, noise = latents(2)
    ends = torch.tensor([0.0, 1.0])
    flow, v = flow_path(ends), v_at(ends, table(3.0, True))
    assert torch.equal(flow.alpha * x0 + flow.sigma * noise, torch.stack([x0[0], noise[1]]))
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
@pytest.mark.parametrize("scheduler_class", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
def test_v_path_is_the_schedulers(scheduler_class: type, shift: float, zero_snr: bool) -> None:
    # The class's own defaults are no checkpoint's: every number is passed.
    scheduler = scheduler_class(
        num_train_timesteps=K,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=zero_snr,
        snr_shift_scale=shift,
    )
    assert torch.equal(table(shift, zero_snr), scheduler.alphas_cumprod)
    k = torch.tensor([0, 1, 17, 250, 500, 998, 999])
    x0, noise = latents(len(k))
    path = v_at(k / (K - 1), table(shift, zero_snr))
    noisy = path.alpha * x0 + path.sigma * noise
    velocity = path.d_alpha * x0 + path.d_sigma * noise
    torch.testing.assert_close(noisy, scheduler.add_noise(x0, noise, k), rtol=0, atol=2e-6)
    torch.testing.assert_close(velocity, scheduler.get_velocity(x0, noise, k), rtol=0, atol=2e-6)
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
    torch.testing.assert_close(noisy, scheduler.scale_noise(x0, scheduler.timesteps[some], noise), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shift", "zero_snr"), TABLES)
def test_weighted_x0_form_is_plain_v_mse(shift: float, zero_snr: bool) -> None:
    # x̂0 - x0 = -σ(v̂ - v): the published weight 1/(1 - ᾱ) on the error of x0 cancels.
    alphas_cumprod = table(shift, zero_snr)[torch.tensor([0, 1, 100, 500, 900, 999])].view(-1, 1, 1, 1, 1)
    alpha, sigma = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    path = Path(alpha, sigma, -sigma, alpha)
    x0, noise = (x.double() for x in latents(6))
    x_t, v = alpha * x0 + sigma * noise, alpha * noise - sigma * x0
    predicted = v + 0.3 * torch.randn(v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x0_form = (path.d_sigma * x_t - path.sigma * predicted - x0).square() / (1 - alphas_cumprod)
    torch.testing.assert_close(
        x0_form.mean((1, 2, 3, 4)), (predicted - v).square().mean((1, 2, 3, 4)), rtol=1e-9, atol=0
    )


CONSTANTS = {
    "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": K, "snr_shift_scale": 1.0,
    "rescale_betas_zero_snr": True,
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts what torch does, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_table_is_made_once_and_never_of_fake_numbers() -> None:
    path, t = objective("v", CONSTANTS, Timesteps()).path, torch.tensor([0.0, 0.3, 1.0])
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
    path, t = objective("v", CONSTANTS, Timesteps()).path, torch.rand(3, device="cuda")
    path(t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        alpha = path(t).alpha
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(alpha.cpu(), v_at(t.cpu(), table(1.0, True)).alpha)
