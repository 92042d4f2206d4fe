"""What becomes of gradients between the backward pass and the update."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from videotune.config.schema import Optimizer
from videotune.distributed import DistributedContext
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.sharding import Shard, Shards
from videotune.trainer.gradients import forget_gradients, sum_and_clip
from videotune.trainer.loss_scale import LossScale
from videotune.trainer.low_precision import BackwardOptimizer, MasterWeights
from videotune.trainer.optimizers import (
    AnyOptimizer,
    OptimizerList,
    make_optimizer,
    parts_of,
)
from videotune.trainer.step import _finish_gradients
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import Clock

CPU = torch.device("cpu")
GRADIENTS: dict[str, Tensor | None] = {
    "fresh.lora_A": torch.zeros(2, 3),
    "fresh.lora_B": torch.ones(3, 2),
    "unread.lora_A": torch.zeros(2, 3),
    "unread.lora_B": torch.zeros(3, 2),
    "unread_norm.weight": torch.zeros(4),
    "norm.weight": torch.full((4,), 1e-6),
    "missing.weight": None,
}
"""An adapter's B is zero at first, so its A has a gradient of zeros although it is read."""

UNREAD = {"unread.lora_A", "unread.lora_B", "unread_norm.weight"}


def parameters_of(gradients: dict[str, Tensor | None]) -> dict[str, nn.Parameter]:
    parameters = {}
    for name, gradient in gradients.items():
        shape = (4,) if gradient is None else gradient.shape
        parameters[name] = nn.Parameter(torch.ones(shape))
        parameters[name].grad = None if gradient is None else gradient.clone()
    return parameters


def clip(
    parameters: dict[str, nn.Parameter],
    *,
    one_modality_only: bool = False,
    max_grad_norm: float = 1e9,
    compiled: CompiledBlocks | None = None,
    **fields: Any,
) -> Tensor:
    """The norm that ``sum_and_clip`` returns."""
    trainable = TrainableState(parameters, OptimizerList([]), {}, **fields)
    family: Any = SimpleNamespace(spec=SimpleNamespace(reads_sound=True), device=CPU)
    objective: Any = None
    context = StepContext(
        family,
        objective,
        1,
        max_grad_norm,
        dist=DistributedContext(),
        compiled=compiled,
    )
    return sum_and_clip(
        trainable,
        context,
        torch.zeros(4),
        Clock(CPU),
        one_modality_only=one_modality_only,
    )


@pytest.mark.parametrize(
    ("one_modality_only", "is_compiled", "is_sharded", "drops"),
    [
        (True, True, False, True),
        (True, False, True, True),
        (True, True, True, True),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
    ],
)
def test_zeros_of_what_no_pass_has_read_are_dropped_where_they_arise(
    one_modality_only: bool, is_compiled: bool, is_sharded: bool, drops: bool
) -> None:
    """Else momentum and decay would move weights of the modality that is not learnt."""
    parameters = parameters_of(GRADIENTS)
    clip(
        parameters,
        one_modality_only=one_modality_only,
        compiled=CompiledBlocks() if is_compiled else None,
        shards=Shards() if is_sharded else None,
    )
    missing = {name for name, value in parameters.items() if value.grad is None}
    assert missing == {"missing.weight"} | (UNREAD if drops else set())


def test_zeros_in_the_network_are_dropped_before_masters_take_them() -> None:
    halves = parameters_of(GRADIENTS)
    for parameter in halves.values():
        gradient = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()
        parameter.grad = None if gradient is None else gradient.bfloat16()
    masters = MasterWeights(halves)
    clip(
        masters.parameters,
        one_modality_only=True,
        compiled=CompiledBlocks(),
        masters=masters,
        module_params=halves,
    )
    missing = {
        name for name, master in masters.parameters.items() if master.grad is None
    }
    assert missing == {"missing.weight"} | UNREAD
    assert all(parameter.grad is None for parameter in halves.values())


