"""Quantize frozen weights: a Linear stores packed values and dequantizes in each pass.

- FLOAT_8 (float8_e4m3fn) and INT_8 (integers to ±127): blocks of 128 values, each
  divided by its own float32 scale
- NFLOAT_4: NF4 with doubly quantized scales (Dettmers et al. 2023, arXiv 2305.14314),
  computed by bitsandbytes
- a plain dtype (BFLOAT_16, …): the values rounded to it

Everything stored is a plain frozen tensor, so blocks of such layers can be streamed
like any others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from videotune.console import size as format_size
from videotune.errors import VideotuneError

BLOCK = 128
"""Values that share a scale in FLOAT_8 and INT_8; a block may span two rows."""

NF4_BLOCK = 64
"""Values that share a scale in NFLOAT_4 (the default of bitsandbytes)."""

NF4_SCALES = 256
"""Scales of NFLOAT_4 that share a second-level scale (fixed in bitsandbytes)."""

_PLAIN = {
    "FLOAT_32": torch.float32,
    "BFLOAT_16": torch.bfloat16,
    "FLOAT_16": torch.float16,
}
LARGEST = {"FLOAT_8": 448.0, "INT_8": 127.0}
EIGHT_BIT = {"FLOAT_8": torch.float8_e4m3fn, "INT_8": torch.int8}

Codes = dict[torch.device, Tensor]
"""The 256 values that NFLOAT_4's scales are rounded to, by their first device.

One tensor serves all layers of a network.
"""

QuantizedLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor that stores a weight."""


def form(kind: str, shape: tuple[int, int]) -> QuantizedLayout:
    """Return the layout of a packed weight of this shape.

    The last block is padded with zeros.
    """
    if kind in _PLAIN:
        return {"packed": (shape, _PLAIN[kind])}

    count = shape[0] * shape[1]
    if kind in EIGHT_BIT:
        blocks = -(-count // BLOCK)
        return {
            "packed": ((blocks, BLOCK), EIGHT_BIT[kind]),
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
    """Return the packed tensors of a weight (out, in), by name, on its device."""
    if kind in _PLAIN:
        return {"packed": weight.to(_PLAIN[kind])}

    flat = weight.detach().float().flatten()
    if kind in EIGHT_BIT:
        return _pack_eight_bit(_rows(flat, BLOCK), kind)
    return _pack_nf4(_rows(flat, NF4_BLOCK))


def _rows(flat: Tensor, block_size: int) -> Tensor:
    """Return the values as rows of one block each, padded with zeros."""
    if len(flat) % block_size:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % block_size)])
    return flat.view(-1, block_size)


def _pack_eight_bit(rows: Tensor, kind: str) -> dict[str, Tensor]:
    scales = rows.abs().amax(1, keepdim=True) / LARGEST[kind]
    scaled = rows / torch.where(scales > 0, scales, 1.0)
    if kind == "INT_8":
        scaled = scaled.round()
    return {"packed": scaled.to(EIGHT_BIT[kind]), "scales": scales}


