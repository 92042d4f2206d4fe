"""LoRA's linear layer as one function of autograd, with factors rounded once a pass.

PEFT computes it as seven operations: both factors rounded, three products, a scale and a
sum. Here the sum is part of a matrix product, forward and backward. Registered with
PEFT as a module of its own for linear layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from videotune.memory.quantization import QuantizedLinear, unpack


def use_fused_layers(config: LoraConfig) -> None:
    """Have PEFT build adapters of linear layers as ``FusedLoraLinear``."""
    config._register_custom_module({nn.Linear: FusedLoraLinear})


def round_factors_before_passes(
    net: nn.Module, block_lists: Sequence[str], adapter: str
) -> None:
    """Round an adapter's factors whenever the module that owns their blocks is called.

    That is the network itself, and for blocks of text connectors the connector, which
    runs before the network.
    """
    layers: dict[str, list[FusedLoraLinear]] = {}
    for path in block_lists:
        owned = layers.setdefault(path.rpartition(".")[0], [])
        for module in net.get_submodule(path).modules():
            if isinstance(module, FusedLoraLinear):
                owned.append(module)

    for owner, owned in layers.items():
        hook = _FactorRounding(owned, adapter)
        net.get_submodule(owner).register_forward_pre_hook(hook)


class FusedLoraLinear(LoraLinear):  # type: ignore[misc, unused-ignore]
    """PEFT's layer, which computes the plain case by one function.

    The plain case is one active adapter without dropout over a frozen layer. PEFT's own
    path computes all others: dropout, merged weights, several adapters, products in eight
    bits.
    """

    rounded: tuple[Tensor, Tensor] | None = None
    """A and B in the dtype of the layer, rounded at the beginning of the network's present
    pass.

    None: no pass has begun, or they are in that dtype themselves.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x·Wᵀ + bias + scale · x·Aᵀ·Bᵀ, in the dtype of x."""
        adapter = self._plain_adapter(x)
        if adapter is None or args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output

        factor_a = self.lora_A[adapter].weight
        factor_b = self.lora_B[adapter].weight
        rounded_a, rounded_b = self._rounded_factors(factor_a, factor_b, x.dtype)

        base: nn.Linear = self.base_layer
        packing, stored = _stored_weight(base)
        return _LoraProduct.apply(
            x,
            base.bias,
            factor_a,
            factor_b,
            rounded_a,
            rounded_b,
            self.scaling[adapter],
            packing,
            *stored,
        )

    def _rounded_factors(
        self, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return A and B in the dtype of the layer's input, without a graph."""
        if factor_a.dtype == dtype:
            return factor_a.detach(), factor_b.detach()
        if self.rounded is not None and self.rounded[0].dtype == dtype:
            return self.rounded
        # No pass of the network has begun, or it computes in another dtype.
        return factor_a.detach().to(dtype), factor_b.detach().to(dtype)

    def _plain_adapter(self, x: Tensor) -> str | None:
        """Return the adapter, or None if this is not the plain case."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        adapter = self.active_adapters[0]
        if adapter not in self.lora_A or adapter in self.lora_variant:
            return None
        # In compiled blocks a packed weight is unpacked by an operation of its own.
        if torch.compiler.is_compiling() and isinstance(
            self.base_layer, QuantizedLinear
        ):
            return None

        dropout = self.lora_dropout[adapter]
        drops_out = dropout.training and not isinstance(dropout, nn.Identity)
        if drops_out or self.lora_bias[adapter] or not _is_plain(self.base_layer):
            return None
        computes_in = _dtype_of(self.base_layer)
        autocasts = torch.is_autocast_enabled(x.device.type)
        return None if autocasts or computes_in != x.dtype else adapter


class _FactorRounding:
    """A hook that gives each layer its factors in the dtype in which it computes."""

    def __init__(self, layers: list[FusedLoraLinear], adapter: str) -> None:
        self._layers = layers
        self._adapter = adapter

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        exact: list[Tensor] = []
        rounded: list[Tensor] = []
        for layer in self._layers:
            dtype = _dtype_of(layer.base_layer)
            factors = (
                layer.lora_A[self._adapter].weight,
                layer.lora_B[self._adapter].weight,
            )
            if factors[0].dtype == dtype:
                continue

            # New tensors: a graph of an earlier pass may keep those of that pass.
            copies = tuple(torch.empty_like(x, dtype=dtype) for x in factors)
            layer.rounded = (copies[0], copies[1])
            exact += factors
            rounded += copies

        if exact:
            torch._foreach_copy_(rounded, exact)


Packing = tuple[tuple[str, ...], str, tuple[int, int], torch.dtype]
"""Names of the tensors that store a weight, its kind, shape and dtype."""


def _stored_weight(base: nn.Linear) -> tuple[Packing | None, tuple[Tensor, ...]]:
    """Return how a layer's weight is packed, or None, and the tensors that store it."""
    if not isinstance(base, QuantizedLinear):
        return None, (base.weight,)
    packing = (base.names, base.kind, base.shape, base.dtype)
    return packing, tuple(base.packed_tensors.values())


