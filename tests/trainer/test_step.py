"""The step: any split is the same step, the rate is the field's, updates in bf16 and
during backward.
"""

import time
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
from pytorch_optimizer.lr_scheduler import REXScheduler
from torch import nn
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from videotune.adapters.lora import adapter_off, add_lora
from videotune.config.schema import Optimizer
from videotune.config.sections import Lora
from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.sharding import Shard, Shards
from videotune.trainer import network_pass
from videotune.trainer import step as step_module
from videotune.trainer.ema import EmaWeights
from videotune.trainer.low_precision import (
    BackwardOptimizer,
    owners_of,
    stochastic_round,
    update_each_rounded,
    update_rounded,
)
from videotune.trainer.lr_schedule import FACTORS, LRSchedule, lr_at
from videotune.trainer.micro_batches import micro_batches
from videotune.trainer.network_pass import PassInputs, PassOutput, tokens_per_sample
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.optimizers import clip_grad_norm, make_optimizer
from videotune.trainer.step import (
    OutOfMemory,
    _pass_inputs,
    _record,
    _start_again,
    _update,
    train_step,
)
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import (
    FIRST_MSE,
    LOSS,
    Clock,
    StepRecord,
    empty_values,
    loss_by_noise_level,
    write_values,
)
from videotune.types import Batch, Conditioning, LossOutput, Velocity

Open = Callable[..., Any]
CPU = torch.device("cpu")


class Setup:
    """A tiny model with an adapter that already does something, its optimizer, and a
    batch of four.
    """

    def __init__(
        self, family: Any, lr: float = 1e-2, dropout: float = 0.0, fresh: bool = False
    ) -> None:
        self.family, self.net = family, family.denoiser()
        self.parameters = add_lora(
            self.net, family.spec, Lora(rank=4, dropout=dropout), seed=0
        )
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.parameters.items():
            if "lora_B" in name and not fresh:
                parameter.data.normal_(std=0.1, generator=generator)
        self.net.train()
        self.optimizer = make_optimizer(
            {"transformer": list(self.parameters.values())}, Optimizer()
        )
        self.objective = objective_for_prediction(
            "flow", {}, TimestepSampler("LOGIT_NORMAL", 3.0), temporal_consistency=0.5
        )
        self.lr = lr

    def prepared(
        self,
        step: int = 1,
        count: int = 4,
        prior: Sequence[int] = (),
        scale: Sequence[float] = (),
    ) -> StepBatch:
        generator = torch.Generator().manual_seed(step)
        x0 = torch.randn(count, 4, 2, 4, 4, generator=generator)
        batch = Batch.of(
            x0,
            Conditioning(torch.randn(count, 8, 16, generator=generator)),
            loss_weight=torch.tensor(scale or [1.0] * count),
            prior_preservation=tuple(i in prior for i in range(count)),
            window_ids=("w",) * count,
        )
        t, noise = (
            torch.rand(count, generator=generator),
            torch.randn(x0.shape, generator=generator),
        )
        return StepBatch(step, batch.window_ids, batch.captions, t, 0, batch, noise)

    def step(
        self,
        prepared: StepBatch,
        parts: int = 1,
        clip: float = 1.0,
        seed: int | None = None,
        most: int | None = None,
    ) -> StepRecord:
        trainable = TrainableState(
            self.parameters,
            self.optimizer,
            {"transformer": LRSchedule(self.lr, "CONSTANT", 0, 1)},
        )
        context = StepContext(self.family, self.objective, parts, clip, seed, most)
        return train_step(context, self.net, trainable, prepared, Clock(CPU))

    def gradient(
        self,
        prepared: StepBatch,
        parts: int = 1,
        seed: int | None = None,
        most: int | None = None,
    ) -> torch.Tensor:
        """What the optimizer is given, as one vector."""
        seen: list[torch.Tensor] = []

        def keep(*_: Any) -> None:
            seen.append(
                torch.cat([p.grad.flatten().clone() for p in self.parameters.values()])
            )

        handle = self.optimizer.register_step_pre_hook(keep)
        self.step(prepared, parts, 1e9, seed, most)
        handle.remove()
        return seen[0]

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


