"""Multiply in eight bits: frozen Linears whose products take weights and inputs in
FLOAT_8 (float8_e4m3fn) or INT_8 (integers to ±127).

Each row of the weight (an output) has a float32 scale, which is fixed; each row of the
input (a token) gets its own in every pass. A product sums over what lies within a row,
so both scales come out of the sum exactly: only the numbers are rounded. The backward
pass sums over the weight's rows instead. There the weight's scales go to the gradient,
before its rows are rounded.

The products are torch's own (``_scaled_mm``, ``_int_mm``), on a card and on the CPU.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.memory.quantization import (
    EIGHT_BIT,
    LARGEST,
    QuantizedLayout,
    QuantizedLinear,
)

CAPABILITIES = {"FLOAT_8": (8, 9), "INT_8": (7, 5)}
"""The compute capability from which NVIDIA's cards multiply each kind."""

MULTIPLE = 16
"""The kernels take rows and columns in multiples of this."""

FEWEST_ROWS = 17
"""cuBLAS multiplies no fewer rows of integers."""

EXCLUDED = ("norm", "modulation", "gate")
"""Parts of names of layers that read one row a sample: they scale and shift all of its
tokens, so an error of theirs is in every token, and no time is saved.
"""


def refusal(kind: str, device: torch.device) -> str | None:
    """Return why a device has no products of a kind, and the remedy; None: it has."""
    key = "transformer.matmul_dtype"
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip:
        name = "ROCm" if device.type == "cuda" else device.type.upper()
        return f"{key}: {kind} is for NVIDIA's cards and the CPU, and this device is {name}. Leave it out"

    capability = torch.cuda.get_device_capability(device)
    if capability >= CAPABILITIES[kind]:
        return None
    has_integers = capability >= CAPABILITIES["INT_8"]
    remedy = "Set INT_8" if has_integers else "Leave it out"
    needed = ".".join(map(str, CAPABILITIES[kind]))
    present = ".".join(map(str, capability))
    return (
        f"{key}: {torch.cuda.get_device_name(device)} has no products in {kind}: "
        f"they need compute capability {needed}, and it has {present}. {remedy}"
    )


def round_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the rows in eight bits, and the float32 scale of each: (M,N) and (M,1).

    The largest number of a row is the largest that the kind has. Rows that are not
    finite get a scale that is not finite.
    """
    largest = torch.linalg.vector_norm(
        x, float("inf"), dim=1, keepdim=True, dtype=torch.float32
    )
    smallest_scale = torch.finfo(torch.float32).tiny  # for rows of zeros
    scales = (largest / LARGEST[kind]).clamp_min(smallest_scale)

    scaled = x / scales
    if kind == "INT_8":
        scaled = scaled.round()
    return scaled.to(EIGHT_BIT[kind]), scales


def multiply(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = True,
) -> Tensor:
    """Return (scales · a)·(b · scales) in ``dtype``.

    Args:
        a: (M,K) in eight bits, row by row in memory.
        b: (K,N) in the same dtype, column by column in memory.
        a_scales: (M,1) float32.
        b_scales: (1,N) float32.
        dtype: dtype of the result.
        fast: let the card sum FLOAT_8 with fewer bits than float32 has.
    """
    if len(a) == 0:  # an expert without tokens
        return a.new_zeros((0, b.shape[1]), dtype=dtype)

    if a.dtype == torch.int8:
        sums = _multiply_integers(a, b)
        return (sums * a_scales).mul_(b_scales).to(dtype)

    # Kernels that scale rows write bfloat16 only, and torch for Windows has none.
    scales_rows = dtype == torch.bfloat16 and sys.platform != "win32"
    if scales_rows or a.device.type == "cpu":
        return torch._scaled_mm(
            a,
            b,
            scale_a=a_scales,
            scale_b=b_scales,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    one = a_scales.new_ones(())
    sums = torch._scaled_mm(
        a,
        b,
        scale_a=one,
        scale_b=one,
        out_dtype=torch.float32,
        use_fast_accum=fast,
    )
    return sums.mul_(a_scales).mul_(b_scales).to(dtype)


def _multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in int32, which is exact."""
    rows = len(a)
    if rows < FEWEST_ROWS:
        padding = MULTIPLE * 2 - rows
        a = nn.functional.pad(a, (0, 0, 0, padding))
    return torch._int_mm(a, b)[:rows]


