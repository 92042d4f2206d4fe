"""What is promised bit for bit must not hang on where in memory a tensor lies."""

import pytest
import torch

import videotune  # noqa: F401  (it chooses how MKL computes, before its first call)


def placed(values: torch.Tensor, off: int) -> torch.Tensor:
    """The same values, so many numbers behind a multiple of 64 bytes."""
    room = torch.empty(values.numel() + 32)
    begin = (-room.data_ptr() // 4) % 16 + off
    there = room[begin : begin + values.numel()].view(values.shape)
    return there.copy_(values)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(2, 512, 16), (3, 16, 16), (34, 48, 48)]
)
def test_products_have_the_same_bits_wherever_their_operands_lie(
    rows: int, inner: int, columns: int
) -> None:
    """Of few rows they had not, on an AMD EPYC with MKL's own choice."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, inner, generator=generator) for size in (rows, columns))
    first = torch.nn.functional.linear(placed(x, 0), placed(w, 0))
    for off in range(1, 16):
        assert torch.equal(
            torch.nn.functional.linear(placed(x, off), placed(w, 0)), first
        )
        assert torch.equal(
            torch.nn.functional.linear(placed(x, 0), placed(w, off)), first
        )
