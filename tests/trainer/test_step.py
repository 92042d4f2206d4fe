"""The step: any split is the same step, what is not finite is not applied, the rate is the field's."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models import ModelMixin
from torch import nn
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from videotune.adapters.lora import adapter_off, add_lora
from videotune.config.schema import Lora, Optimizer
from videotune.diffusion.loss import objective
from videotune.diffusion.timesteps import Timesteps
from videotune.latent_cache.batches import StepBatch
from videotune.trainer.optimizers import RateSettings, make_optimizer, rate
from videotune.trainer.step import Clock, StepRecord, StepSettings, Trainable, by_t, train_step
from videotune.types import Batch, Condition

Open = Callable[..., Any]
CPU = torch.device("cpu")


class Setup:
    """A tiny model with an adapter that already does something, its optimizer, and a batch of four."""

    def __init__(self, family: Any, lr: float = 1e-2, dropout: float = 0.0, fresh: bool = False) -> None:
        self.family, self.net = family, family.denoiser()
        self.parameters = add_lora(self.net, family.spec, Lora(rank=4, dropout=dropout), seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.parameters.items():
            if "lora_B" in name and not fresh:
                parameter.data.normal_(std=0.1, generator=generator)
        self.net.train()
        self.optimizer = make_optimizer({"transformer": list(self.parameters.values())}, Optimizer())
        self.objective = objective("flow", {}, Timesteps("LOGIT_NORMAL", 3.0), temporal_consistency=0.5)
        self.lr = lr

    def prepared(
        self, step: int = 1, count: int = 4, prior: Sequence[int] = (), scale: Sequence[float] = ()
    ) -> StepBatch:
        generator = torch.Generator().manual_seed(step)
        x0 = torch.randn(count, 4, 2, 4, 4, generator=generator)
        batch = Batch.of(
            x0,
            Condition(torch.randn(count, 8, 16, generator=generator)),
            scale=torch.tensor(scale or [1.0] * count),
            prior=tuple(i in prior for i in range(count)),
            window_ids=("w",) * count,
        )
        t, noise = torch.rand(count, generator=generator), torch.randn(x0.shape, generator=generator)
        return StepBatch(step, batch.window_ids, batch.captions, t, 0, batch, noise)

    def step(
        self, prepared: StepBatch, parts: int = 1, clip: float = 1.0, seed: int | None = None, most: int | None = None
    ) -> StepRecord:
        trainable = Trainable(self.parameters, self.optimizer, {"transformer": RateSettings(self.lr, "CONSTANT", 0, 1)})
        settings = StepSettings(self.family, self.objective, parts, clip, seed, most)
        return train_step(settings, self.net, trainable, prepared, Clock(CPU))

    def gradient(
        self, prepared: StepBatch, parts: int = 1, seed: int | None = None, most: int | None = None
    ) -> torch.Tensor:
        """What the optimizer is given, as one vector."""
        seen: list[torch.Tensor] = []

        def keep(*_: Any) -> None:
            seen.append(torch.cat([p.grad.flatten().clone() for p in self.parameters.values()]))

        handle = self.optimizer.register_step_pre_hook(keep)
        self.step(prepared, parts, 1e9, seed, most)
        handle.remove()
        return seen[0]

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


class Layers(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """A diffusers model that can be float64 throughout, as Wan, whose norms are float32, cannot."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x.movedim(1, -1)).movedim(-1, 1)) + x
        return x


class LayersFamily:
    """What the step asks of a family."""

    spec: Any = SimpleNamespace(title="layers", blocks=("blocks",), lora_targets={"attention": (r"blocks\.\d+",)})

    def denoiser(self) -> nn.Module:
        torch.manual_seed(3)
        return Layers().double().requires_grad_(False)

    def predict(self, net: nn.Module, x_t: torch.Tensor, t: torch.Tensor, batch: Batch) -> torch.Tensor:
        return net(x_t) * (1 + t.view(-1, 1, 1, 1, 1))


@pytest.mark.parametrize(("parts", "most"), [(2, None), (3, None), (5, None), (1, 1), (1, 2), (2, 2), (1, 4), (1, 9)])
def test_any_split_is_the_same_step_in_float64(parts: int, most: int | None) -> None:
    """Prior samples, scales, dropped frames and masks included; by a count of parts, or by their size."""
    gradients = []
    for count, size in ((1, None), (parts, most)):
        setup = Setup(LayersFamily())
        for parameter in setup.parameters.values():
            parameter.data = parameter.data.double()
        prepared = setup.prepared(1, 5, prior=(1, 2, 4), scale=(1.0, 0.5, 2.0, 3.0, 0.1))
        dropped = prepared.batch.dropped.clone()
        dropped[2, :, 1] = True
        weight = torch.ones(5, 1, 2, 4, 4)
        weight[0, ..., :2] = 0
        batch = replace(prepared.batch, dropped=dropped, weight=weight * ~dropped).map(
            lambda x: x.double() if x.is_floating_point() else x
        )
        prepared = replace(prepared, batch=batch, t=prepared.t.double(), noise=prepared.noise.double())
        gradients.append(setup.gradient(prepared, count, most=size))
    assert gradients[0].dtype == torch.float64
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)