class _EightBitMatmul(torch.autograd.Function):
    """Compute x·Wᵀ + bias and g·W as products in eight bits; save the packed weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        packed: Tensor,
        scales: Tensor,
        kind: str,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.kind = kind
        ctx.dtype = dtype

        rows, row_scales = round_rows(x.reshape(-1, x.shape[-1]), kind)
        out = multiply(rows, packed.t(), row_scales, scales.t(), dtype)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], len(packed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        packed, scales = ctx.saved_tensors
        rows = gradient.reshape(-1, len(packed))

        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = _multiply_back(rows, packed, scales, ctx.kind, ctx.dtype)
            x_gradient = x_gradient.view(*gradient.shape[:-1], packed.shape[1])
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[1] else None
        return (x_gradient, bias_gradient, None, None, None, None)


def _multiply_back(
    gradient: Tensor, packed: Tensor, scales: Tensor, kind: str, dtype: torch.dtype
) -> Tensor:
    """Return g·W for gradients (M,out) and a packed weight (out,in)."""
    rows, row_scales = round_rows(gradient * scales.t(), kind)

    # The kernels read the second matrix by columns. A second copy of every weight would
    # take as much memory as bfloat16.
    by_columns = packed.t().contiguous().t()
    ones = scales.new_ones(1, packed.shape[1])
    return multiply(rows, by_columns, row_scales, ones, dtype, fast=False)


class EightBitLinear(QuantizedLinear):
    """A frozen Linear that multiplies in eight bits, forward and backward.

    Its inputs and its result are in ``dtype``.
    """

    def layout(self) -> QuantizedLayout:
        """Return the layout of the weight: its rows in eight bits, and their scales."""
        return {
            "packed": (self.shape, EIGHT_BIT[self.kind]),
            "scales": ((self.out_features, 1), torch.float32),
        }

    def set_weight(self, weight: Tensor, device: torch.device) -> None:
        """Round a weight on its own device and store the result on ``device``."""
        packed, scales = round_rows(weight.detach().float(), self.kind)
        self._set("packed", packed.to(device))
        self._set("scales", scales.to(device))

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in the dtype of the layer's result."""
        packed, scales = self.packed_tensors.values()
        return (packed.float() * scales).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return x·Wᵀ + bias."""
        packed, scales = self.packed_tensors.values()
        return _EightBitMatmul.apply(
            input, self.bias, packed, scales, self.kind, self.dtype
        )


def can_multiply(path: str, linear: nn.Linear) -> bool:
    """Return whether a block's layer can and should multiply in eight bits."""
    name = path.lower()
    if any(part in name for part in EXCLUDED):
        return False
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def multiply_linears(
    net: nn.Module,
    blocks: Sequence[str],
    kind: str,
    dtype: torch.dtype,
    excluded: Collection[str] = (),
) -> dict[str, EightBitLinear]:
    """Replace the Linears inside lists of blocks by layers that multiply in eight bits,
    without weights.

    Args:
        blocks: module paths of the lists of blocks.
        kind: FLOAT_8 or INT_8.
        dtype: the dtype of inputs and results.
        excluded: names of modules, anywhere in a path, that the network's authors keep
            in float32.

    Returns:
        The new layers by their module paths.

    Raises:
        VideotuneError: if no layer can multiply so.
    """
    prefixes = tuple(f"{path}." for path in blocks)
    excluded_names = set(excluded)
    layers = {}

    for path, module in list(net.named_modules()):
        is_in_block = type(module) is nn.Linear and path.startswith(prefixes)
        if not is_in_block or not excluded_names.isdisjoint(path.split(".")):
            continue
        assert isinstance(module, nn.Linear)
        if can_multiply(path, module):
            layers[path] = EightBitLinear(module, kind, dtype)
            net.set_submodule(path, layers[path])

    if not layers:
        raise VideotuneError(
            f"transformer.matmul_dtype: {type(net).__name__} has no layer that multiplies in {kind}: "
            f"rows and columns of its blocks' weights are no multiples of {MULTIPLE}. Leave it out"
        )
    return layers


def matmul_note(net: nn.Module, name: str, kind: str) -> str:
    """Return a note on how many of a network's layers multiply in eight bits."""
    linears = [module for module in net.modules() if isinstance(module, nn.Linear)]
    count = sum(isinstance(module, EightBitLinear) for module in linears)
    return (
        f"{count} of {len(linears)} linear layers of {name} multiply in {kind}, "
        "forward and backward: weights and inputs are rounded to it"
    )