def test_gradients_of_passes_without_an_update_are_forgotten_everywhere() -> None:
    """In what the optimizer updates, in the network beside it, and in shards."""
    halves = {"a": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}
    masters = MasterWeights(halves)
    master = masters.parameters["a"]
    optimizer = make_optimizer({"all": [master]}, Optimizer())
    forgotten: list[None] = []
    shards: Any = SimpleNamespace(forget_gradients=lambda: forgotten.append(None))
    for parameter in (master, halves["a"]):
        parameter.grad = torch.ones_like(parameter)
    trainable = TrainableState(
        masters.parameters, optimizer, {}, masters=masters, shards=shards
    )
    forget_gradients(trainable)
    assert master.grad is None
    assert halves["a"].grad is None
    assert len(forgotten) == 1


def test_a_step_without_any_gradient_has_zeros_for_all() -> None:
    """The optimizer then updates the same tensors as in every other step."""
    parameters = parameters_of(dict.fromkeys(GRADIENTS))
    assert clip(parameters) == 0
    for parameter in parameters.values():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_the_norm_is_that_of_the_loss_itself_and_is_clipped() -> None:
    """Whatever the factor of the loss is in float16."""
    expected = 10**0.5
    for factor in (None, 256.0):
        parameters = parameters_of(
            {"a.weight": torch.tensor([1.0]), "b.weight": torch.tensor([3.0])}
        )
        loss_scale = None
        if factor is not None:
            loss_scale = LossScale(CPU)
            loss_scale.factor.fill_(factor)
            for parameter in parameters.values():
                parameter.grad *= factor
        norm = clip(parameters, max_grad_norm=1.0, loss_scale=loss_scale)
        assert float(norm) == pytest.approx(expected)
        clipped = [float(parameter.grad) for parameter in parameters.values()]
        assert clipped == pytest.approx([1 / expected, 3 / expected], rel=1e-5)


def optimizer_of(parameters: dict[str, nn.Parameter]) -> AnyOptimizer:
    """One AdamW for each parameter."""
    groups = {"all": list(parameters.values())}
    rates = {"all": 0.1}
    optimizer = make_optimizer(groups, Optimizer(), one_per_parameter=True, rates=rates)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return optimizer


def test_a_repeated_pass_updates_what_the_failed_one_has_not() -> None:
    """The norms of both passes are those of the step."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    optimizer = optimizer_of(parameters)
    backward = BackwardOptimizer(1e9).attach(parameters, optimizer)
    for step in (1, 2):
        before = {name: value.detach().clone() for name, value in parameters.items()}
        backward.begin(step)
        assert backward.norm() == 0
        backward.expect_loss(torch.tensor(1.0))
        (3 * parameters["a"]).sum().backward()
        after_failure = parameters["a"].detach().clone()
        assert not torch.equal(after_failure, before["a"])
        backward.repeat()
        (3 * parameters["a"] + 4 * parameters["b"]).sum().backward()
        assert torch.equal(parameters["a"], after_failure)
        assert not torch.equal(parameters["b"], before["b"])
        assert all(value.grad is None for value in parameters.values())
        assert float(backward.norm()) == pytest.approx(50**0.5)
        assert backward.norms.keys() == {"a", "b"}


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_updates_nothing_in_backward(loss: float) -> None:
    """And one gradient that is not finite leaves the other tensors' updates."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    optimizer = optimizer_of(parameters)
    backward = BackwardOptimizer(1e9).attach(parameters, optimizer)
    backward.begin(1)
    backward.expect_loss(torch.tensor(loss))
    (parameters["a"] + parameters["b"]).sum().backward()
    assert all(torch.equal(value, torch.ones(2)) for value in parameters.values())

    backward.begin(2)
    backward.expect_loss(torch.tensor(1.0))
    (parameters["a"] * loss + parameters["b"]).sum().backward()
    assert torch.equal(parameters["a"], torch.ones(2))
    assert not torch.equal(parameters["b"], torch.ones(2))
    assert not backward.norm().isfinite()