def _pack_nf4(rows: Tensor) -> dict[str, Tensor]:
    packed, state = bitsandbytes().quantize_4bit(
        rows, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    assert state.state2.blocksize == NF4_SCALES
    return {
        "packed": packed,
        "scales": state.absmax,
        "scales_of_scales": state.state2.absmax,
        "offset": state.offset.view(1),
        "code": state.state2.code,
    }


def unpack(
    tensors: Mapping[str, Tensor], kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight (out, in) in ``dtype``.

    Each value is its scale times the stored number, in float32, rounded once.
    """
    if kind in _PLAIN:
        return tensors["packed"].to(dtype)
    if kind in EIGHT_BIT:
        rows = _unpack_eight_bit(tensors, kind, dtype)
    else:
        rows = _unpack_nf4(tensors, dtype)

    count = shape[0] * shape[1]
    flat = rows.view(-1)
    if len(flat) != count:
        flat = flat[:count]
    return flat.view(shape)


def _unpack_eight_bit(
    tensors: Mapping[str, Tensor], kind: str, dtype: torch.dtype
) -> Tensor:
    packed = tensors["packed"]
    rows = torch.empty(packed.shape, dtype=dtype, device=packed.device)

    # torch cannot multiply float8. The cast is exact: eight bits fit any dtype.
    exact = packed if kind == "INT_8" else packed.to(dtype)
    torch.mul(exact, tensors["scales"], out=rows)
    return rows


def _unpack_nf4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    functions = bitsandbytes()

    # The tensors of a streamed block outside its window are one expanded number, but
    # the kernels read contiguous memory.
    solid = {name: tensor.contiguous() for name, tensor in tensors.items()}

    scales_state = functions.QuantState(
        solid["scales_of_scales"],
        blocksize=NF4_SCALES,
        code=solid["code"],
        dtype=torch.float32,
    )
    scales = functions.dequantize_blockwise(solid["scales"], scales_state)
    scales = scales + solid["offset"]

    state = functions.QuantState(
        scales,
        (len(scales), NF4_BLOCK),
        dtype=dtype,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    return functions.dequantize_4bit(solid["packed"], state)


def bitsandbytes() -> Any:
    """Return the functions of bitsandbytes.

    Raises VideotuneError if it is not installed.
    """
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise VideotuneError(
            "weight_dtype: NFLOAT_4 needs bitsandbytes, which is not installed. "
            "Run pip install bitsandbytes, or choose FLOAT_8 or INT_8."
        ) from error
    return functional


class _QuantizedMatmul(torch.autograd.Function):
    """Compute x·Wᵀ + bias; save the packed weight and dequantize it in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        layer: tuple[Any, ...],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.layer = layer
        ctx.names = names
        weight = unpack(dict(zip(names, tensors, strict=True)), *layer)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = unpack(
            dict(zip(ctx.names, ctx.saved_tensors, strict=True)), *ctx.layer
        )

        x_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = None
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.flatten(0, -2).sum(0)
        return (x_gradient, bias_gradient, None, None, *[None] * len(ctx.names))


@torch.library.custom_op("videotune::quantized_product", mutates_args=())
def _quantized_product(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    shape: list[int],
    dtype: torch.dtype,
    tensors: list[Tensor],
    backward: bool,
) -> Tensor:
    """Compute x·Wᵀ + bias in compiled blocks, or x·W if ``backward``.

    The compiler does not look into an operation of its own, so it can neither keep the
    dequantized weight for the backward pass nor stop at functions that it cannot trace.

    Args:
        x: the input, or the gradient of the output.
        bias: None in the backward pass.
        kind: the quantization.
        shape: rows and columns of the weight.
        dtype: dtype of the product.
        tensors: the packed weight, in the order of ``form``.
        backward: whether it is the backward pass's product.
    """
    rows, columns = shape
    names = form(kind, (rows, columns))
    packed = dict(zip(names, tensors, strict=True))
    weight = unpack(packed, kind, (rows, columns), dtype)
    return x @ weight if backward else nn.functional.linear(x, weight, bias)


@_quantized_product.register_fake
def _empty_product(x: Tensor, *arguments: Any) -> Tensor:
    _, _, (rows, columns), dtype, _, backward = arguments
    return x.new_empty((*x.shape[:-1], columns if backward else rows), dtype=dtype)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, kind, shape, dtype, tensors, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.layer = (kind, shape, dtype)


def _gradients_of_product(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x and bias, and None for each further argument."""
    tensors = list(ctx.saved_tensors)
    x_gradient = None
    if ctx.needs_input_grad[0]:
        x_gradient = _quantized_product(
            gradient, None, *ctx.layer, tensors, backward=True
        )
    bias_gradient = None
    if ctx.needs_input_grad[1]:
        bias_gradient = gradient.flatten(0, -2).sum(0)
    return x_gradient, bias_gradient, None, None, None, [None] * len(tensors), None


_quantized_product.register_autograd(_gradients_of_product, setup_context=_save_packed)


class QuantizedLinear(nn.Linear):
    """A frozen Linear with a packed weight that computes in ``dtype``.

    It is an ``nn.Linear`` so that adapters find it. ``weight`` has the shape, dtype and
    device of the weight but is NaN throughout, so that code which reads its values
    fails visibly; ``dequantize`` returns the values.
    """

    def __init__(
        self,
        linear: nn.Linear,
        kind: str,
        dtype: torch.dtype,
        codes: Codes | None = None,
    ) -> None:
        """Create the layer without a weight, on the meta device.

        Args:
            linear: the layer to replace; its bias is shared.
            kind: the quantization, such as INT_8.
            dtype: the dtype in which the layer computes.
            codes: the tables of the network's other layers, to share and extend.
        """
        nn.Module.__init__(self)  # Linear.__init__ would allocate a weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.kind = kind
        self.dtype = dtype
        self.bias = linear.bias
        self._codes = {} if codes is None else codes

        layout = self.layout()
        self.names = tuple(layout)
        for name, (shape, stored_dtype) in layout.items():
            self._set(name, torch.empty(shape, dtype=stored_dtype, device="meta"))

    def layout(self) -> QuantizedLayout:
        """Return the layout of the packed weight."""
        return form(self.kind, self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """NaN in the weight's shape and dtype, on its device."""
        packed = self._parameters["packed"]
        assert packed is not None
        nan = torch.full((1,), float("nan"), dtype=self.dtype, device=packed.device)
        return nan.expand(self.shape)

    @property
    def W_q(self) -> Tensor:
        """The packed weight, under the name by which PEFT finds it."""
        return self.get_parameter("packed")

    def set_weight(self, weight: Tensor, device: torch.device) -> None:
        """Pack a weight on its own device and store the result on ``device``."""
        tensors = pack(weight, self.kind)
        for name, (shape, dtype) in self.layout().items():
            packed = tensors[name]
            assert (tuple(packed.shape), packed.dtype) == (shape, dtype), name

            tensor = packed.to(device)
            if tensor.data_ptr() == weight.data_ptr():
                tensor = tensor.clone()
            self._set(name, tensor)

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in the dtype in which the layer computes."""
        return unpack(self.packed_tensors, self.kind, self.shape, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return x·Wᵀ + bias."""
        if torch.compiler.is_compiling():
            tensors = [getattr(self, name) for name in self.names]
            return _quantized_product(
                input,
                self.bias,
                self.kind,
                list(self.shape),
                self.dtype,
                tensors,
                backward=False,
            )
        layer = (self.kind, self.shape, self.dtype)
        return _QuantizedMatmul.apply(
            input, self.bias, layer, self.names, *self.packed_tensors.values()
        )

    def _set(self, name: str, tensor: Tensor) -> None:
        if name != "code":
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
            return

        # The same constants in every layer. Copied, because bitsandbytes holds on to
        # its tensor and streaming moves this one.
        code = self._codes.setdefault(tensor.device, tensor.clone())
        self.register_buffer(name, code, persistent=False)

    @property
    def packed_tensors(self) -> dict[str, Tensor]:
        """The tensors that store the weight, by name."""
        return {name: getattr(self, name) for name in self.names}


def largest_list(net: nn.Module) -> str:
    """Return the path of the module list with most parameters: a text encoder's blocks.

    An encoder that also reads images may have more, smaller blocks for them.
    """
    counts = {}
    for path, module in net.named_modules():
        if isinstance(module, nn.ModuleList):
            counts[path] = sum(parameter.numel() for parameter in module.parameters())
    return max(counts, key=lambda path: counts[path])


def pack_linears(
    net: nn.Module,
    blocks: Sequence[str],
    kind: str,
    dtype: torch.dtype,
    excluded: Collection[str] = (),
) -> dict[str, QuantizedLinear]:
    """Replace the Linears inside lists of blocks by packed layers without weights.

    Everything else stays: norms, biases, tables, embeddings and the layers before and
    after the blocks.

    Args:
        blocks: module paths of the lists of blocks.
        kind: the quantization, such as INT_8.
        dtype: the dtype in which the layers compute.
        excluded: names of modules, anywhere in a path, that the network's authors keep
            in float32.

    Returns:
        The new layers by their module paths.
    """
    prefixes = tuple(f"{path}." for path in blocks)
    excluded_names = set(excluded)
    layers = {}
    codes = Codes()

    for path, module in list(net.named_modules()):
        is_in_block = type(module) is nn.Linear and path.startswith(prefixes)
        if is_in_block and excluded_names.isdisjoint(path.split(".")):
            assert isinstance(module, nn.Linear)
            layers[path] = QuantizedLinear(module, kind, dtype, codes)
            net.set_submodule(path, layers[path])
    return layers


def packed_note(net: nn.Module, name: str, kind: str) -> str:
    """Return a note on how much of a network is packed and the bytes it takes."""
    layers = [module for module in net.modules() if isinstance(module, QuantizedLinear)]
    packed_ids: set[int] = set()
    for layer in layers:
        packed_ids.update(id(tensor) for tensor in layer.packed_tensors.values())
    unpacked = [
        parameter for parameter in net.parameters() if id(parameter) not in packed_ids
    ]

    packed_count = sum(math.prod(layer.shape) for layer in layers)
    unpacked_count = sum(parameter.numel() for parameter in unpacked)
    share = packed_count / (packed_count + unpacked_count)

    original_bytes = sum(parameter.nbytes for parameter in unpacked)
    for layer in layers:
        original_bytes += math.prod(layer.shape) * layer.dtype.itemsize
    stored_bytes = sum(parameter.nbytes for parameter in net.parameters())

    return (
        f"{share:.0%} of the weights of {name} are stored in {kind}: "
        f"{format_size(stored_bytes)} in place of {format_size(original_bytes)}"
    )


def bytes_a_number(kind: str) -> float:
    """Return the bytes per value of a large packed weight."""
    total = 0
    for name, (shape, dtype) in form(kind, (4096, 4096)).items():
        if name != "code":  # shared by all layers
            total += math.prod(shape) * dtype.itemsize
    return total / 4096**2