def _dtype_of(base: nn.Linear) -> torch.dtype:
    """Return the dtype in which a layer computes."""
    return base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype


def _is_plain(base: nn.Linear) -> bool:
    """Return whether a layer is frozen and multiplies by its weight as it is.

    Not by subclasses: a layer may have a product of its own, as in eight bits.
    """
    if type(base) not in (nn.Linear, QuantizedLinear):
        return False
    if base.bias is not None and base.bias.requires_grad:
        return False
    return isinstance(base, QuantizedLinear) or not base.weight.requires_grad


class _LoraProduct(torch.autograd.Function):
    """x·Wᵀ + bias + scale · x·Aᵀ·Bᵀ of a frozen W and rounded A and B.

    The gradients of A and B are those of the exact factors, in their dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        exact_a: Tensor,
        _exact_b: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        packing: Packing | None,
        *stored: Tensor,
    ) -> Tensor:
        x_rows = x.reshape(-1, x.shape[-1])
        x_a = x_rows @ a.t()
        weight = _weight(packing, stored)
        output = nn.functional.linear(x_rows, weight, bias)
        output = _plus_product(output, x_a, b.t(), scale)

        ctx.save_for_backward(x, a, b, x_a, *stored)
        ctx.scale = scale
        ctx.packing = packing
        ctx.factor_dtype = exact_a.dtype
        return output.view(*x.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, x_a, *stored = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        rows_b = rows @ b

        x_gradient = a_gradient = b_gradient = None
        if ctx.needs_input_grad[0]:
            of_base = rows @ _weight(ctx.packing, stored)
            of_rows = _plus_product(of_base, rows_b, a, ctx.scale)
            x_gradient = of_rows.view(x.shape)
        if ctx.needs_input_grad[2]:
            x_rows = x.reshape(-1, x.shape[-1])
            product = _scaled_product(rows_b.t(), x_rows, ctx.scale)
            a_gradient = product.to(ctx.factor_dtype)
        if ctx.needs_input_grad[3]:
            product = _scaled_product(rows.t(), x_a, ctx.scale)
            b_gradient = product.to(ctx.factor_dtype)

        others = [None] * (4 + len(stored))
        return (x_gradient, None, a_gradient, b_gradient, *others)


def _weight(packing: Packing | None, stored: Any) -> Tensor:
    """Return the weight (out, in)."""
    if packing is None:
        weight: Tensor = stored[0]
        return weight
    names, kind, shape, dtype = packing
    tensors: Mapping[str, Tensor] = dict(zip(names, stored, strict=True))
    return unpack(tensors, kind, shape, dtype)


def _plus_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return total + scale · left·right; ``total`` may be overwritten."""
    if torch.compiler.is_compiling():
        return torch.addmm(total, left, right, alpha=scale)
    return total.addmm_(left, right, alpha=scale)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left·right."""
    if scale == 1:
        return left @ right
    if torch.compiler.is_compiling():
        return (left @ right) * scale
    ignored = left.new_empty(())
    return torch.addmm(ignored, left, right, beta=0, alpha=scale)
