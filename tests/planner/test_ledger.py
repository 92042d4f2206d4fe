"""What a ledger counts: bytes by part and phase, and operations, of small real tensors."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from videotune.planner.ledger import Ledger, Reading, Work, plus


def test_products_are_counted_by_operations_and_others_by_bytes() -> None:
    """Of a product 2 x 4 x 8 x 2 operations; a sum reads 32 bytes and writes 32."""
    x, w = torch.ones(4, 8), torch.ones(8, 2)
    ledger = Ledger()
    with ledger:
        ledger.phase("forward")
        y = x @ w
        y.view(8)
        torch.empty(1000)
        y.detach()
        torch.add(y, y)
    counted = ledger.reading().work
    assert counted == Work(flops=128, moved=64, operations=2)

    with ledger:
        ledger.phase("optimizer")
        y.mul_(2)
        ledger.phase("end")
        y.mul_(2)
    after = ledger.reading().work
    assert after.operations == 2, "kernels after the passes are not counted"
    assert after.moved == 64 + 2 * 32


def test_products_of_eight_bits_and_attention_are_counted_apart() -> None:
    numbers = torch.ones(32, 32, dtype=torch.int8)
    with Ledger() as ledger:
        torch._int_mm(numbers, numbers)
        torch._int_mm(numbers, numbers)
    work = ledger.reading().work
    assert work.eight_bit == work.flops == 2 * 2 * 32**3
    assert work.attention == work.moved == 0

    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    with Ledger() as ledger:
        scaled_dot_product_attention(q, q, q)
    forward = 2 * (2 * 4 * 16 * 16 * 8) * 2
    work = ledger.reading().work
    assert work.attention == work.flops == forward
    assert work.eight_bit == 0
    with Ledger() as ledger:
        product = torch.ones(3, 5) @ torch.ones(5, 7)
        scaled_dot_product_attention(q, q, q).sum().backward()
    work = ledger.reading().work
    assert work.attention == 3.5 * forward
    assert work.flops == 3.5 * forward + 2 * 3 * 5 * 7
    assert product.shape == (3, 7)


def test_bytes_are_of_their_part_at_the_largest_moment_of_a_phase() -> None:
    """In pieces of 100 bytes; a phase that comes again keeps its larger moment."""
    ledger = Ledger(piece=100)
    with ledger:
        ledger.phase("kept", "forward")
        first = torch.ones(30)
        second = torch.ones(10)
        ledger.name([None, first], "weights")
        ledger.name([first], "trained")
        del second
        third = torch.ones(5)
        ledger.phase("end")
        ledger.phase("forward")
        ledger.name([third], "batch")
    assert ledger.phases == {
        "kept": {},
        "forward": {"activations": 300},
        "end": {"trained": 200, "activations": 100},
    }
    assert ledger.held == {"trained": 200, "batch": 100, "activations": 0, "weights": 0}
    del first
    assert ledger.held["trained"] == 0


def test_nothing_is_recorded_outside_of_a_phase() -> None:
    ledger = Ledger()
    with ledger:
        tensor = torch.ones(10)
        ledger.phase("forward")
        ledger.phase("")
        del tensor
        torch.ones(10_000)
    assert ledger.phases["forward"] == {"activations": 512}


def test_each_phase_is_extrapolated_by_itself() -> None:
    """Three times the difference beside the first reading."""
    first = Reading({"a": {"x": 10}, "b": {"y": 1}}, Work(5, 1, 2, 3, 4))
    second = Reading({"a": {"x": 14, "z": 2}, "b": {"y": 2}}, Work(9, 2, 4, 6, 8))
    result = first.extrapolated(first, second, 3)
    assert result.phases == {"a": {"x": 22, "z": 6}, "b": {"y": 4}}
    assert result.work == Work(17, 4, 8, 12, 16)


def test_parts_are_added_in_order() -> None:
    total = plus({"b": 1, "c": 5}, {"a": 3, "b": 2}, 1.5)
    assert list(total.items()) == [("a", 4), ("b", 4), ("c", 5)]
    assert plus({"a": 1}, {"a": 2}) == {"a": 3}


class Dropped(torch.autograd.Function):
    """Values that no loss reads: nothing comes back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def test_attention_without_a_gradient_computes_nothing_backward() -> None:
    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    with Ledger() as ledger:
        attended = scaled_dot_product_attention(q, q, q)
        before = ledger.reading().work
        (Dropped.apply(attended).sum() + q.sum()).backward()  # type: ignore[no-untyped-call]
    after = ledger.reading().work
    assert after.attention == before.attention > 0
    assert after.flops == before.flops
