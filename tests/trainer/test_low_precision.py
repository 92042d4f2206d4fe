"""Updates of bf16 weights, number by number: rounded by chance, by way of float32 masters,
and within backward.
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from videotune.config.optimizers import Optimizer
from videotune.trainer.low_precision import (
    BackwardOptimizer,
    MasterWeights,
    owners_of,
    stochastic_round,
    update_each_rounded,
    update_rounded,
)
from videotune.trainer.optimizers import AnyOptimizer, make_optimizer

GOOD = torch.tensor(True)
RATE = 0.25
SHAPE = (8, 8)
BF16 = torch.bfloat16


def weights_of(**dtypes: torch.dtype) -> dict[str, nn.Parameter]:
    """Parameters by name, each with a gradient of 1 to 2."""
    generator = torch.Generator().manual_seed(1)
    parameters = {}
    for name, dtype in dtypes.items():
        parameter = nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
        parameter.grad = (1 + torch.rand(SHAPE, generator=generator)).to(dtype)
        parameters[name] = parameter
    return parameters


def sgd(parameters: Mapping[str, nn.Parameter]) -> AnyOptimizer:
    """Plain SGD, one for each parameter."""
    settings = Optimizer.model_construct(name="torch.optim:SGD", args={})
    groups = {"all": list(parameters.values())}
    return make_optimizer(groups, settings, one_per_parameter=True, rates={"all": RATE})


def exact(parameter: nn.Parameter) -> Tensor:
    """The weight after a step in float32."""
    assert parameter.grad is not None
    return parameter.detach().float() - RATE * parameter.grad.float()


def test_draws_of_rounding_are_by_seed_and_name() -> None:
    """The draws must never change, or a resumed run would differ from one that was not
    interrupted.
    """
    between = torch.full((12,), 1 + 2.0**-8)  # half a step of bf16 above 1
    went_up = (stochastic_round(between, 5, 3, "w") > 1).int().tolist()
    assert went_up == [1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1]
    x = torch.randn(400, generator=torch.Generator().manual_seed(0))
    first = stochastic_round(x, 1, 2, "w")
    assert first.dtype == BF16
    assert torch.equal(first, stochastic_round(x, 1, 2, "w"))
    for seed, *name in ((2, 2, "w"), (1, 3, "w"), (1, 2, "v")):
        assert not torch.equal(first, stochastic_round(x, int(seed), *name))


def test_each_parameter_is_rounded_by_its_own_draw() -> None:
    """Of its rows where processes share them; one in float32 is not rounded, and one
    without a gradient stays.
    """
    parameters = weights_of(a=BF16, b=torch.float32, c=BF16, d=BF16, e=BF16)
    parameters["d"].grad = None
    before = parameters["d"].detach().clone()
    expected = {
        "a": stochastic_round(exact(parameters["a"]), 7, 3, "a[4:]"),
        "b": exact(parameters["b"]),
        "c": stochastic_round(exact(parameters["c"]), 7, 3, "c"),
        "d": before,
        "e": stochastic_round(exact(parameters["e"]), 7, 3, "e"),
    }
    places = {name: value.data_ptr() for name, value in parameters.items()}
    rows = {"a": 4, "c": 0}
    update_each_rounded(sgd(parameters), parameters, GOOD, 7, 3, rows)
    for name, value in parameters.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype
        assert value.grad is None
        assert value.data_ptr() == places[name]


def test_a_step_that_fails_leaves_the_weight_in_bf16() -> None:
    parameters = weights_of(w=BF16)
    weight = parameters["w"]
    before, place = weight.detach().clone(), weight.data_ptr()
    optimizer = owners_of(sgd(parameters))[id(weight)]

    def fail(*_: object) -> None:
        assert weight.dtype == torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        raise RuntimeError("out of memory")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        update_rounded(optimizer, weight, GOOD, 0, 1, "w")
    assert torch.equal(weight, before)
    assert (weight.data_ptr(), weight.grad) == (place, None)


def test_one_optimizer_for_all_cannot_update_one_of_them() -> None:
    parameters = weights_of(a=BF16, b=BF16)
    together = torch.optim.SGD(list(parameters.values()))
    with pytest.raises(AssertionError, match="one optimizer for all parameters"):
        owners_of(together)
    owners = owners_of(sgd(parameters))
    for value in parameters.values():
        (group,) = owners[id(value)].param_groups
        assert group["params"] == [value]


def test_masters_are_float32_copies_of_what_is_not_float32() -> None:
    parameters = weights_of(a=BF16, b=torch.float32, c=torch.float16)
    masters = MasterWeights(parameters)
    assert masters.has_copies
    assert list(masters.parameters) == ["a", "b", "c"]
    assert masters.parameters["b"] is parameters["b"]
    gradients = {name: value.grad for name, value in parameters.items()}
    parameters["c"].grad = None
    masters.grads_to_masters()
    for name in ("a", "c"):
        master = masters.parameters[name]
        assert master.dtype == torch.float32
        assert torch.equal(master, parameters[name].float())
        assert parameters[name].grad is None
    of_a = masters.parameters["a"].grad
    assert gradients["a"] is not None
    assert of_a is not None
    assert of_a.dtype == torch.float32
    assert torch.equal(of_a, gradients["a"].float())
    assert masters.parameters["c"].grad is None
    assert parameters["b"].grad is gradients["b"]

    for master in masters.parameters.values():
        master.data += 2.0**-10
    rounded = {
        name: value.detach().to(parameters[name].dtype)
        for name, value in masters.parameters.items()
    }
    masters.masters_to_model()
    assert all(torch.equal(parameters[name], rounded[name]) for name in parameters)

    parameters["a"].grad = parameters["a"].detach().clone()
    masters.forget_gradients()
    assert parameters["a"].grad is None
    assert masters.parameters["a"].grad is of_a
    assert not MasterWeights({"b": parameters["b"]}).has_copies


@pytest.mark.parametrize("rounds", [False, True])
def test_within_backward_a_weight_is_updated_as_it_is_after_it(rounds: bool) -> None:
    """With masters, or rounded by chance with the draw of the step."""
    parameters = weights_of(w=BF16)
    weight = parameters["w"]
    masters = None if rounds else MasterWeights(parameters)
    master = weight if masters is None else masters.parameters["w"]
    slope = weight.grad
    assert slope is not None
    expected = exact(weight)
    weight.grad = None
    backward = BackwardOptimizer(1e9, 7 if rounds else None, masters)
    assert backward.attach(parameters, sgd({"w": master})) is backward
    with pytest.raises(AssertionError, match="outside of a step"):
        (weight * slope).sum().backward()
    weight.grad = None

    for step in (3, 4):
        backward.begin(step)
        backward.expect_loss(torch.tensor(1.0))
        (weight * slope).sum().backward()
        if rounds:
            rounded = stochastic_round(expected, 7, step, "w")
            expected = rounded.float() - RATE * slope.float()
        else:
            assert torch.equal(master, expected)
            rounded = expected.bfloat16()
            expected = expected - RATE * slope.float()
        assert torch.equal(weight, rounded)
        assert weight.dtype == BF16
        assert (weight.grad, master.grad) == (None, None)
        norm = slope.float().norm()
        torch.testing.assert_close(backward.norms["w"], norm, rtol=1e-3, atol=0)
        assert backward.norm() == backward.norms["w"]

    # The failed pass of a step has updated it, so the next one leaves it.
    backward.repeat()
    (weight * slope).sum().backward()
    assert torch.equal(weight, rounded)
    assert (weight.grad, master.grad) == (None, None)
    backward.begin(5)
    assert backward.norms == {}
    assert backward.norm().shape == ()
    with pytest.raises(AssertionError, match="outside of a step"):
        (weight * slope).sum().backward()
