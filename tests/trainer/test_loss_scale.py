"""The factor of the loss in float16: what it multiplies and divides, and when it moves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from videotune.trainer.loss_scale import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    LossScale,
    without_loss_scale,
)

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(True), torch.tensor(False)


def with_gradient(gradient: Tensor | None, device: str = "cpu") -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = gradient
    return parameter


def test_gradients_of_the_scaled_loss_are_divided_by_the_same_factor() -> None:
    """One that is not finite stays so, and a missing one is missing."""
    loss_scale = LossScale(CPU, first=8.0)
    assert torch.equal(loss_scale.scaled(torch.tensor(3.0)), torch.tensor(24.0))
    parameters = [
        with_gradient(torch.tensor([8.0, 4.0])),
        with_gradient(None),
        with_gradient(torch.tensor([torch.inf, 1.0])),
        with_gradient(torch.tensor([16.0, 0.0])),
    ]
    loss_scale.unscale(parameters)
    gradients = [parameter.grad for parameter in parameters]
    assert gradients[0] is not None
    assert gradients[0].tolist() == [1.0, 0.5]
    assert gradients[1] is None
    assert gradients[2] is not None
    assert not gradients[2][0].isfinite()
    assert gradients[3] is not None
    assert gradients[3].tolist() == [2.0, 0.0]


class Divisions(TorchDispatchMode):
    """Keeps what the kernel is told that divides the gradients of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[Tensor], Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = "_amp_foreach_non_finite_check_and_unscale_"
        if func is getattr(torch.ops.aten, name).default:
            return self.seen.append(args)
        return func(*args, **(kwargs or {}))


def test_gradients_on_several_devices_are_divided_on_each() -> None:
    parameters = [
        with_gradient(torch.ones(2, device=device), device)
        for device in ("meta", "cpu", "meta")
    ]
    with Divisions() as divisions:
        LossScale(CPU, first=8.0).unscale(parameters)
    on_meta, on_cpu = divisions.seen
    first, second, third = (id(parameter.grad) for parameter in parameters)
    assert [id(gradient) for gradient in on_meta[0]] == [first, third]
    assert [id(gradient) for gradient in on_cpu[0]] == [second]
    assert on_meta[1].is_meta
    assert on_meta[2].is_meta
    assert (on_cpu[1].item(), on_cpu[2].item()) == (0.0, 1 / 8)


def test_the_factor_halves_at_once_and_doubles_after_enough_finite_steps() -> None:
    loss_scale = LossScale(CPU, first=8.0, growth_interval=3)
    seen = []
    for finite in (GOOD, GOOD, GOOD, GOOD, BAD, GOOD, GOOD, BAD, BAD):
        loss_scale.update(finite)
        seen.append((float(loss_scale.factor), int(loss_scale.finite_steps)))
    assert seen == [
        (8.0, 1),
        (8.0, 2),
        (16.0, 0),
        (16.0, 1),
        (8.0, 0),
        (8.0, 1),
        (8.0, 2),
        (4.0, 0),
        (2.0, 0),
    ]


def test_it_begins_as_torch_s_own() -> None:
    ours = LossScale(CPU)
    theirs = torch.amp.GradScaler("cpu")
    assert ours.factor.item() == FIRST_SCALE == theirs.get_scale()
    assert ours.finite_steps.item() == 0
    assert ours.finite_steps.dtype == torch.int32
    assert (ours.factor.shape, ours.finite_steps.shape) == ((), ())
    ours.finite_steps.fill_(GROWTH_INTERVAL - 1)
    ours.update(GOOD)
    assert ours.factor.item() == 2 * FIRST_SCALE
    assert theirs.get_growth_interval() == GROWTH_INTERVAL

    on_device = LossScale(torch.device("meta"))
    assert on_device.factor.is_meta
    assert on_device.finite_steps.is_meta


def test_both_numbers_are_kept_and_come_back_at_their_place() -> None:
    """A graph of a pass reads them there."""
    loss_scale = LossScale(CPU, first=8.0)
    loss_scale.update(GOOD)
    saved = {name: value.clone() for name, value in loss_scale.state().items()}
    assert saved == {"loss_scale.factor": 8.0, "loss_scale.finite_steps": 1}
    again = LossScale(CPU)
    factor, finite_steps = again.factor, again.finite_steps
    again.load(saved | {"w.exp_avg": torch.ones(2)})
    assert (again.factor is factor, again.finite_steps is finite_steps) == (True, True)
    assert (float(factor), int(finite_steps)) == (8.0, 1)
    for name in saved:
        rest = {key: value for key, value in saved.items() if key != name}
        with pytest.raises(ValueError, match=f"^no {name}$"):
            again.load(rest)

    others = {"w.exp_avg": torch.ones(2), "net.loss_scale.b": torch.ones(1)}
    assert without_loss_scale({**saved, **others}) == others
