"""Optimizers that step as one: their groups and rates, steps that are skipped, and the
norm by which gradients are clipped.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from videotune.config.optimizers import Optimizer
from videotune.trainer.optimizers import (
    FALLBACK_RATE,
    ClassOptimizers,
    OptimizerList,
    clip_grad_norm,
    make_optimizer,
    norm_of,
    parts_of,
    step_if_finite,
)

GOOD, BAD = torch.tensor(True), torch.tensor(False)
RATES = {"a": 0.5}


def by_class(name: str, **args: Any) -> Optimizer:
    return Optimizer.model_construct(name=name, args=args)


def groups_of() -> dict[str, list[nn.Parameter]]:
    return {
        "a": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 3))],
        "b": [nn.Parameter(torch.ones(4))],
    }


def params_of(groups: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(group["name"], [id(p) for p in group["params"]]) for group in groups]


@pytest.mark.parametrize("name", ["torch.optim:SGD", "ADAMW", "MUON"])
@pytest.mark.parametrize("one_per_parameter", [False, True])
def test_each_group_has_its_name_and_parameters(
    name: str, one_per_parameter: bool
) -> None:
    """Muon takes matrices, and another one what it does not."""
    groups = groups_of()
    settings = by_class(name) if ":" in name else Optimizer(name=name)
    optimizer = make_optimizer(
        groups, settings, one_per_parameter=one_per_parameter, rates=RATES
    )
    first, second, third = (id(p) for p in (*groups["a"], *groups["b"]))
    together = [("a", [first, second]), ("b", [third])]
    separate = [("a", [first]), ("a", [second]), ("b", [third])]
    if name == "MUON" and not one_per_parameter:
        assert sorted(params_of(optimizer.param_groups)) == sorted(separate)
        assert len(parts_of(optimizer)) == 2
        return
    expected = separate if one_per_parameter else together
    assert params_of(optimizer.param_groups) == expected
    is_one = name == "ADAMW" and not one_per_parameter
    assert isinstance(optimizer, OptimizerList) is not is_one
    assert isinstance(optimizer, ClassOptimizers) is (":" in name)
    assert len(parts_of(optimizer)) == (1 if is_one else len(expected))
    if ":" in name:
        rates = {"a": 0.5, "b": FALLBACK_RATE}
        assert all(
            group["lr"] == rates[group["name"]] for group in optimizer.param_groups
        )


def test_without_rates_a_class_is_built_with_the_fallback() -> None:
    optimizer = make_optimizer(groups_of(), by_class("torch.optim:SGD"))
    assert [group["lr"] for group in optimizer.param_groups] == [FALLBACK_RATE] * 2


def test_the_parts_free_their_gradients() -> None:
    groups = groups_of()
    parameters = [*groups["a"], *groups["b"]]
    optimizer = make_optimizer(groups, by_class("torch.optim:SGD"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.sum()) for p in parameters if p.grad is not None] == [0] * 3
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("grads_finite", [GOOD, BAD])
def test_a_part_whose_kernel_skips_is_told_and_the_others_wait(
    grads_finite: Tensor,
) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    fused = torch.optim.AdamW(weights[:1], lr=0.5, fused=True)
    parts: list[Any] = [
        torch.optim.SGD(weights[1:2], lr=0.5),
        fused,
        torch.optim.AdamW(weights[2:], lr=0.5),
    ]
    for weight in weights:
        weight.grad = torch.ones(2)
    step_if_finite(OptimizerList(parts), grads_finite)
    moved = [not torch.equal(weight, torch.ones(2)) for weight in weights]
    assert moved == [bool(grads_finite)] * 3
    assert fused.found_inf.item() == (not grads_finite)  # type: ignore[attr-defined]
    assert fused.found_inf.dtype == torch.float32  # type: ignore[attr-defined]
    assert not any(hasattr(part, "found_inf") for part in (parts[0], parts[2]))


class Plain(torch.optim.SGD):
    """A class that takes ``fused`` and has no such kernel."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)
        self.defaults["fused"] = True


