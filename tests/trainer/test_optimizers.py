"""Optimizers of the table: each is its published formula, is kept bit for bit, and
leaves all alone where told to.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from videotune.config.optimizers import OPTIMIZERS, Optimizer
from videotune.runs.checkpoint_writer import write_tensors
from videotune.trainer.optimizer_state import (
    _paged,
    load_optimizer_state,
    optimizer_state,
)
from videotune.trainer.optimizers import AnyOptimizer, make_optimizer, step_if_finite

NAMES = [name for name in OPTIMIZERS if name != "PAGED_ADAMW_8BIT"]
GOOD, BAD = torch.tensor(True), torch.tensor(False)
RATE = 0.01


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    """Two matrices, one of them large enough for 8 bits, a vector, and a matrix of
    zeros, as an adapter begins.
    """
    random = torch.Generator().manual_seed(seed)
    shapes = {"a.large": (64, 80), "a.small": (3, 5), "b.vector": (70,)}
    found = {
        name: nn.Parameter(torch.randn(shape, generator=random))
        for name, shape in shapes.items()
    }
    return found | {"b.zeros": nn.Parameter(torch.zeros(4, 6))}


def gradients(own: dict[str, nn.Parameter], step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for parameter in own.values():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def optimizer_of(
    own: dict[str, nn.Parameter], name: str, **numbers: float
) -> AnyOptimizer:
    groups = {
        part: [p for key, p in own.items() if key.startswith(part)]
        for part in ("a", "b")
    }
    made = make_optimizer(groups, Optimizer(name=name, **numbers))
    for group in made.param_groups:
        group["lr"] = RATE if name != "PRODIGY" else 1.0
    return made


def steps(
    own: dict[str, nn.Parameter], optimizer: AnyOptimizer, numbers: range
) -> None:
    for step in numbers:
        gradients(own, step)
        step_if_finite(optimizer, GOOD)


def copies(tensors: dict[str, nn.Parameter] | dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_put_back_is_never_having_stopped(name: str, tmp_path: Path) -> None:
    whole, again = parameters(), parameters(1)
    first, second = optimizer_of(whole, name), optimizer_of(again, name)
    steps(whole, first, range(3))
    write_tensors(tmp_path / "state.safetensors", optimizer_state(first, whole))
    state = load_file(tmp_path / "state.safetensors")
    for key, parameter in whole.items():
        again[key].data.copy_(parameter)
    load_optimizer_state(second, again, state)
    assert same(optimizer_state(second, again), state)
    steps(whole, first, range(3, 6))
    steps(again, second, range(3, 6))
    assert same(copies(whole), copies(again))
    forgotten = parameters(1)
    fresh = optimizer_of(forgotten, name)
    for key, value in copies(whole).items():
        forgotten[key].data.copy_(value)
    steps(whole, first, range(6, 7))
    steps(forgotten, fresh, range(6, 7))
    assert not same(copies(whole), copies(forgotten)), "the state makes a difference"
    with pytest.raises(ValueError, match="no optimizer state for"):
        load_optimizer_state(second, again, {})
    with pytest.raises(ValueError, match="of no parameter"):
        load_optimizer_state(
            second, again, state | {"stranger.exp_avg": next(iter(state.values()))}
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_good_leaves_weights_and_state(name: str) -> None:
    own = parameters()
    optimizer = optimizer_of(own, name)
    steps(own, optimizer, range(2))
    before, state = copies(own), copies(optimizer_state(optimizer, own))
    gradients(own, 2)
    own["a.large"].grad[0, 0] = float("nan")  # type: ignore[index]
    step_if_finite(optimizer, BAD)
    assert same(before, copies(own))
    assert same(state, optimizer_state(optimizer, own))
    steps(own, optimizer, range(2, 3))
    assert not same(before, copies(own))


NUMBERS = [("beta1", 0.3), ("beta2", 0.5), ("weight_decay", 0.5)]
"""Adafactor keeps no such means, and the config refuses them:
tests/config/test_numbers.py.
"""


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (name, *one)
        for name in NAMES
        for one in NUMBERS
        if name != "ADAFACTOR" or one[0] == "weight_decay"
    ],
)
def test_each_number_changes_what_is_learnt(name: str, key: str, value: float) -> None:
    found = []
    for numbers in ({}, {key: value}):
        own = parameters()
        steps(own, optimizer_of(own, name, **numbers), range(3))
        found.append(copies(own))
    assert not torch.equal(found[0]["a.large"], found[1]["a.large"]) or (name, key) == (
        "MUON",
        "beta2",
    )
    assert not torch.equal(found[0]["b.vector"], found[1]["b.vector"])


def history(own: dict[str, nn.Parameter], key: str, count: int) -> Iterator[Tensor]:
    for step in range(count):
        gradients(own, step)
        yield own[key].grad.double()  # type: ignore[union-attr]


def lion(
    weight: Tensor, given: Iterator[Tensor], b1: float, b2: float, decay: float
) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    mean = torch.zeros_like(weight)
    for g in given:
        weight = weight - RATE * (torch.sign(b1 * mean + (1 - b1) * g) + decay * weight)
        mean = b2 * mean + (1 - b2) * g
    return weight


def adafactor(weight: Tensor, given: Iterator[Tensor], decay: float) -> Tensor:
    """Shazeer and Stern 2018, algorithm 4 without relative steps; weight decay
    decoupled.
    """
    rows, columns = (
        torch.zeros(weight.shape[0], dtype=torch.float64),
        torch.zeros(weight.shape[1], dtype=torch.float64),
    )
    for step, g in enumerate(given, 1):
        keep = 1 - step**-0.8
        square = g.square() + 1e-30
        rows, columns = (
            keep * rows + (1 - keep) * square.mean(1),
            keep * columns + (1 - keep) * square.mean(0),
        )
        u = g / (rows[:, None] * columns[None] / rows.mean()).sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        weight = weight - RATE * decay * weight - RATE * u
    return weight


def came(weight: Tensor, given: Iterator[Tensor], decay: float) -> Tensor:
    """Luo et al. 2023, algorithm 2; weight decay decoupled."""

    def means(square: Tensor, old: Tensor, keep: float) -> tuple[Tensor, Tensor]:
        """Rows and columns, in the place of a matrix; and 1/√ of their product over
        their mean.
        """
        rows, columns = square.mean(1), square.mean(0)
        new = keep * old + (1 - keep) * torch.cat([rows, columns])
        rows, columns = new[: len(rows)], new[len(rows) :]
        return new, (rows[:, None] * columns[None] / rows.mean()).rsqrt()

    kept = sure = torch.zeros(sum(weight.shape), dtype=torch.float64)
    mean = torch.zeros_like(weight)
    for g in given:
        kept, scale = means(g.square() + 1e-30, kept, 0.99)
        u = g * scale
        u = u / max(1.0, u.square().mean().sqrt().item())
        mean = 0.9 * mean + 0.1 * u
        sure, scale = means((u - mean).square() + 1e-16, sure, 0.9999)
        weight = weight - RATE * decay * weight - RATE * scale * mean
    return weight


def muon(
    weight: Tensor, given: Iterator[Tensor], momentum: float, decay: float
) -> Tensor:
    """Jordan et al.

    2024 with the exact polar factor in place of the iteration, and Liu et al. 2025's
    scale.
    """
    mean = torch.zeros_like(weight)
    for g in given:
        mean = momentum * mean + (1 - momentum) * g
        u, _, v = torch.linalg.svd(
            (1 - momentum) * g + momentum * mean, full_matrices=False
        )
        weight = weight * (1 - RATE * decay) - RATE * 0.2 * max(weight.shape) ** 0.5 * (
            u @ v
        )
    return weight


@pytest.mark.parametrize(
    ("name", "formula", "slack"),
    [
        ("LION", lambda w, g: lion(w, g, 0.9, 0.99, 0.1), 1e-6),
        ("ADAFACTOR", lambda w, g: adafactor(w, g, 0.1), 1e-6),
        ("CAME", lambda w, g: came(w, g, 0.1), 1e-5),
        ("MUON", lambda w, g: muon(w, g, 0.9, 0.1), 0.6),
    ],
)
def test_the_weights_are_those_of_the_published_formula(
    name: str, formula: Callable[[Tensor, Iterator[Tensor]], Tensor], slack: float
) -> None:
    """Muon's iteration makes singular values of 0.7 to 1.2 where the formula says 1, so
    it is compared by direction.
    """
    for key in ("a.small", "a.large"):
        own = parameters()
        start = copies(own)[key].double()
        wanted = formula(start, history(own, key, 4))
        steps(own, optimizer_of(own, name, weight_decay=0.1), range(4))
        ours, theirs = own[key].detach().double() - start, wanted - start
        if name == "MUON":
            assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.95
            assert 0.8 < ours.norm() / theirs.norm() < 1.2
        else:
            torch.testing.assert_close(ours, theirs, rtol=slack, atol=slack)


def test_prodigy_finds_a_rate_for_each_group() -> None:
    """On |w - w*| from 0 it is about the distance; a part that is far is not told to
    stop by one that is near.
    """
    near, far = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = make_optimizer(
        {"near": [near], "far": [far]}, Optimizer(name="PRODIGY", weight_decay=0.0)
    )
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(150):
        for weight, place in ((near, 0.1), (far, 30.0)):
            weight.grad = torch.sign(weight.detach() - place)
        step_if_finite(optimizer, GOOD)
    found = [group["d"] for group in optimizer.param_groups]
    assert found[1] > 10 * found[0]
    assert 6 < found[1] < 60
    assert abs(far.item() - 30) < 10


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    own = parameters()
    optimizer = optimizer_of(own, "MUON")
    steps(own, optimizer, range(1))
    kept = optimizer_state(optimizer, own)
    assert {key.rpartition(".")[2] for key in kept if key.startswith("a.")} == {
        "momentum_buffer"
    }
    of_vector = {key for key in kept if key.startswith("b.vector")}
    assert of_vector == {f"b.vector.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.cuda
def test_the_paged_optimizer_is_the_8_bit_one_and_its_pages_come_back() -> None:
    """A million numbers: below a tenth of that nothing is paged."""
    results = []
    for name, again in (
        ("ADAMW_8BIT", False),
        ("PAGED_ADAMW_8BIT", False),
        ("PAGED_ADAMW_8BIT", True),
    ):
        weight = nn.Parameter(torch.ones(1024, 1024, device="cuda"))
        own = {"w": weight}
        optimizer = make_optimizer({"all": [weight]}, Optimizer(name=name))
        for step in range(4):
            if again and step == 2:
                state = {
                    key: value.cpu().clone()
                    for key, value in optimizer_state(optimizer, own).items()
                }
                optimizer = make_optimizer({"all": [weight]}, Optimizer(name=name))
                load_optimizer_state(optimizer, own, state)
            optimizer.param_groups[0]["lr"] = RATE
            weight.grad = torch.randn(
                1024, 1024, generator=torch.Generator().manual_seed(step)
            ).cuda()
            step_if_finite(optimizer, GOOD)
        if name.startswith("PAGED"):
            (part,) = [optimizer]
            assert part.state[weight]["state1"].is_paged  # type: ignore[union-attr]
        results.append(weight.detach().cpu())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


def test_what_is_paged_is_put_back_into_pages() -> None:
    """Into those that the optimizer gives for a tensor of the parameter's shape."""
    weight = nn.Parameter(torch.zeros(2, 3))
    pages = []

    def page_of(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        assert parameter is weight
        pages.append(torch.zeros_like(parameter, dtype=dtype))
        return pages[-1]

    def state() -> dict[str, Tensor]:
        return {
            "state1": torch.arange(6, dtype=torch.uint8).view(2, 3),
            "state2": torch.ones(2, 2, 3),
            "absmax1": torch.ones(2, 3),
        }

    given = state()
    restored = _paged(
        SimpleNamespace(is_paged=True, get_state_buffer=page_of), weight, dict(given)
    )
    (page,) = pages
    assert restored["state1"] is page
    assert page.dtype == torch.uint8
    assert torch.equal(page, given["state1"])
    for key in ("state2", "absmax1"):
        assert restored[key] is given[key]

    second = given | {"state2": torch.ones(2, 3)}
    restored = _paged(
        SimpleNamespace(is_paged=True, get_state_buffer=page_of), weight, dict(second)
    )
    assert any(restored["state2"] is page for page in pages[1:])
    assert torch.equal(restored["state2"], second["state2"])
    assert _paged(SimpleNamespace(is_paged=False), weight, given) is given
    assert _paged(SimpleNamespace(), weight, given) is given


@pytest.mark.parametrize("name", [name for name in NAMES if name != "PRODIGY"])
def test_an_optimizer_for_each_parameter_is_the_same_update(name: str) -> None:
    whole, apart = parameters(), parameters()
    steps(whole, optimizer_of(whole, name), range(3))
    each = make_optimizer(
        {"all": list(apart.values())}, Optimizer(name=name), one_per_parameter=True
    )
    for group in each.param_groups:
        group["lr"] = RATE
    steps(apart, each, range(3))
    assert same(copies(whole), copies(apart))


@pytest.mark.parametrize("name", NAMES)
def test_the_state_takes_the_bytes_that_a_plan_counts(name: str) -> None:
    large = nn.Parameter(torch.randn(256, 512))
    large.grad = torch.randn(256, 512)
    optimizer = make_optimizer({"a": [large]}, Optimizer(name=name))
    step_if_finite(optimizer, GOOD)
    held = sum(
        tensor.nbytes for tensor in optimizer_state(optimizer, {"w": large}).values()
    )
    assert held / large.numel() == pytest.approx(OPTIMIZERS[name].state_bytes, abs=0.05)
