"""What trains of a network: its groups and rates, and what each of its parts is."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from videotune.config.optimizers import default_decay, default_warmup
from videotune.config.resolve import parse
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.job.experts import TEXT
from videotune.trainer.ema import EmaWeights
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import OptimizerList, parts_of
from videotune.trainer.schedule_free import ScheduleFreeWeights
from videotune.trainer.step_context import TrainableState
from videotune.trainer.trainable import (
    attach,
    make_lr_schedules,
    make_trainable,
    rate_groups,
)

Open = Callable[..., Any]
CONSTANT = LRSchedule(0.1, "CONSTANT", 0, 10)
SCHEDULES = {"transformer": CONSTANT, "embedding": CONSTANT}


def parameters_of(
    *names: str, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2, 2, dtype=dtype)) for name in names}


@pytest.fixture
def pair(tiny_family: Open) -> Any:
    """A family with two experts."""
    return tiny_family("wan", variant="t2v-a14b")


def test_each_rate_has_a_group_of_its_own() -> None:
    """B of an adapter may learn faster, and modules have rates by their pattern."""
    parameters = parameters_of(
        "a.lora_A.weight", "a.lora_B.weight", "b.lora_A.weight", "b.lora_B.weight"
    )
    modules = [{"pattern": "b", "learning_rate": 0.3}, {"pattern": "c", "rank": 2}]
    lora: Lora = parse({"lora": {"learning_rate_ratio": 4, "modules": modules}}).lora
    groups, schedules = rate_groups(parameters, lora, "transformer", SCHEDULES)
    names = {group: list(members) for group, members in groups.items()}
    assert names == {
        "transformer": ["a.lora_A.weight"],
        "transformer lora_B": ["a.lora_B.weight"],
        "transformer b": ["b.lora_A.weight"],
        "transformer b lora_B": ["b.lora_B.weight"],
    }
    assert groups["transformer"]["a.lora_A.weight"] is parameters["a.lora_A.weight"]
    rates = {group: schedule.learning_rate for group, schedule in schedules.items()}
    assert rates == {
        "transformer": 0.1,
        "embedding": 0.1,
        "transformer lora_B": pytest.approx(0.4),
        "transformer b": 0.3,
        "transformer b lora_B": pytest.approx(1.2),
    }
    assert {schedule.steps for schedule in schedules.values()} == {10}

    plain: Lora = parse({}).lora
    groups, schedules = rate_groups(parameters, plain, "transformer", SCHEDULES)
    assert list(groups) == ["transformer"]
    assert schedules == SCHEDULES
    own = parameters_of("blocks.0.weight")
    assert rate_groups(own, plain, "transformer", SCHEDULES)[0] == {"transformer": own}


def rates_of(schedules: Mapping[str, LRSchedule]) -> dict[str, float]:
    return {name: schedule.learning_rate for name, schedule in schedules.items()}


def test_the_low_expert_text_and_rows_have_rates_of_their_own(
    tiny_family: Open, pair: Any
) -> None:
    """Where none is set it is that of the denoiser, of the high expert."""
    base: dict[str, Any] = {"learning_rate": 0.1, "transformer": {"train": True}}
    one = parse(base)
    spec = tiny_family("wan").spec
    expected = {"transformer": 0.1, "embedding": 0.1, "text_encoder": 0.1}
    assert rates_of(make_lr_schedules(one, spec, "transformer", 10)) == expected

    assert rates_of(make_lr_schedules(one, spec, TEXT, 10)) == expected

    both = parse(base | {"learning_rate_low": 0.3})
    assert rates_of(make_lr_schedules(both, spec, "transformer", 10)) == expected
    for expert, rate in (("high", 0.1), ("low", 0.3)):
        schedules = make_lr_schedules(both, pair.spec, expert, 10)
        expected = {expert: rate, "embedding": 0.1, "text_encoder": 0.1}
        assert rates_of(schedules) == expected
    assert rates_of(make_lr_schedules(one, pair.spec, "low", 10))["low"] == 0.1

    own = parse(
        base
        | {"training_method": "FINE_TUNE", "embedding_learning_rate": 0.4}
        | {"text_encoder": {"train": True, "learning_rate": 0.5}}
    )
    expected = {"transformer": 0.1, "embedding": 0.4, "text_encoder": 0.5}
    assert rates_of(make_lr_schedules(own, spec, "transformer", 10)) == expected


def test_schedules_are_as_the_config_says(tiny_family: Open) -> None:
    spec = tiny_family("wan").spec
    settings = {
        "learning_rate": 0.1,
        "learning_rate_scheduler": "POLYNOMIAL",
        "learning_rate_cycles": 3,
        "learning_rate_power": 2.5,
        "learning_rate_min": 0.02,
        "learning_rate_decay_steps": 7,
        "learning_rate_timescale": 9,
        "warmup_steps": 4,
    }
    config = parse({})
    config = config.model_copy(update=settings)
    schedule = make_lr_schedules(config, spec, "transformer", 200)["transformer"]
    assert schedule == LRSchedule(
        learning_rate=0.1,
        scheduler="POLYNOMIAL",
        warmup_steps=4,
        steps=200,
        cycles=3,
        power=2.5,
        floor=0.02 / 0.1,
        decay_steps=7,
        timescale=9,
    )
    unset = {"warmup_steps": None, "learning_rate_decay_steps": None}
    config = config.model_copy(update=unset)
    schedule = make_lr_schedules(config, spec, "transformer", 200)["transformer"]
    assert schedule.warmup_steps == default_warmup(200)
    assert schedule.decay_steps == default_decay(200)


def made(
    family: Any,
    parameters: dict[str, nn.Parameter],
    expert: str = "transformer",
    text: Mapping[str, dict[str, nn.Parameter]] | None = None,
    **settings: Any,
) -> TrainableState:
    config = parse({"train_dtype": "FLOAT_32", "learning_rate": 0.1, **settings})
    return make_trainable(parameters, text or {}, family, config, expert, 10)


def groups_of(state: TrainableState) -> dict[str, list[int]]:
    return {
        group["name"]: [id(parameter) for parameter in group["params"]]
        for group in state.optimizer.param_groups
    }


@pytest.mark.parametrize("expert", ["high", "low", TEXT])
def test_an_expert_s_parameters_are_a_group_of_its_name(expert: str, pair: Any) -> None:
    own = {} if expert == TEXT else parameters_of("a.lora_A.weight")
    rows = parameters_of("embedding.text_encoder")
    state = made(pair, own, expert, {"embedding": rows}, learning_rate_low=0.3)
    expected = {expert: own} if own else {}
    expected["embedding"] = rows
    assert groups_of(state) == {
        name: [id(parameter) for parameter in group.values()]
        for name, group in expected.items()
    }
    assert state.parameters == own | rows
    assert state.expert == (None if expert == TEXT else expert)
    assert set(groups_of(state)) <= set(state.lr_schedules)
    if expert == "low":
        assert state.lr_schedules["low"].learning_rate == 0.3
    assert {schedule.steps for schedule in state.lr_schedules.values()} == {10}


def test_the_only_denoiser_has_no_name_and_nothing_that_was_not_asked_for(
    tiny_family: Open,
) -> None:
    family = tiny_family("wan")
    own = parameters_of("a.lora_A.weight", "a.lora_B.weight")
    state = made(family, own)
    assert list(groups_of(state)) == ["transformer"]
    assert list(groups_of(made(family, own, "net"))) == ["transformer"]
    assert list(state.parameters.values()) == list(own.values())
    for name in ("expert", "masters", "module_params", "ema", "text"):
        assert getattr(state, name) is None, name
    assert (state.rounding_seed, state.backward_optimizer) == (None, None)
    assert state.loss_scale is None
    assert len(parts_of(state.optimizer)) == 1

    half = made(family, own, train_dtype="FLOAT_16")
    assert half.loss_scale is not None
    assert half.loss_scale.factor.device == family.device
    family.device = torch.device("meta")
    on_device = made(family, own, train_dtype="FLOAT_16").loss_scale
    assert on_device is not None
    assert on_device.factor.is_meta
    live = made(family, {}, TEXT, {"embedding": own}, training_method="EMBEDDING")
    assert live.text is not None


def test_weights_of_16_bits_have_masters(tiny_family: Open) -> None:
    """The average is one of the masters, which the optimizer updates."""
    own = parameters_of("a", "b", dtype=torch.bfloat16)
    ema = {"ema": {"decay": 0.5, "device": "host"}}
    state = made(tiny_family("wan"), own, training_method="FINE_TUNE", **ema)
    assert state.masters is not None
    assert state.module_params == own
    assert state.parameters is state.masters.parameters
    ids = [id(value) for value in state.parameters.values()]
    assert groups_of(state) == {"transformer": ids}
    assert {value.dtype for value in state.parameters.values()} == {torch.float32}
    assert isinstance(state.ema, EmaWeights)
    assert (state.ema.decay, state.ema.host) == (0.5, True)
    assert list(state.ema.values) == ["a", "b"]
    on_device = made(tiny_family("wan"), own, ema={"decay": 0.5})
    assert isinstance(on_device.ema, EmaWeights)
    assert not on_device.ema.host


def test_rounded_updates_need_bf16_and_no_masters(tiny_family: Open) -> None:
    family = tiny_family("wan")
    own = parameters_of("a", "b", dtype=torch.bfloat16)
    settings: dict[str, Any] = {
        "training_method": "FINE_TUNE",
        "optimizer": {"masters": "STOCHASTIC_ROUNDING"},
        "seed": 7,
    }
    state = made(family, own, train_dtype="BFLOAT_16", **settings)
    assert (state.masters, state.rounding_seed) == (None, 7)
    assert list(state.parameters.values()) == list(own.values())
    assert isinstance(state.optimizer, OptimizerList)
    assert len(state.optimizer.parts) == 2
    for dtype in ("FLOAT_32", "FLOAT_16"):
        with pytest.raises(VideotuneError, match=f"here it is {dtype}"):
            made(family, own, train_dtype=dtype, **settings)


@pytest.mark.parametrize("masters", ["FLOAT_32", "STOCHASTIC_ROUNDING"])
def test_updates_within_backward_have_an_optimizer_for_each(
    masters: str, tiny_family: Open
) -> None:
    own = parameters_of("a", "b", dtype=torch.bfloat16)
    state = made(
        tiny_family("wan"),
        own,
        train_dtype="BFLOAT_16",
        training_method="FINE_TUNE",
        optimizer={"masters": masters, "step_in_backward": True},
        max_grad_norm=0.5,
        seed=7,
    )
    backward = state.backward_optimizer
    assert backward is not None
    assert len(parts_of(state.optimizer)) == 2
    assert backward.max_grad_norm == 0.5
    rounds = masters == "STOCHASTIC_ROUNDING"
    assert backward.rounding_seed == (7 if rounds else None)
    assert backward.masters is state.masters
    assert (state.masters is None) is rounds
    backward.begin(1)
    backward.expect_loss(torch.tensor(1.0))
    own["a"].sum().backward()
    assert list(backward.norms) == ["a"]
    plain = made(tiny_family("wan"), parameters_of("a"), optimizer="ADAMW")
    assert plain.backward_optimizer is None


def test_a_schedule_free_optimizer_has_its_own_average(tiny_family: Open) -> None:
    own = parameters_of("a")
    state = made(tiny_family("wan"), own, optimizer="SCHEDULE_FREE")
    assert isinstance(state.ema, ScheduleFreeWeights)
    for part in parts_of(state.optimizer):
        part.param_groups[0]["lr"] = 0.1
        for slope in (1.0, -0.5):
            own["a"].grad = torch.full((2, 2), slope)
            part.step()
    assert not torch.equal(state.ema.values["a"], own["a"])


def test_a_class_that_reads_its_rate_when_it_is_built_has_that_of_its_group(
    pair: Any,
) -> None:
    own = parameters_of("a.lora_A.weight")
    rows = parameters_of("embedding.text_encoder")
    state = made(
        pair,
        own,
        "low",
        {"embedding": rows},
        learning_rate_low=0.3,
        optimizer="torch.optim:SGD",
    )
    rates = {group["name"]: group["lr"] for group in state.optimizer.param_groups}
    assert rates == {"low": 0.3, "embedding": 0.1}


def test_what_trains_of_the_network_is_the_method_s(tiny_family: Open) -> None:
    family = tiny_family("wan")

    def attached(**settings: Any) -> dict[str, nn.Parameter]:
        return attach(family.denoiser(), family.spec, parse(settings))

    targets = {"rank": 3, "targets": "attention"}
    adapter = attached(lora=targets, seed=1)
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter)
    first = next(iter(adapter.values()))
    assert first.shape[0] == 3
    same = attached(lora=targets, seed=1)
    other = attached(lora=targets, seed=2)
    assert torch.equal(first, next(iter(same.values())))
    assert not torch.equal(first, next(iter(other.values())))

    layers = {"layers": ["blocks.0"]}
    whole = attached(training_method="FINE_TUNE", transformer=layers)
    assert whole
    assert all(name.startswith("blocks.0.") for name in whole)
    text = {"text_encoder": {"train": True}, "transformer": {"train": False}}
    assert attached(training_method="FINE_TUNE", **text) == {}