def test_only_a_kernel_on_the_device_of_the_flag_is_told() -> None:
    """For others the host asks for it."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    unfused: Any = torch.optim.AdamW(weights[:1], lr=0.5)
    unfused._step_supports_amp_scaling = True
    elsewhere: Any = torch.optim.AdamW([nn.Parameter(torch.ones(2, device="meta"))])
    elsewhere._step_supports_amp_scaling = True
    elsewhere.defaults["fused"] = True
    parts = [unfused, Plain(weights[1:]), elsewhere]
    for weight in weights:
        weight.grad = torch.ones(2)
    step_if_finite(OptimizerList(parts), BAD)
    assert all(torch.equal(weight, torch.ones(2)) for weight in weights)
    assert not any(hasattr(part, "found_inf") for part in parts)


def with_gradients(
    *gradients: Tensor | None, device: str = "cpu"
) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        dtype = torch.float32 if gradient is None else gradient.dtype
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize(
    ("max_norm", "factor"), [(12.0, 1.0), (13.0, 1.0), (6.5, 6.5 / (13 + 1e-6))]
)
def test_a_gradient_is_scaled_if_it_is_longer(max_norm: float, factor: float) -> None:
    """Of length 13 = |(3, 4, 0, 12)|, and one that is short enough is not touched."""
    given = [torch.tensor([3.0, 4.0]), None, torch.tensor([0.0, 12.0])]
    parameters = with_gradients(*(x if x is None else x.clone() for x in given))
    norm = clip_grad_norm(parameters, max_norm)
    assert (norm.item(), norm.dtype, norm.shape) == (13.0, torch.float32, ())
    if max_norm == 12.0:
        factor = 12.0 / (13 + 1e-6)
    for parameter, before in zip(parameters, given, strict=True):
        if before is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, before * factor, rtol=1e-7, atol=0)
        if factor == 1.0:
            assert torch.equal(parameter.grad, before)


def test_a_norm_that_is_known_is_not_measured_again() -> None:
    """Such as that over several processes."""
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    known = torch.tensor(10.0)
    assert clip_grad_norm(parameters, 1.0, known) is known
    assert parameters[0].grad is not None
    assert parameters[0].grad.norm().item() == pytest.approx(0.5)
    assert clip_grad_norm(parameters, 10.0, known) is known
    assert parameters[0].grad.norm().item() == pytest.approx(0.5)


def test_a_gradient_that_is_not_finite_is_not_touched() -> None:
    parameters = with_gradients(torch.tensor([3.0, torch.nan]), torch.ones(2))
    assert clip_grad_norm(parameters, 1.0).isnan()
    assert parameters[1].grad is not None
    assert torch.equal(parameters[1].grad, torch.ones(2))


class Scalings(TorchDispatchMode):
    """Keeps by what the gradients elsewhere are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[Tensor], float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._foreach_mul_.Scalar:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


def test_gradients_on_several_devices_are_scaled_alike() -> None:
    here = with_gradients(torch.tensor([3.0, 4.0]), None)
    there = with_gradients(torch.ones(2, device="meta"), None, device="meta")
    with Scalings() as scalings:
        clip_grad_norm([*there, *here], 0.5, torch.tensor(5.0))
    ((gradients, factor),) = scalings.seen
    assert [id(gradient) for gradient in gradients] == [id(there[0].grad)]
    assert factor == pytest.approx(0.5 / (5 + 1e-6), rel=1e-8)
    assert here[0].grad is not None
    assert here[0].grad.norm().item() == pytest.approx(0.5)


def test_the_norm_of_gradients_on_several_devices_is_on_the_host() -> None:
    """That of a card alone stays there, and a plan's tensors without numbers are not
    looked at.
    """
    with FakeTensorMode():
        on_card = with_gradients(torch.empty(2, device="cuda"), device="cuda")
        on_host = with_gradients(torch.empty(2))
        assert norm_of([*on_card, *on_host]).device.type == "cpu"
        assert norm_of(on_card).device.type == "cuda"
        clip_grad_norm(on_host, 1.0)


def test_without_gradients_the_norm_is_0_where_the_parameters_are() -> None:
    for parameters, device in (
        (with_gradients(None, device="meta"), "meta"),
        (with_gradients(None), "cpu"),
        ([], "cpu"),
    ):
        norm = norm_of(parameters)
        assert (norm.shape, norm.device.type, norm.dtype) == ((), device, torch.float32)
    assert norm_of([]).item() == 0


NORMS: Mapping[str, list[Tensor | None]] = {
    "float32": [torch.tensor([3.0, 4.0]), None, torch.tensor([0.0, 12.0])],
    "mixed": [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0]).bfloat16()],
    "bf16": [torch.tensor([3.0, 4.0]).bfloat16(), torch.tensor([12.0, 0]).bfloat16()],
}


@pytest.mark.parametrize("kind", NORMS)
def test_the_norm_is_float32_whatever_the_gradients_are(kind: str) -> None:
    norm = norm_of(with_gradients(*NORMS[kind]))
    assert (norm.item(), norm.dtype) == (13.0, torch.float32)
