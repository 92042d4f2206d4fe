"""Frozen weights in fewer bits: a Linear keeps packed bytes and scales, and makes numbers of them each time it computes.

- FLOAT_8: float8_e4m3fn, and INT_8: whole numbers to ±127, of a block of 128 numbers divided by their own scale in float32
- NFLOAT_4: NF4 with doubly quantised scales (Dettmers et al. 2023, arXiv 2305.14314) by bitsandbytes' own functions
- a plain dtype (BFLOAT_16 …): the numbers rounded to it

All that is kept are plain frozen tensors, so blocks of such layers are streamed like any others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from videotune.console import size
from videotune.errors import VideotuneError

BLOCK = 128
"""Numbers along a row, and on into the next one, that have one scale in FLOAT_8 and INT_8."""

NF4_BLOCK = 64
NF4_SCALES = 256
"""bitsandbytes' own: numbers that have one scale in NFLOAT_4, and scales of these that have one."""

_PLAIN = {"FLOAT_32": torch.float32, "BFLOAT_16": torch.bfloat16, "FLOAT_16": torch.float16}
_LARGEST = {"FLOAT_8": 448.0, "INT_8": 127.0}
_KEPT = {"FLOAT_8": torch.float8_e4m3fn, "INT_8": torch.int8}

Codes = dict[torch.device, Tensor]
"""The 256 numbers that NFLOAT_4's scales are rounded to, one tensor for all layers of a network, by its first device."""

QuantizedLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor that is kept of a weight."""


def form(kind: str, shape: tuple[int, int]) -> QuantizedLayout:
    """What is kept of a weight of this shape. The last block is filled up with zeros."""
    count = shape[0] * shape[1]
    if kind in _PLAIN:
        return {"packed": (shape, _PLAIN[kind])}
    if kind in _KEPT:
        blocks = -(-count // BLOCK)
        return {
            "packed": ((blocks, BLOCK), _KEPT[kind]),
            "scales": ((blocks, 1), torch.float32),
        }
    blocks = -(-count // NF4_BLOCK)
    return {
        "packed": ((blocks * NF4_BLOCK // 2, 1), torch.uint8),
        "scales": ((blocks,), torch.uint8),
        "scales_of_scales": ((-(-blocks // NF4_SCALES),), torch.float32),
        "offset": ((1,), torch.float32),
        "code": ((256,), torch.float32),
    }


def pack(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """What is kept of a weight (out, in), by name, on its device."""
    if kind in _PLAIN:
        return {"packed": weight.to(_PLAIN[kind])}
    flat = weight.detach().float().flatten()
    size = BLOCK if kind in _KEPT else NF4_BLOCK
    if len(flat) % size:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
    rows = flat.view(-1, size)
    if kind not in _KEPT:
        packed, state = bitsandbytes().quantize_4bit(
            rows, blocksize=size, compress_statistics=True, quant_type="nf4"
        )
        assert state.state2.blocksize == NF4_SCALES
        return {
            "packed": packed,
            "scales": state.absmax,
            "scales_of_scales": state.state2.absmax,
            "offset": state.offset.view(1),
            "code": state.state2.code,
        }
    scales = rows.abs().amax(1, keepdim=True) / _LARGEST[kind]
    scaled = rows / torch.where(scales > 0, scales, 1.0)
    return {
        "packed": (scaled.round() if kind == "INT_8" else scaled).to(_KEPT[kind]),
        "scales": scales,
    }


def unpack(
    kept: Mapping[str, Tensor], kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weight (out, in) in ``dtype``: each number is its scale times what was kept, in float32, rounded once."""
    packed = kept["packed"]
    if kind in _PLAIN:
        return packed.to(dtype)
    if kind in _KEPT:
        rows = torch.empty(packed.shape, dtype=dtype, device=packed.device)
        exact = (
            packed if kind == "INT_8" else packed.to(dtype)
        )  # eight bits fit any dtype; torch multiplies no float8
        torch.mul(exact, kept["scales"], out=rows)
    else:
        functions = bitsandbytes()
        # of a streamed block that is away there is one number for all; the kernels read as if all were there
        solid = {name: tensor.contiguous() for name, tensor in kept.items()}
        absmax = solid["scales_of_scales"]
        code = solid["code"]
        inner = functions.QuantState(
            absmax, blocksize=NF4_SCALES, code=code, dtype=torch.float32
        )
        scales = functions.dequantize_blockwise(solid["scales"], inner) + solid["offset"]
        size = (len(scales), NF4_BLOCK)
        state = functions.QuantState(
            scales, size, dtype=dtype, blocksize=NF4_BLOCK, quant_type="nf4"
        )
        rows = functions.dequantize_4bit(solid["packed"], state)
    count = shape[0] * shape[1]
    flat = rows.view(-1)
    return (flat if len(flat) == count else flat[:count]).view(shape)


