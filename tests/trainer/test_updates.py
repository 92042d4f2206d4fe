"""bf16 weights rounded by chance, updates while backward runs, and averages on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from videotune.config.schema import Optimizer
from videotune.trainer.ema import Ema
from videotune.trainer.optimizers import RateSettings, apply, clip, make_optimizer, optimizer_state
from videotune.trainer.step import StepSettings, Trainable, train_step
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


@pytest.mark.parametrize("name", ["ADAMW", "LION", "ADAFACTOR", "MUON", "ADAMW_8BIT"])
def test_small_updates_add_up_in_bf16_where_rounding_to_nearest_loses_them(name: str) -> None:
    """300 updates of 1e-4 on weights of 1, whose bf16 step is 1/128: nearest stays, by chance the mean arrives."""
    weights = {kind: nn.Parameter(torch.ones(80, 80, dtype=torch.bfloat16)) for kind in ("nearest", "chance")}
    single = nn.Parameter(torch.ones(80, 80))
    own = {"nearest": weights["nearest"], "chance": weights["chance"], "float32": single}
    optimizers = {
        kind: make_optimizer({"w": [weight]}, Optimizer(name=name, weight_decay=0.0), apart=True)
        for kind, weight in own.items()
    }
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        gradient = torch.randn(80, 80, generator=generator) * 0.1 + 1
        for kind, weight in own.items():
            for group in optimizers[kind].param_groups:
                group["lr"] = 1e-4 if name != "MUON" else 1e-3
            if kind == "nearest":
                with torch.no_grad():  # what the optimizer makes of a float32 copy, put back rounded to nearest
                    held, weight.grad = weight.data, None
                    weight.data = held.float()
                    weight.grad = gradient.clone()
                    (part,) = optimizers[kind].parts
                    part.step()
                    weight.grad = None
                    held.copy_(weight.data)
                    weight.data = held
            else:
                weight.grad = gradient.to(weight.dtype)
                update_rounded(owners_of(optimizers[kind])[id(weight)], weight, GOOD, 0, step, "w")
                if kind == "float32":
                    assert weight.grad is None
    moved = {kind: 1 - weight.detach().float().mean().item() for kind, weight in own.items()}
    assert moved["float32"] > 4e-3
    assert moved["chance"] == pytest.approx(moved["float32"], rel=0.05)
    assert moved["nearest"] < 0.2 * moved["float32"]
    assert weights["chance"].dtype == torch.bfloat16
    kept = optimizer_state(optimizers["chance"], {"w": weights["chance"]})
    assert torch.bfloat16 not in {value.dtype for value in kept.values()}, "moments are float32 (or 8 bits)"


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


class Watch:
    """A chain of layers whose gradients are counted as they live."""

    def __init__(
        self, apart: bool, most: float = 1e9, dtype: torch.dtype = torch.float32, rounding: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))).to(dtype)
        self.parameters = dict(self.net.named_parameters())
        self.optimizer = make_optimizer({"all": list(self.parameters.values())}, Optimizer(), apart=apart)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01
        self.alive: list[int] = []
        self.updates = InBackward(most, 0 if rounding else None)
        if apart:
            self.updates.attach(self.parameters, self.optimizer)
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda _: self.alive.append(self.bytes()))

    def bytes(self) -> int:
        return sum(p.grad.numel() * p.grad.element_size() for p in self.parameters.values() if p.grad is not None)

    def within(self, step: int = 1, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
        """The norm of a step whose updates come in its backward pass."""
        self.updates.begin(step)
        loss = self.loss(spoil)
        self.updates.loss(loss)
        loss.backward()
        return self.updates.norm()

    def loss(self, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(next(self.net.parameters()).dtype)
        return spoil(self.net(x)).float().square().mean()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}


def test_updates_within_backward_are_the_same_and_gradients_do_not_pile_up() -> None:
    """The peak of live gradients falls from all of them to less than one layer's."""
    after, within = Watch(False), Watch(True)
    for step in (1, 2, 3):
        after.loss().backward()
        norm = clip(list(after.parameters.values()), 1e9)
        apply(after.optimizer, GOOD)
        after.optimizer.zero_grad()
        assert within.within(step).item() == pytest.approx(norm.item(), rel=1e-5)
    assert all(torch.equal(value, within.weights()[name]) for name, value in after.weights().items())
    assert max(after.alive) == 8 * 4 * (32 * 32 + 32)
    assert max(within.alive) <= 4 * (32 * 32 + 32)


def test_within_backward_a_loss_that_is_not_finite_updates_nothing() -> None:
    watch = Watch(True)
    before = watch.weights()
    assert not watch.within(1, lambda x: x * float("nan")).isfinite()
    assert all(torch.equal(value, before[name]) for name, value in watch.weights().items())
    assert watch.bytes() == 0


def test_within_backward_a_gradient_that_is_not_finite_leaves_its_own_tensor_alone() -> None:
    watch = Watch(True)
    before = watch.weights()
    watch.parameters["3.weight"].register_hook(lambda g: g * float("inf"))
    assert not watch.within().isfinite()
    changed = {name for name, value in watch.weights().items() if not torch.equal(value, before[name])}
    assert changed == set(before) - {"3.weight"}
    assert all(value.isfinite().all() for value in watch.weights().values())


def test_within_backward_bf16_weights_are_rounded_by_the_same_draws() -> None:
    after, within = Watch(True, dtype=torch.bfloat16, rounding=True), Watch(True, dtype=torch.bfloat16, rounding=True)
    for parameter in after.parameters.values():
        parameter._post_accumulate_grad_hooks.clear()
    after.loss().backward()
    update_each_rounded(after.optimizer, after.parameters, GOOD, 0, 1, {})
    within.within()
    assert all(torch.equal(value, within.weights()[name]) for name, value in after.weights().items())
    assert {value.dtype for value in within.weights().values()} == {torch.bfloat16}


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


@pytest.mark.parametrize("settings", [StepSettings(2, 1.0, None), StepSettings(1, 1.0, None, micro_batch_size=1)])
def test_a_split_step_is_refused_within_backward(settings: StepSettings) -> None:
    trainable = Trainable(
        {"w": nn.Parameter(torch.zeros(1))},
        make_optimizer({"t": [nn.Parameter(torch.zeros(1))]}, Optimizer(), apart=True),
        {"t": RateSettings(1.0, "CONSTANT", 0, 1)},
        in_backward=InBackward(1.0),
    )
    prepared: Any = type("P", (), {"step": 1, "window_ids": ("w", "v")})
    nothing: Any = None
    with pytest.raises(AssertionError, match="cannot be summed up"):
        train_step(nothing, nn.Linear(1, 1), trainable, nothing, prepared, settings, nothing, nothing)
