"""bf16 weights rounded by chance, updates while backward runs, and averages on the host."""

import pytest
import torch
from torch import nn

from videotune.config.schema import Optimizer
from videotune.trainer.ema import Ema
from videotune.trainer.optimizers import clip, make_optimizer, optimizer_state
from videotune.trainer.updates import InBackward, owners_of, round_by_chance, update_each_rounded, update_rounded

GOOD = torch.tensor(True)


def test_rounding_by_chance_is_right_on_average() -> None:
    """Of numbers a share s of bf16's step above a neighbour, s go up; the mean of all is the number."""
    for share in (0.0, 0.1, 0.5, 0.9):
        for low in (1.0, -1.0, 2.0**-15, -300.0):
            step = torch.nextafter(torch.tensor(low).bfloat16(), torch.tensor(low * 2).bfloat16()).float().item() - low
            x = torch.full((40_000,), low + share * step)
            y = round_by_chance(x, 0, "a").float()
            assert set(y.tolist()) <= {low, low + step}
            up = (y != low).float().mean().item()
            assert up == pytest.approx(share, abs=4 * (share * (1 - share) / 40_000) ** 0.5 + 1e-4)


def test_rounding_by_chance_keeps_what_bf16_holds_and_what_is_not_finite() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(round_by_chance(exact.float(), 1, "a"), exact)
    odd = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])
    assert torch.equal(round_by_chance(odd, 1, "a").float(), odd)
    assert round_by_chance(torch.tensor([float("nan")]), 1, "a").isnan().all()


def test_a_rounded_step_that_is_not_good_changes_nothing() -> None:
    weight = nn.Parameter(torch.randn(50, 50, dtype=torch.bfloat16))
    optimizer = make_optimizer({"w": [weight]}, Optimizer(), apart=True)
    before, place = weight.detach().clone(), weight.data_ptr()
    weight.grad = torch.full_like(weight, float("nan"))
    update_each_rounded(optimizer, {"w": weight}, torch.tensor(False), 0, 1, {})
    assert torch.equal(weight, before)
    assert weight.data_ptr() == place, "the network still holds the same memory"
    assert weight.grad is None


def test_the_norm_of_bf16_gradients_is_summed_in_float32() -> None:
    weight = nn.Parameter(torch.zeros(100_003, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    assert clip([weight], 1e9).item() == pytest.approx(100_003**0.5, rel=1e-6)
    clip([weight], 1.0)
    assert weight.grad.float().norm().item() == pytest.approx(1.0, rel=1e-2)


def test_averages_of_bf16_weights_are_float32_and_come_back_exactly() -> None:
    weight = nn.Parameter(torch.randn(20, 20).bfloat16())
    ema = Ema({"w": weight}, 0.99)
    weight.data += 1
    ema.update(1)
    before, own = ema.values["w"].clone(), weight.detach().clone()
    assert before.dtype == torch.float32
    assert not torch.equal(before.bfloat16().float(), before)
    with ema.in_place():
        assert torch.equal(weight, before.bfloat16())
    assert torch.equal(ema.values["w"], before)
    assert torch.equal(weight, own)


@pytest.mark.cuda
def test_averages_on_the_host_take_no_device_memory() -> None:
    weight = nn.Parameter(torch.randn(1 << 22, device="cuda"))
    before = torch.cuda.memory_allocated()
    ema = Ema({"w": weight}, 0.9, host=True)
    assert torch.cuda.memory_allocated() == before
    weight.data += 1
    ema.update(1, torch.tensor(True, device="cuda"))
    own = weight.detach().clone()
    with ema.in_place():
        assert torch.equal(weight.cpu(), ema.values["w"]) is False, "they have changed places"
    assert torch.equal(weight, own)


@pytest.mark.parametrize("name", ["ADAMW", "LION", "ADAFACTOR", "MUON", "ADAMW_8BIT"])
def test_small_updates_add_up_in_bf16_where_rounding_to_nearest_loses_them(name: str) -> None:
    """300 updates of 1e-4 on weights of 1, whose bf16 step is 1/128: nearest stays, by chance the mean arrives."""
    weights = {dtype: nn.Parameter(torch.ones(80, 80, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)}
    optimizers = {
        dtype: make_optimizer({"w": [weight]}, Optimizer(name=name, weight_decay=0.0), apart=True)
        for dtype, weight in weights.items()
    }
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        gradient = torch.randn(80, 80, generator=generator) * 0.1 + 1
        for dtype, weight in weights.items():
            for group in optimizers[dtype].param_groups:
                group["lr"] = 1e-4 if name != "MUON" else 1e-3
            weight.grad, before = gradient.to(dtype), weight.detach().float()
            update_rounded(owners_of(optimizers[dtype])[id(weight)], weight, GOOD, 0, step, "w")
        if step == 0:
            one = before - weights[torch.float32].detach()
            assert torch.equal((before - one).bfloat16().float(), before) or name == "MUON", "nearest loses the update"
    exact, rounded = (1 - weight.detach().float().mean().item() for weight in weights.values())
    assert exact > 4e-3
    assert rounded == pytest.approx(exact, rel=0.05)
    kept = optimizer_state(optimizers[torch.bfloat16], {"w": weights[torch.bfloat16]})
    assert torch.bfloat16 not in {value.dtype for value in kept.values()}, "moments are float32 (or 8 bits)"


def test_within_backward_a_gradient_that_is_not_finite_leaves_its_own_tensor_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    parameters = dict(net.named_parameters())
    optimizer = make_optimizer({"all": list(net.parameters())}, Optimizer(), apart=True)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    updates = InBackward(1e9).attach(parameters, optimizer)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    parameters["2.weight"].register_hook(lambda gradient: gradient * float("inf"))
    loss = net(torch.randn(4, 32)).square().mean()
    updates.begin(1)
    updates.loss(loss)
    loss.backward()
    assert not updates.norm().isfinite()
    assert {name for name, value in parameters.items() if not torch.equal(value, before[name])} == {*before} - {
        "2.weight"
    }
    assert all(value.isfinite().all() for value in parameters.values())