def bitsandbytes() -> Any:
    """bitsandbytes' functions; VideotuneError where it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise VideotuneError(
            "weight_dtype: NFLOAT_4 is bitsandbytes', which is not here (pip install bitsandbytes); FLOAT_8 and INT_8 "
            "need nothing"
        ) from error
    return functional


class _Product(torch.autograd.Function):
    """x·Wᵀ + bias. What is kept for the backward pass is the packed weight: the numbers are made again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        layer: tuple[Any, ...],
        names: tuple[str, ...],
        *kept: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.layer = layer
        ctx.names = names
        return nn.functional.linear(
            x, unpack(dict(zip(names, kept, strict=True)), *layer), bias
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = unpack(dict(zip(ctx.names, ctx.saved_tensors, strict=True)), *ctx.layer)
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return (to_x, to_bias, None, None, *[None] * len(ctx.names))


class QuantizedLinear(nn.Linear):
    """A frozen Linear whose weight is packed; it computes in ``dtype``.

    It is a ``nn.Linear`` because that is what adapters look for. ``weight`` has the shape, dtype and device of the weight
    and is NaN throughout, so that who wants its numbers finds out; ``dequantize`` gives them.
    """

    def __init__(
        self, linear: nn.Linear, kind: str, dtype: torch.dtype, codes: Codes | None = None
    ) -> None:
        """``codes``: those of the network's layers so far."""
        nn.Module.__init__(self)  # a Linear's own would make a weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.kind = kind
        self.dtype = dtype
        self.bias = linear.bias
        self._codes = {} if codes is None else codes
        shapes = form(kind, self.shape)
        self.names = tuple(shapes)
        for name, (shape, kept) in shapes.items():
            self._keep(name, torch.empty(shape, dtype=kept, device="meta"))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """NaN in the weight's shape and dtype, on its device."""
        packed = self._parameters["packed"]
        assert packed is not None
        return torch.full((1,), float("nan"), dtype=self.dtype, device=packed.device).expand(
            self.shape
        )

    @property
    def W_q(self) -> Tensor:
        """What PEFT looks for in a layer that has a ``dequantize``."""
        return self.get_parameter("packed")

    def set_weight(self, weight: Tensor, device: torch.device) -> None:
        """Pack a weight where it is, and keep it on ``device``."""
        made = pack(weight, self.kind)
        for name, (shape, dtype) in form(self.kind, self.shape).items():
            assert (tuple(made[name].shape), made[name].dtype) == (shape, dtype), name
            there = made[name].to(device)
            self._keep(name, there.clone() if there.data_ptr() == weight.data_ptr() else there)

    def dequantize(self) -> Tensor:
        """The weight (out, in) in the dtype in which the layer computes."""
        return unpack(self.kept, self.kind, self.shape, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """x·Wᵀ + bias."""
        layer = (self.kind, self.shape, self.dtype)
        return _Product.apply(input, self.bias, layer, self.names, *self.kept.values())

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name == "code":  # the same constants in every layer
            # a copy: bitsandbytes keeps its own, and streaming moves this one
            self.register_buffer(
                name, self._codes.setdefault(tensor.device, tensor.clone()), persistent=False
            )
        else:
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def kept(self) -> dict[str, Tensor]:
        """The tensors that are kept of the weight, by name."""
        return {name: getattr(self, name) for name in self.names}


def longest_list(net: nn.Module) -> str:
    """The path of a network's longest list of modules: a text encoder's blocks."""
    lists = {
        path: module
        for path, module in net.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    return max(lists, key=lambda path: len(lists[path]))


def pack_linears(
    net: nn.Module,
    blocks: Sequence[str],
    kind: str,
    dtype: torch.dtype,
    kept: Collection[str] = (),
) -> dict[str, QuantizedLinear]:
    """Put packed layers in the place of the Linears inside lists of blocks, without weights yet; they, by their paths.

    All else stays as it is: norms, biases, tables, embeddings, the layers before and after the blocks, and modules of which
    a part of the path is in ``kept``, which the network's authors keep in float32.
    """
    inside = tuple(f"{path}." for path in blocks)
    found = {}
    codes = Codes()
    for path, module in list(net.named_modules()):
        if (
            type(module) is nn.Linear
            and path.startswith(inside)
            and set(kept).isdisjoint(path.split("."))
        ):
            found[path] = QuantizedLinear(module, kind, dtype, codes)
            net.set_submodule(path, found[path])
    return found


def packed_note(net: nn.Module, what: str, kind: str) -> str:
    """How much of a network is packed, in words."""
    layers = [module for module in net.modules() if isinstance(module, QuantizedLinear)]
    own = {id(tensor) for layer in layers for tensor in layer.kept.values()}
    others = [parameter for parameter in net.parameters() if id(parameter) not in own]
    packed = sum(math.prod(layer.shape) for layer in layers)
    rest = sum(parameter.nbytes for parameter in others)
    plain = rest + sum(math.prod(layer.shape) * layer.dtype.itemsize for layer in layers)
    there = sum(parameter.nbytes for parameter in net.parameters())
    share = packed / (packed + sum(parameter.numel() for parameter in others))
    return f"{share:.0%} of the weights of {what} are kept in {kind}: {size(there)} in place of {size(plain)}"


def bytes_a_number(kind: str) -> float:
    """Bytes that a number of a large weight takes."""
    parts = form(kind, (4096, 4096)).items()
    return (
        sum(
            math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in parts
            if name != "code"
        )
        / 4096**2
    )
