"""The step: any split is the same step, what is not finite is not applied, the rate is the field's."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from videotune.adapters.lora import LoraSettings, add_lora
from videotune.cache.batches import Prepared
from videotune.diffusion.objective import objective
from videotune.diffusion.timesteps import Timesteps
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.train.optimizers import (
    OptimizerSettings,
    RateSettings,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    rate,
)
from videotune.train.step import Clock, StepRecord, StepSettings, by_t, train_step
from videotune.types import Batch, Condition

Open = Callable[..., Any]
CPU = torch.device("cpu")


class Setup:
    """A tiny model with an adapter that already does something, its optimizer, and a batch of four."""

    def __init__(self, family: Any, lr: float = 1e-2, dropout: float = 0.0) -> None:
        self.family, self.net = family, family.denoiser()
        self.parameters = add_lora(self.net, family.spec, LoraSettings(rank=4, dropout=dropout), seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.parameters.items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1, generator=generator)
        self.net.train()
        self.optimizer = make_optimizer({"transformer": list(self.parameters.values())}, OptimizerSettings())
        self.objective = objective("flow", {}, Timesteps("LOGIT_NORMAL", 3.0), temporal_consistency=0.5)
        self.lr = lr

    def prepared(self, step: int = 1, count: int = 4) -> Prepared:
        generator = torch.Generator().manual_seed(step)
        x0 = torch.randn(count, 4, 2, 4, 4, generator=generator)
        none = torch.zeros(count, 1, 2, 1, 1, dtype=torch.bool)
        cond = Condition(torch.randn(count, 8, 16, generator=generator))
        batch = Batch(x0, none, none, torch.ones(none.shape), cond, ("",) * count, ("w",) * count, torch.ones(count))
        return Prepared(step, batch, torch.rand(count, generator=generator), torch.randn(x0.shape, generator=generator))

    def step(self, prepared: Prepared, micro: int = 4, clip: float = 1.0, seed: int | None = None) -> StepRecord:
        settings = StepSettings(micro, clip, seed)
        lr = {"transformer": self.lr}
        return train_step(
            self.family, self.net, self.objective, prepared, list(self.parameters.values()), self.optimizer, settings, lr,
            Clock(CPU),
        )  # fmt: skip

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_is_the_whole_batch(micro: int, tiny_family: Open) -> None:
    whole, split = Setup(tiny_family("wan")), Setup(tiny_family("wan"))
    for step in (1, 2, 3):
        one, other = whole.step(whole.prepared(step)).read(), split.step(split.prepared(step), micro=micro).read()
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    torch.testing.assert_close(whole.weights(), split.weights(), rtol=1e-3, atol=1e-5)


def test_checkpointing_is_the_same_step(tiny_family: Open) -> None:
    plain, checkpointed = Setup(tiny_family("wan")), Setup(tiny_family("wan"))
    checkpoint_blocks(checkpointed.net, "ON")
    for step in (1, 2):
        assert plain.step(plain.prepared(step)).read()["loss"] == checkpointed.step(plain.prepared(step)).read()["loss"]
    assert torch.equal(plain.weights(), checkpointed.weights())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_not_applied(bad: float, tiny_family: Open) -> None:
    setup = Setup(tiny_family("wan"))
    setup.step(setup.prepared(1))
    weights, state = setup.weights(), optimizer_state(setup.optimizer, setup.parameters)
    state = {key: value.clone() for key, value in state.items()}
    poisoned = setup.prepared(2)
    poisoned.batch.x0[1, 0, 0, 0, 0] = bad
    line = setup.step(poisoned).read()
    assert line["skipped"] is True
    assert torch.equal(setup.weights(), weights)
    after = optimizer_state(setup.optimizer, setup.parameters)
    assert all(torch.equal(value, after[key]) for key, value in state.items())
    line = setup.step(setup.prepared(3)).read()
    assert "skipped" not in line
    assert not torch.equal(setup.weights(), weights)


def test_the_gradient_is_clipped_once_for_the_whole_step(tiny_family: Open) -> None:
    """AdamW's first moments after one step are (1 - beta1) × the clipped gradient, so their norm tells."""
    for micro in (4, 1):
        setup = Setup(tiny_family("wan"))
        line = setup.step(setup.prepared(1), micro=micro, clip=1e-3).read()
        assert line["grad_norm"] > 1e-3, "the norm in the journal is the one before clipping"
        moments = optimizer_state(setup.optimizer, setup.parameters)
        total = math.sqrt(sum(float(v.square().sum()) for k, v in moments.items() if k.endswith("exp_avg")))
        assert total == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_draws_in_the_network_belong_to_the_step(tiny_family: Open) -> None:
    """Adapter dropout: the same step gives the same loss whatever was drawn before; another step another."""
    first, again = Setup(tiny_family("wan"), dropout=0.5), Setup(tiny_family("wan"), dropout=0.5)
    prepared = first.prepared(1)
    one = first.step(prepared, seed=5).read()["loss"]
    torch.rand(1000)
    assert again.step(prepared, seed=5).read()["loss"] == one
    other = Setup(tiny_family("wan"), dropout=0.5)
    assert other.step(prepared, seed=6).read()["loss"] != one


def test_the_optimizers_state_goes_to_tensors_and_back(tiny_family: Open) -> None:
    setup, other = Setup(tiny_family("wan")), Setup(tiny_family("wan"))
    for step in (1, 2):
        setup.step(setup.prepared(step))
    state = {key: value.clone() for key, value in optimizer_state(setup.optimizer, setup.parameters).items()}
    for name, parameter in setup.parameters.items():
        other.parameters[name].data.copy_(parameter)
    load_optimizer_state(other.optimizer, other.parameters, state)
    setup.step(setup.prepared(3))
    other.step(other.prepared(3))
    assert torch.equal(setup.weights(), other.weights())
    name = next(iter(state))
    with pytest.raises(ValueError, match="no optimizer state for"):
        load_optimizer_state(other.optimizer, other.parameters, {})
    with pytest.raises(ValueError, match="of no parameter"):
        load_optimizer_state(other.optimizer, other.parameters, state | {"stranger.exp_avg": state[name]})


@pytest.mark.parametrize(
    ("scheduler", "make"),
    [
        ("CONSTANT", lambda o, w, n: get_constant_schedule_with_warmup(o, w)),
        ("LINEAR", get_linear_schedule_with_warmup),
        ("COSINE", get_cosine_schedule_with_warmup),
    ],
)
def test_the_rate_is_transformers(scheduler: str, make: Callable[..., Any]) -> None:
    """After the warm-up ours is theirs; in it theirs starts at 0, which would waste a step, ours one step up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = make(optimizer, 10, 60)
    settings = RateSettings(2.0, scheduler, 10, 60)
    assert rate(settings, 1) == pytest.approx(2.0 / 11)
    assert rate(settings, 10) == pytest.approx(2.0 * 10 / 11)
    for step in range(1, 61):
        if step > 10:
            assert rate(settings, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_losses_are_told_by_noise_level() -> None:
    bands = by_t([0.0, 0.05, 0.5, 1.0], [1.0, 3.0, 5.0, 7.0])
    assert bands == [2.0, None, None, None, 5.0, None, None, None, 7.0]


def test_seconds_by_phase_are_the_steps_own(tiny_family: Open) -> None:
    setup = Setup(tiny_family("wan"))
    seconds = setup.step(setup.prepared(1), micro=2).read()["seconds"]
    assert set(seconds) == {"forward", "backward", "optimizer"}
    assert all(value > 0 for value in seconds.values())