def test_each_tensor_is_clipped_by_its_own_norm_in_backward() -> None:
    """The norm that is told is that before."""
    seen: dict[str, Tensor] = {}
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    optimizer = optimizer_of(parameters)
    for part, name in zip(parts_of(optimizer), parameters, strict=True):
        part.register_step_pre_hook(
            lambda part, *_, name=name: seen.update(
                {name: part.param_groups[0]["params"][0].grad.clone()}
            )
        )
    backward = BackwardOptimizer(2.0).attach(parameters, optimizer)
    backward.begin(1)
    backward.expect_loss(torch.tensor(1.0))
    (torch.tensor([3.0, 4.0]) * parameters["a"] + parameters["b"]).sum().backward()
    torch.testing.assert_close(seen["a"], torch.tensor([1.2, 1.6]), rtol=1e-4, atol=0)
    assert torch.equal(seen["b"], torch.ones(2))
    assert float(backward.norms["a"]) == 5.0
    assert float(backward.norm()) == pytest.approx(27**0.5)


def test_the_norm_of_rows_counts_what_all_have_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes have the same rows here, and each has the replicated tensor."""
    parameters = parameters_of(
        {"rows": torch.full((2,), 3.0), "all": torch.tensor([7.0])}
    )
    shards = Shards()
    monkeypatch.setattr(Shards, "take_gradients", lambda self: None)  # FSDP's own
    shards.local_parameters = {"rows": parameters["rows"]}
    shards.layout = {"rows": Shard((4,), first=0, count=2)}
    monkeypatch.setattr(
        DistributedContext, "all_reduce", lambda self, values: 2 * values
    )
    norm = clip(parameters, max_grad_norm=1.0, shards=shards)
    assert float(norm) == pytest.approx((2 * 18 + 49) ** 0.5)
    clipped = float(parameters["all"].grad)
    assert clipped == pytest.approx(7 / float(norm), rel=1e-5)


@pytest.mark.parametrize("reads_sound", [True, False])
def test_processes_sum_what_all_have_whole_and_the_values_of_a_step(
    reads_sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are summed by FSDP already. In a model with sound a gradient may be missing in
    all processes. The time until then is that of the optimizer.
    """
    parameters = parameters_of(
        {"rows": torch.full((2,), 3.0), "all": torch.tensor([7.0])}
    )
    shards = Shards()
    monkeypatch.setattr(Shards, "take_gradients", lambda self: None)  # FSDP's own
    shards.local_parameters = {"rows": parameters["rows"]}
    sums: list[tuple[Any, ...]] = []

    @dataclass(frozen=True)
    class FirstOfTwo(DistributedContext):
        size: int = 2

        def all_reduce_gradients(self, parameters: Any, **more: Any) -> None:
            sums.append((list(parameters), more))

        def sum_over_groups(self, values: Tensor) -> Tensor:
            sums.append((values,))
            return values

    family: Any = SimpleNamespace(spec=SimpleNamespace(reads_sound=reads_sound))
    objective: Any = None
    context = StepContext(family, objective, 1, 1e9, dist=FirstOfTwo())
    trainable = TrainableState(parameters, OptimizerList([]), {}, shards=shards)
    values, clock = torch.zeros(4), Clock(CPU)
    sum_and_clip(trainable, context, values, clock, one_modality_only=False)
    of_gradients, of_values = sums
    (replicated, more) = of_gradients
    assert len(replicated) == 1
    assert replicated[0] is parameters["all"]
    assert more == {"keep_missing": reads_sound}
    assert of_values[0] is values
    assert list(clock.read()) == ["optimizer", "waiting"]


@pytest.mark.parametrize(
    ("reads_sound", "has_sound", "drops"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_step_without_sound_moves_nothing_that_only_sound_reads(
    reads_sound: bool, has_sound: bool, drops: bool
) -> None:
    """Of a model that has both."""
    parameters = parameters_of(GRADIENTS)
    spec = SimpleNamespace(reads_sound=reads_sound)
    family: Any = SimpleNamespace(spec=spec, device=CPU)
    objective: Any = None
    context = StepContext(family, objective, 1, 1e9, compiled=CompiledBlocks())
    step_batch: Any = SimpleNamespace(sound_t=torch.ones(1) if has_sound else None)
    trainable = TrainableState(parameters, OptimizerList([]), {})
    _finish_gradients(context, trainable, step_batch, torch.zeros(4), Clock(CPU))
    assert (parameters["unread_norm.weight"].grad is None) is drops