class Layers(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """A diffusers model that can be float64 throughout, as Wan, whose norms are
    float32, cannot.
    """

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

    device = CPU
    spec: Any = SimpleNamespace(
        title="layers",
        blocks=("blocks",),
        block_lists=("blocks",),
        connectors=None,
        connectors_in_step=False,
        reads_sound=False,
        lora_targets={"attention": (r"blocks\.\d+",)},
        is_idle=lambda _: False,
    )

    def denoiser(self) -> nn.Module:
        torch.manual_seed(3)
        return Layers().double().requires_grad_(False)

    def predict(
        self, net: nn.Module, x_t: torch.Tensor, t: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        return net(x_t) * (1 + t.view(-1, 1, 1, 1, 1))


@pytest.mark.parametrize("has_target", [False, True])
def test_all_tensors_of_a_pass_are_mapped(has_target: bool, tiny_family: Open) -> None:
    """So a graph's own inputs are all of them."""
    prepared = Setup(tiny_family("wan")).prepared()
    target = Velocity(torch.ones(1), torch.ones(2)) if has_target else None
    inputs = PassInputs(prepared.batch, prepared.t, prepared.noise, target, 0.5)
    doubled = inputs.map(lambda x: x + x)
    for name in ("t", "noise"):
        assert torch.equal(getattr(doubled, name), 2 * getattr(inputs, name))
    assert torch.equal(doubled.batch.x0, 2 * inputs.batch.x0)
    assert doubled.weight == 0.5
    if target is None:
        assert doubled.target is None
    else:
        assert torch.equal(doubled.target.video, 2 * target.video)
        assert torch.equal(doubled.target.sound, 2 * target.sound)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_seconds_of_a_step_are_those_of_its_phases(
    parts: int, tiny_family: Open
) -> None:
    """All micro-batches together."""
    setup = Setup(tiny_family("wan"))
    begun = time.perf_counter()
    record = setup.step(setup.prepared(), parts)
    seconds = record.clock.read()
    assert list(seconds) == ["forward", "backward", "optimizer"]
    assert all(value >= 0 for value in seconds.values())
    assert 0 < sum(seconds.values()) <= time.perf_counter() - begun + 1e-5


@pytest.mark.parametrize(
    ("parts", "most"),
    [(2, None), (3, None), (5, None), (1, 1), (1, 2), (2, 2), (1, 4), (1, 9)],
)
def test_any_split_is_the_same_step_in_float64(parts: int, most: int | None) -> None:
    """Prior samples, scales, dropped frames and masks included; by a count of parts, or
    by their size.
    """
    gradients = []
    for count, size in ((1, None), (parts, most)):
        setup = Setup(LayersFamily())
        for parameter in setup.parameters.values():
            parameter.data = parameter.data.double()
        prepared = setup.prepared(
            1, 5, prior=(1, 2, 4), scale=(1.0, 0.5, 2.0, 3.0, 0.1)
        )
        dropped = prepared.batch.dropped_frames_mask.clone()
        dropped[2, :, 1] = True
        weight = torch.ones(5, 1, 2, 4, 4)
        weight[0, ..., :2] = 0
        batch = replace(
            prepared.batch, dropped_frames_mask=dropped, loss_mask=weight * ~dropped
        )
        batch = batch.map(lambda x: x.double() if x.is_floating_point() else x)
        prepared = replace(
            prepared, batch=batch, t=prepared.t.double(), noise=prepared.noise.double()
        )
        gradients.append(setup.gradient(prepared, count, most=size))
    assert gradients[0].dtype == torch.float64
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)


def test_before_the_first_step_a_prior_sample_costs_nothing(tiny_family: Open) -> None:
    """B is 0, so the model is the base: exactly, where all are prior; beside others, to
    rounding.
    """
    setup = Setup(tiny_family("wan"), fresh=True, dropout=0.5)
    line = setup.step(setup.prepared(1, prior=range(4)), seed=1).read()
    assert line["loss"] == line["mse"] == line["grad_norm"] == 0
    setup = Setup(tiny_family("wan"), fresh=True)
    record = setup.step(setup.prepared(1, prior=(1, 2)))
    mse = record.values[FIRST_MSE:]
    assert (mse[[1, 2]] < 1e-10).all()
    assert (mse[[0, 3]] > 0.1).all()


def test_the_base_is_asked_without_dropout_and_moves_no_draw(tiny_family: Open) -> None:
    """The trained pass has its dropout, and the same one as where nothing is prior."""
    setup, modes = Setup(tiny_family("wan"), dropout=0.5), []
    handle = setup.net.register_forward_pre_hook(
        lambda net, _: modes.append((net.training, torch.is_grad_enabled()))
    )
    masks: list[torch.Tensor] = []
    layer = next(
        module
        for name, module in setup.net.named_modules()
        if name.endswith("lora_dropout.default")
    )
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
def test_the_adapter_off_is_the_base_and_then_all_is_as_before(
    interrupted: bool, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    setup, base = Setup(family, dropout=0.5), family.denoiser().eval()
    one = setup.prepared(1)
    setup.net.blocks[1].eval()  # whatever is set, by whomever
    next(iter(setup.parameters.values())).requires_grad_(False)

    def state() -> tuple[Any, ...]:
        trained = {
            name: parameter.clone() for name, parameter in setup.net.named_parameters()
        }
        flags = {
            name: parameter.requires_grad
            for name, parameter in setup.net.named_parameters()
        }
        return (
            trained,
            flags,
            {name: module.training for name, module in setup.net.named_modules()},
        )

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
        assert not torch.equal(
            said, family.predict(base, one.batch.x0, one.t, one.batch)
        ), "it is on again"


@pytest.mark.parametrize(
    ("scheduler", "make"),
    [
        ("CONSTANT", lambda o, w, n: get_constant_schedule_with_warmup(o, w)),
        ("LINEAR", get_linear_schedule_with_warmup),
        ("COSINE", get_cosine_schedule_with_warmup),
        (
            "COSINE_RESTARTS",
            lambda o, w, n: get_cosine_with_hard_restarts_schedule_with_warmup(
                o, w, n, num_cycles=3
            ),
        ),
        (
            "POLYNOMIAL",
            lambda o, w, n: get_polynomial_decay_schedule_with_warmup(
                o, w, n, lr_end=0.0, power=2.5
            ),
        ),
        (
            "WSD",
            lambda o, w, n: get_wsd_schedule(o, w, 20, num_training_steps=n),
        ),
        (
            "INVERSE_SQRT",
            lambda o, w, n: get_inverse_sqrt_schedule(o, w, timescale=7),
        ),
    ],
)
def test_the_rate_is_transformers(scheduler: str, make: Callable[..., Any]) -> None:
    """After the warm-up ours is theirs; in it theirs starts at 0, which would waste a
    step, ours one step up.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = make(optimizer, 10, 60)
    settings = LRSchedule(
        2.0, scheduler, 10, 60, cycles=3, power=2.5, decay_steps=20, timescale=7
    )
    assert lr_at(settings, 1) == pytest.approx(2.0 / 11)
    assert lr_at(settings, 10) == pytest.approx(2.0 * 10 / 11)
    for step in range(1, 61):
        if step > 10:
            assert lr_at(settings, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("scheduler", "make"),
    [
        (
            "COSINE",
            lambda o: get_cosine_with_min_lr_schedule_with_warmup(
                o, 10, 60, min_lr_rate=0.2
            ),
        ),
        (
            "WSD",
            lambda o: get_wsd_schedule(
                o, 10, 20, num_training_steps=60, min_lr_ratio=0.2
            ),
        ),
        (
            "POLYNOMIAL",
            lambda o: get_polynomial_decay_schedule_with_warmup(
                o, 10, 60, lr_end=0.4, power=2.5
            ),
        ),
    ],
)
def test_with_a_floor_the_rate_is_transformers(
    scheduler: str, make: Callable[..., Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = make(optimizer)
    settings = LRSchedule(2.0, scheduler, 10, 60, power=2.5, decay_steps=20, floor=0.2)
    for step in range(1, 62):
        if step > 10:
            assert lr_at(settings, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert lr_at(settings, 61) == pytest.approx(0.4)


def test_rex_is_that_of_pytorch_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = REXScheduler(optimizer, total_steps=50, max_lr=2.0, min_lr=0.5)
    settings = LRSchedule(2.0, "REX", 0, 50, floor=0.25)
    for step in range(1, 52):
        assert lr_at(settings, step) == pytest.approx(theirs.get_lr())
        theirs.step()


def test_the_inverse_root_stays_at_its_floor_and_a_constant_rate_has_none() -> None:
    """Steps and rates of no schedule depend on the steps before."""
    schedule = LRSchedule(1.0, "INVERSE_SQRT", 0, 10, floor=0.5, timescale=4)
    rates = [lr_at(schedule, step) for step in (1, 5, 13, 14, 1000)]
    assert rates == pytest.approx([1, 2**-0.5, 0.5, 0.5, 0.5])
    assert lr_at(replace(schedule, scheduler="CONSTANT"), 9) == 1.0
    without_timescale = replace(schedule, timescale=None, floor=0.0)
    assert lr_at(without_timescale, 10_001) == pytest.approx(2**-0.5)


def test_a_fall_longer_than_the_run_begins_after_the_warm_up() -> None:
    schedule = LRSchedule(1.0, "WSD", 2, 10, decay_steps=100)
    rates = [lr_at(schedule, step) for step in (1, 2, 3, 7)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 0.5])


@pytest.mark.parametrize("scheduler", FACTORS)
def test_every_schedule_begins_at_the_peak_and_most_end_at_their_floor(
    scheduler: str,
) -> None:
    """After a warm-up to exactly the peak, and a step after the last one, however short
    the fall is; some are asked for later steps too.
    """
    for floor in (0.0, 0.1):
        schedule = LRSchedule(0.1, scheduler, 2, 3, decay_steps=1, floor=floor)
        assert lr_at(schedule, 3) == 0.1
        if scheduler not in ("CONSTANT", "INVERSE_SQRT", "COSINE_RESTARTS"):
            assert lr_at(schedule, 4) == pytest.approx(0.1 * floor)
        if scheduler in ("POLYNOMIAL", "REX", "WSD"):
            for step in (5, 6, 10):
                assert lr_at(schedule, step) == pytest.approx(0.1 * floor)


def test_losses_are_told_by_noise_level() -> None:
    bands = loss_by_noise_level([0.0, 0.05, 0.5, 1.0], [1.0, 3.0, 5.0, 7.0])
    assert bands == [2.0, None, None, None, 5.0, None, None, None, 7.0]


GOOD = torch.tensor(True)


def test_rounding_by_chance_is_right_on_average() -> None:
    """Of numbers a share s of bf16's step above a neighbour, s go up; the mean of all
    is the number.
    """
    for share in (0.0, 0.1, 0.5, 0.9):
        for low in (1.0, -1.0, 2.0**-15, -300.0):
            step = (
                torch.nextafter(
                    torch.tensor(low).bfloat16(), torch.tensor(low * 2).bfloat16()
                )
                .float()
                .item()
                - low
            )
            x = torch.full((40_000,), low + share * step)
            y = stochastic_round(x, 0, "a").float()
            assert set(y.tolist()) <= {low, low + step}
            up = (y != low).float().mean().item()
            assert up == pytest.approx(
                share, abs=4 * (share * (1 - share) / 40_000) ** 0.5 + 1e-4
            )


def test_rounding_by_chance_keeps_what_bf16_holds_and_what_is_not_finite() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(stochastic_round(exact.float(), 1, "a"), exact)
    odd = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])
    assert torch.equal(stochastic_round(odd, 1, "a").float(), odd)
    assert stochastic_round(torch.tensor([float("nan")]), 1, "a").isnan().all()


def test_what_is_drawn_for_rounding_follows_from_seed_and_name() -> None:
    x = torch.full((400,), 1 + 2.0**-9)
    first = stochastic_round(x, 1, 5, "a")
    assert torch.equal(stochastic_round(x, 1, 5, "a"), first)
    for seed, step, name in ((2, 5, "a"), (1, 6, "a"), (1, 5, "b")):
        assert not torch.equal(stochastic_round(x, seed, step, name), first)


def test_each_process_rounds_its_rows_by_draws_of_their_own() -> None:
    """The first row names them, so the process with a tensor's first rows draws as one
    process does.
    """

    def rounded(
        rows: dict[str, Shard] | None, seed: int = 1, step: int = 5
    ) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(20, 20, dtype=torch.bfloat16))
        optimizer = make_optimizer({"w": [weight]}, Optimizer(), one_per_parameter=True)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        weight.grad = torch.ones_like(weight)
        shards = None
        if rows is not None:
            shards = Shards()
            shards.layout = rows
        trainable = TrainableState(
            {"w": weight}, optimizer, {}, rounding_seed=seed, shards=shards
        )
        _update(trainable, GOOD, step, torch.zeros(FIRST_MSE))
        return weight.detach()

    alone = rounded(None)
    assert 0 < (alone != 1).float().mean() < 1
    assert torch.equal(rounded({}), alone)
    assert torch.equal(rounded({"w": Shard((40, 20), first=0, count=20)}), alone)
    others = [
        rounded({"w": Shard((40, 20), first=20, count=20)}),
        rounded({"w": Shard((60, 20), first=40, count=20)}),
        rounded(None, seed=2),
        rounded(None, step=6),
    ]
    for i, draw in enumerate(others):
        assert not torch.equal(draw, alone)
        assert not any(torch.equal(draw, other) for other in others[:i])


def trainable_of(setup: Setup, **fields: Any) -> TrainableState:
    schedule = LRSchedule(1.0, "LINEAR", 0, 10)
    return TrainableState(
        setup.parameters, setup.optimizer, {"transformer": schedule}, **fields
    )


def test_a_step_is_recorded_with_its_samples_and_the_rate_of_its_expert(
    tiny_family: Open,
) -> None:
    """An expert's rate falls over its own steps, and gradients are gone after a step."""
    setup = Setup(tiny_family("wan"))
    step_batch = replace(setup.prepared(9, count=2), captions=("a", "b"))
    context = StepContext(setup.family, setup.objective, 1, 1.0)
    clock = Clock(CPU)
    steps: list[int] = []
    ema: Any = SimpleNamespace(update=lambda step, finite: steps.append(step))
    trainable = trainable_of(setup, expert="low", ema=ema)
    record = train_step(context, setup.net, trainable, step_batch, clock, 3)
    assert (record.step, record.expert) == (9, "low")
    assert record.window_ids == step_batch.window_ids
    assert record.captions == ("a", "b")
    assert record.t is step_batch.t
    assert (record.sound_t, record.arrived) == (None, None)
    assert record.clock is clock
    assert record.lr == {"transformer": pytest.approx(0.8)}
    assert setup.optimizer.param_groups[0]["lr"] == record.lr["transformer"]
    assert steps == [3]
    assert all(parameter.grad is None for parameter in setup.parameters.values())
    assert list(clock.read()) == ["forward", "backward", "optimizer"]

    record = train_step(context, setup.net, trainable, step_batch, Clock(CPU))
    assert record.lr == {"transformer": pytest.approx(0.2)}
    assert steps == [3, 9]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
@pytest.mark.parametrize(
    ("fails_in", "in_backward", "intact"),
    [
        ("forward_pass", False, True),
        ("forward_pass", True, False),
        ("step_if_finite", False, False),
    ],
)
def test_a_step_without_room_is_named_and_whether_the_weights_are_as_before(
    fails_in: str,
    in_backward: bool,
    intact: bool,
    error: Exception,
    tiny_family: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(tiny_family("wan"))
    step_batch = setup.prepared(4, count=2)
    context = StepContext(setup.family, setup.objective, 1, 1.0)
    backward = BackwardOptimizer(1.0) if in_backward else None
    trainable = trainable_of(setup, backward_optimizer=backward)
    for parameter in setup.parameters.values():
        parameter.grad = torch.ones_like(parameter)

    def fail(*_: Any) -> Any:
        raise error

    function = f"{train_step.__module__}.{fails_in}"
    monkeypatch.setattr(function, fail)
    with pytest.raises(OutOfMemory, match="step 4") as raised:
        train_step(context, setup.net, trainable, step_batch, Clock(CPU))
    assert raised.value.intact is intact
    assert (raised.value.step, raised.value.window_ids) == (4, step_batch.window_ids)
    assert raised.value.__cause__ is error
    assert all(parameter.grad is None for parameter in setup.parameters.values())

    def fail_otherwise(*_: Any) -> Any:
        raise RuntimeError("a shape")

    monkeypatch.setattr(function, fail_otherwise)
    with pytest.raises(RuntimeError, match=r"^a shape$"):
        train_step(context, setup.net, trainable, step_batch, Clock(CPU))


def test_what_a_failed_pass_has_left_is_forgotten() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    repeated: list[None] = []
    backward: Any = SimpleNamespace(repeat=lambda: repeated.append(None))
    optimizer = make_optimizer({"w": [weight]}, Optimizer())
    values = torch.ones(4)
    for each, times in ((None, 0), (backward, 1)):
        values.fill_(1)
        _start_again(
            TrainableState({"w": weight}, optimizer, {}, backward_optimizer=each),
            values,
        )
        assert not values.any()
        assert weight.grad is None
        assert len(repeated) == times


@pytest.mark.parametrize(
    ("shape", "patch", "tokens"),
    [
        ((3, 4, 6), (1, 2, 2), 18),
        ((3, 5, 7), (1, 2, 2), 36),
        ((5, 4, 4), (2, 4, 1), 12),
    ],
)
def test_the_tokens_of_a_sample_are_its_patches(
    shape: tuple[int, ...], patch: tuple[int, ...], tokens: int
) -> None:
    """A side that its patch does not divide has one more."""
    family: Any = SimpleNamespace(spec=SimpleNamespace(patch=patch))
    batch = Batch.of(torch.zeros(2, 16, *shape), Conditioning(torch.zeros(2, 1, 1)))
    assert tokens_per_sample(family, batch) == tokens


def test_the_values_of_a_step_are_on_its_device_with_room_for_each_sample(
    tiny_family: Open,
) -> None:
    step_batch = Setup(tiny_family("wan")).prepared(count=3)
    assert empty_values(step_batch, torch.device("meta")).is_meta
    values = empty_values(step_batch, CPU)
    assert values.tolist() == [0.0] * 6
    with_sound = replace(step_batch, sound_t=step_batch.t)
    assert empty_values(with_sound, CPU).tolist() == [0.0] * 9


def test_each_micro_batch_adds_its_loss_and_writes_its_samples_errors() -> None:
    """Three samples in two parts; the errors of the sound follow those of the video."""
    values = torch.zeros(FIRST_MSE + 6)
    parts = [(0, [1.0, 2.0], [5.0, 6.0], 0.25), (2, [3.0], [7.0], 0.5)]
    for first, mse, sound_mse, loss in parts:
        micro_batch: Any = SimpleNamespace(first_sample=first)
        output = PassOutput(
            torch.tensor(loss), torch.tensor(mse), torch.tensor(sound_mse)
        )
        write_values(values, micro_batch, output, samples_in_step=3)
    assert values[LOSS] == 0.75
    assert values[FIRST_MSE:].tolist() == [1, 2, 3, 5, 6, 7]
    assert not values[1:FIRST_MSE].any()


def test_a_pass_reads_everything_on_the_device(tiny_family: Open) -> None:
    setup = Setup(tiny_family("wan"))
    context = StepContext(setup.family, setup.objective, 1, 1.0)
    (micro_batch,) = micro_batches(setup.prepared(), 4)
    device = torch.device("meta")
    inputs = _pass_inputs(
        context, setup.net, None, micro_batch, weight=1.0, device=device
    )
    devices = []

    def note_device(x: torch.Tensor) -> torch.Tensor:
        devices.append(x.device)
        return x

    inputs.map(note_device)
    assert set(devices) == {device}
    assert len(devices) >= 4


def test_a_rounded_step_that_is_not_good_changes_nothing() -> None:
    weight = nn.Parameter(torch.randn(50, 50, dtype=torch.bfloat16))
    optimizer = make_optimizer({"w": [weight]}, Optimizer(), one_per_parameter=True)
    before, place = weight.detach().clone(), weight.data_ptr()
    weight.grad = torch.full_like(weight, float("nan"))
    update_each_rounded(optimizer, {"w": weight}, torch.tensor(False), 0, 1, {})
    assert torch.equal(weight, before)
    assert weight.data_ptr() == place, "the network still holds the same memory"
    assert weight.grad is None


def test_the_norm_of_bf16_gradients_is_summed_in_float32() -> None:
    weight = nn.Parameter(torch.zeros(100_003, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    assert clip_grad_norm([weight], 1e9).item() == pytest.approx(100_003**0.5, rel=1e-6)
    clip_grad_norm([weight], 1.0)
    assert weight.grad.float().norm().item() == pytest.approx(1.0, rel=1e-2)


def test_averages_of_bf16_weights_are_float32_and_come_back_exactly() -> None:
    weight = nn.Parameter(torch.randn(20, 20).bfloat16())
    ema = EmaWeights({"w": weight}, 0.99)
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
    ema = EmaWeights({"w": weight}, 0.9, host=True)
    assert torch.cuda.memory_allocated() == before
    weight.data += 1
    ema.update(1, torch.tensor(True, device="cuda"))
    own = weight.detach().clone()
    with ema.in_place():
        assert torch.equal(weight.cpu(), ema.values["w"]) is False, (
            "they have changed places"
        )
    assert torch.equal(weight, own)


@pytest.mark.parametrize("name", ["ADAMW", "LION", "ADAFACTOR", "MUON", "ADAMW_8BIT"])
def test_small_updates_add_up_in_bf16_where_rounding_to_nearest_loses_them(
    name: str,
) -> None:
    """300 updates of 1e-4 on weights of 1, whose bf16 step is 1/128: nearest stays, by
    chance the mean arrives.
    """
    weights = {
        dtype: nn.Parameter(torch.ones(80, 80, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    own = Optimizer(name=name, weight_decay=0.0)
    optimizers = {
        dtype: make_optimizer({"w": [weight]}, own, one_per_parameter=True)
        for dtype, weight in weights.items()
    }
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        gradient = torch.randn(80, 80, generator=generator) * 0.1 + 1
        for dtype, weight in weights.items():
            for group in optimizers[dtype].param_groups:
                group["lr"] = 1e-4 if name != "MUON" else 1e-3
            weight.grad, before = gradient.to(dtype), weight.detach().float()
            update_rounded(
                owners_of(optimizers[dtype])[id(weight)], weight, GOOD, 0, step, "w"
            )
        if step == 0:
            one = before - weights[torch.float32].detach()
            assert (
                torch.equal((before - one).bfloat16().float(), before) or name == "MUON"
            ), "nearest loses the update"
    exact, rounded = (
        1 - weight.detach().float().mean().item() for weight in weights.values()
    )
    assert exact > 4e-3
    assert rounded == pytest.approx(exact, rel=0.05)
    kept = optimizer_state(optimizers[torch.bfloat16], {"w": weights[torch.bfloat16]})
    assert torch.bfloat16 not in {value.dtype for value in kept.values()}, (
        "moments are float32 (or 8 bits)"
    )


def test_within_backward_a_gradient_that_is_not_finite_leaves_its_own_tensor_alone() -> (
    None
):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    parameters = dict(net.named_parameters())
    optimizer = make_optimizer(
        {"all": list(net.parameters())}, Optimizer(), one_per_parameter=True
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    updates = BackwardOptimizer(1e9).attach(parameters, optimizer)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    parameters["2.weight"].register_hook(lambda gradient: gradient * float("inf"))
    loss = net(torch.randn(4, 32)).square().mean()
    updates.begin(1)
    updates.expect_loss(loss)
    loss.backward()
    assert not updates.norm().isfinite()
    moved = {
        name
        for name, value in parameters.items()
        if not torch.equal(value, before[name])
    }
    assert moved == {*before} - {"2.weight"}
    assert all(value.isfinite().all() for value in parameters.values())


def test_the_error_by_noise_level_is_that_of_each_ninth() -> None:
    levels = [(i + offset) / 9 for i in range(9) for offset in (0.05, 0.95)]
    errors = [float(i) for i in range(9) for _ in range(2)]
    assert loss_by_noise_level(levels, errors) == [float(i) for i in range(9)]
    assert loss_by_noise_level([1.0, 0.0], [3.0, 5.0]) == [5.0, *[None] * 7, 3.0]


def test_a_record_of_a_card_waits_for_its_values(
    tiny_family: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on their way to the host when the record is made."""
    setup = Setup(tiny_family("wan"))
    step_batch, clock = setup.prepared(), Clock(CPU)
    trainable = TrainableState(
        setup.parameters, setup.optimizer, {}, expert="transformer"
    )
    values = torch.arange(5.0)
    on_host = _record(step_batch, trainable, values, {"a": 0.5}, clock)
    assert on_host.values is values
    assert on_host.arrived is None
    assert (on_host.lr, on_host.expert) == ({"a": 0.5}, "transformer")
    assert on_host.window_ids == step_batch.window_ids
    assert on_host.captions == step_batch.captions
    assert on_host.t is step_batch.t
    assert on_host.clock is clock

    event = object()
    monkeypatch.setattr(step_module, "has_streams", lambda device: True)
    monkeypatch.setattr(step_module, "to_host", lambda x: (x + 1, event))
    of_card = _record(step_batch, trainable, values, {}, clock)
    assert of_card.arrived is event
    assert torch.equal(of_card.values, values + 1)


@pytest.mark.parametrize("sound", [None, torch.tensor([3.0, 4.0])])
def test_a_pass_has_the_share_of_its_samples_in_the_loss(
    sound: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mse = torch.tensor([1.0, 2.0])
    asked: list[tuple[Any, ...]] = []

    def loss(*args: Any) -> LossOutput:
        asked.append(args)
        return LossOutput(torch.tensor(6.0), mse, mse, mse, sound_mse=sound)

    monkeypatch.setattr(network_pass, "denoising_loss", loss)
    inputs = PassInputs("batch", "t", "noise", "target", weight=0.25)  # type: ignore[arg-type]
    output = network_pass.forward_pass("family", "net", "objective", inputs)  # type: ignore[arg-type]
    assert asked == [("family", "net", "objective", "batch", "t", "noise", "target")]
    assert output.weighted_loss == 1.5
    assert output.mse is mse
    assert output.sound_mse is sound


def test_captions_that_are_not_cached_are_encoded_in_the_pass(
    tiny_family: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tiny_family("wan"))
    context = StepContext(setup.family, setup.objective, 1, 1.0)
    (micro_batch,) = micro_batches(setup.prepared(), 4)
    text: Any = object()
    asked: list[Any] = []

    def encode(family: Any, given: Any, batch: Batch) -> Batch:
        asked.append((family, given))
        return replace(batch, captions=("encoded",) * len(batch.captions))

    monkeypatch.setattr(step_module, "encode_live_text", encode)
    inputs = _pass_inputs(context, setup.net, text, micro_batch, weight=0.5, device=CPU)
    assert asked == [(setup.family, text)]
    assert set(inputs.batch.captions) == {"encoded"}
    assert (inputs.weight, inputs.target) == (0.5, None)
