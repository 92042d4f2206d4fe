"""What becomes of gradients between the backward pass and the update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from videotune.distributed import DistributedContext
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.sharding import Shards
from videotune.trainer.gradients import sum_and_clip
from videotune.trainer.loss_scale import LossScale
from videotune.trainer.low_precision import MasterWeights
from videotune.trainer.optimizers import OptimizerList
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