def test_before_the_first_step_a_prior_sample_costs_nothing(tiny_family: Open) -> None:
    """B is 0, so the model is the base: exactly, where all are prior; beside others, to rounding."""
    setup = Setup(tiny_family("wan"), fresh=True, dropout=0.5)
    line = setup.step(setup.prepared(1, prior=range(4)), seed=1).read()
    assert line["loss"] == line["mse"] == line["grad_norm"] == 0
    setup = Setup(tiny_family("wan"), fresh=True)
    record = setup.step(setup.prepared(1, prior=(1, 2)))
    mse = record.values[2:]
    assert (mse[[1, 2]] < 1e-10).all()
    assert (mse[[0, 3]] > 0.1).all()


def test_the_base_is_asked_without_dropout_and_moves_no_draw(tiny_family: Open) -> None:
    """The trained pass has its dropout, and the same one as where nothing is prior."""
    setup, modes = Setup(tiny_family("wan"), dropout=0.5), []
    handle = setup.net.register_forward_pre_hook(lambda net, _: modes.append((net.training, torch.is_grad_enabled())))
    masks: list[torch.Tensor] = []
    layer = next(module for name, module in setup.net.named_modules() if name.endswith("lora_dropout.default"))
    watch = layer.register_forward_hook(lambda _, words, out: masks.append(out == 0))
    setup.step(setup.prepared(1, prior=(0, 3)), seed=5)
    setup.step(setup.prepared(1), seed=5)
    handle.remove()
    watch.remove()
    assert modes == [(False, False), (True, True), (True, True)]
    assert len(masks) == 2, "with the adapter off its dropout is not met"
    assert torch.equal(masks[0], masks[1])
    assert 0.3 < masks[0].float().mean() < 0.7


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_adapter_off_is_the_base_and_then_all_is_as_before(interrupted: bool, tiny_family: Open) -> None:
    family = tiny_family("wan")
    setup, base = Setup(family, dropout=0.5), family.denoiser().eval()
    one = setup.prepared(1)
    setup.net.blocks[1].eval()  # whatever is set, by whomever
    next(iter(setup.parameters.values())).requires_grad_(False)

    def state() -> tuple[Any, ...]:
        trained = {name: parameter.clone() for name, parameter in setup.net.named_parameters()}
        flags = {name: parameter.requires_grad for name, parameter in setup.net.named_parameters()}
        return trained, flags, {name: module.training for name, module in setup.net.named_modules()}

    before, rng = state(), torch.random.get_rng_state()
    with suppress(KeyboardInterrupt), torch.no_grad(), adapter_off(setup.net):
        said = family.predict(setup.net, one.batch.x0, one.t, one.batch)
        assert torch.equal(said, family.predict(base, one.batch.x0, one.t, one.batch))
        if interrupted:
            raise KeyboardInterrupt
    after = state()
    assert before[1:] == after[1:]
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert torch.equal(torch.random.get_rng_state(), rng)
    setup.net.eval()
    with torch.no_grad():
        said = family.predict(setup.net, one.batch.x0, one.t, one.batch)
        assert not torch.equal(said, family.predict(base, one.batch.x0, one.t, one.batch)), "it is on again"


@pytest.mark.parametrize(
    ("scheduler", "make"),
    [
        ("CONSTANT", lambda o, w, n: get_constant_schedule_with_warmup(o, w)),
        ("LINEAR", get_linear_schedule_with_warmup),
        ("COSINE", get_cosine_schedule_with_warmup),
        ("COSINE_RESTARTS", lambda o, w, n: get_cosine_with_hard_restarts_schedule_with_warmup(o, w, n, num_cycles=3)),
        ("POLYNOMIAL", lambda o, w, n: get_polynomial_decay_schedule_with_warmup(o, w, n, lr_end=0.0, power=2.5)),
    ],
)
def test_the_rate_is_transformers(scheduler: str, make: Callable[..., Any]) -> None:
    """After the warm-up ours is theirs; in it theirs starts at 0, which would waste a step, ours one step up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = make(optimizer, 10, 60)
    settings = RateSettings(2.0, scheduler, 10, 60, cycles=3, power=2.5)
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
