"""LoRA's layer as one function: the numbers of PEFT's own path, in fewer operations."""

from collections import Counter
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from videotune.adapters.fused_lora import (
    FusedLoraLinear,
    round_factors_before_passes,
    use_fused_layers,
)
from videotune.adapters.lora import ADAPTER, multiply_in_input_dtype
from videotune.memory.quantization import pack_linears

SIZES = (48, 40, 24)
PATHS = ["blocks.0", "blocks.1"]


class Net(nn.Module):
    """Two linear layers as blocks, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Linear(*SIZES[:2]), nn.Linear(*SIZES[1:], bias=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def adapted(
    dtype: torch.dtype = torch.float32,
    scale: float = 0.5,
    dropout: float = 0.0,
    kind: str | None = None,
) -> Any:
    """The network with an adapter that does something; ``kind`` packs its weights."""
    torch.manual_seed(0)
    net = Net().to(dtype).requires_grad_(False)
    if kind is not None:
        weights = {path: net.get_submodule(path).weight for path in PATHS}
        for path, layer in pack_linears(net, ["blocks"], kind, dtype).items():
            layer.set_weight(weights[path], torch.device("cpu"))

    config = peft.LoraConfig(
        r=4, lora_alpha=4 * scale, lora_dropout=dropout, target_modules=PATHS
    )
    use_fused_layers(config)
    peft.inject_adapter_in_model(config, net, ADAPTER)
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.3
    multiply_in_input_dtype(net, PATHS)
    round_factors_before_passes(net, ["blocks"], ADAPTER)
    return net


def factors(net: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if "lora_" in name]


def inputs(dtype: torch.dtype) -> Tensor:
    """Rows (B,L,in) that are not in order in memory."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 2, SIZES[0], generator=generator)
    return x.to(dtype).transpose(0, 1).requires_grad_()


def measured(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of all factors."""
    output = net(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
    (output * weights.view(output.shape)).sum().backward()
    gradients = [x.grad, *(p.grad for p in factors(net))]
    return [output.detach(), *(g for g in gradients if g is not None)]


@pytest.fixture
def by_peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let PEFT's own path compute everything."""

    def switch() -> None:
        monkeypatch.setattr(FusedLoraLinear, "_plain_adapter", lambda self, x: None)

    return switch


@pytest.mark.parametrize("kind", [None, "INT_8"])
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_in_float32_numbers_are_pefts(
    scale: float, kind: str | None, by_peft: Any
) -> None:
    fused = measured(adapted(scale=scale, kind=kind), inputs(torch.float32))
    by_peft()
    plain = measured(adapted(scale=scale, kind=kind), inputs(torch.float32))
    assert len(fused) == 6
    for value, wanted in zip(fused, plain, strict=True):
        assert (value - wanted).norm() <= 1e-6 * wanted.norm()


def test_in_bf16_numbers_are_as_near_to_exact_ones_as_pefts(by_peft: Any) -> None:
    exact_inputs = inputs(torch.bfloat16).detach().double().requires_grad_()
    exact = measured(adapted(torch.bfloat16).double(), exact_inputs)
    fused = measured(adapted(torch.bfloat16), inputs(torch.bfloat16))
    by_peft()
    plain = measured(adapted(torch.bfloat16), inputs(torch.bfloat16))
    assert fused[2].dtype == torch.float32
    for value, other, wanted in zip(fused, plain, exact, strict=True):
        error = (value.double() - wanted).norm()
        assert error <= 1.1 * (other.double() - wanted).norm()


@pytest.mark.parametrize("kind", ["INT_8", "BFLOAT_16"])
def test_packed_weights_give_the_bits_of_the_same_weights(kind: str) -> None:
    packed = adapted(kind=kind)
    plain = adapted()
    for path in PATHS:
        weight = packed.get_submodule(path).base_layer.dequantize()
        plain.get_submodule(path).base_layer.weight.data = weight
    pairs = zip(
        measured(packed, inputs(torch.float32)),
        measured(plain, inputs(torch.float32)),
        strict=True,
    )
    assert all(torch.equal(value, wanted) for value, wanted in pairs)


class Operations(TorchDispatchMode):
    """Counts operations by name, but for views and allocations."""

    FREE = (
        "view",
        "t",
        "detach",
        "empty_like",
        "new_empty",
        "_unsafe_view",
        "transpose",
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if name not in self.FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_operations_of_a_layer() -> None:
    """Three forward, five and two casts backward; factors are rounded together."""
    net = adapted(torch.bfloat16)
    x = torch.randn(6, SIZES[0], dtype=torch.bfloat16, requires_grad=True)
    with Operations() as forward:
        output = net(x)
    assert forward.counts == {"_foreach_copy_": 1, "mm": 3, "addmm": 1, "addmm_": 2}
    gradient = torch.ones_like(output)
    with Operations() as backward:
        output.backward(gradient)
    assert backward.counts == {"mm": 4, "addmm": 4, "addmm_": 2, "_to_copy": 4}


def test_factors_are_rounded_anew_in_each_pass() -> None:
    """Also if they were changed behind autograd's back; a graph of the pass before keeps
    its own.
    """
    net = adapted(torch.bfloat16)
    x = torch.randn(6, SIZES[0], dtype=torch.bfloat16)
    before = net(x)
    for parameter in factors(net):
        parameter.data.mul_(2)
    after = net(x)
    assert not torch.equal(before, after)
    for layer in net.blocks:
        layer.rounded = None
    assert torch.equal(Net.forward(net, x), after)
    before.sum().backward()


def test_all_but_the_plain_case_is_pefts() -> None:
    x = torch.randn(6, SIZES[0])
    layer = adapted(dropout=0.5).blocks[0]
    assert layer.train()._plain_adapter(x) is None
    assert layer.eval()._plain_adapter(x) == ADAPTER
    with torch.autocast("cpu"):
        assert layer._plain_adapter(x) is None
    assert layer._plain_adapter(x.double()) is None
    wanted = layer(x)

    layer.merge()
    assert layer._plain_adapter(x) is None
    torch.testing.assert_close(layer(x), wanted)
    layer.unmerge()

    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    layer.base_layer.weight.requires_grad_()
    assert layer._plain_adapter(x) is None

    class OwnProduct(nn.Linear):
        """A layer that may compute otherwise."""

    other = adapted().blocks[0]
    other.base_layer.__class__ = OwnProduct
    assert other._plain_adapter(x) is None

    with_bias = adapted().blocks[0]
    with_bias.base_layer.bias.requires_grad_()
    assert with_bias._plain_adapter(x) is None

    packed = adapted(kind="INT_8").blocks[0]
    assert packed._plain_adapter(x) == ADAPTER


def test_a_layer_without_the_active_adapter_is_its_base() -> None:
    layer = adapted().blocks[0]
    x = torch.randn(6, SIZES[0])
    layer.set_adapter("other")
    assert torch.equal(layer(x), layer.base_layer(x))


def test_arguments_beside_the_input_are_pefts() -> None:
    """Names of adapters sample by sample, and what the base layer does not take."""
    layer = adapted().eval().blocks[0]
    x = torch.randn(2, SIZES[0])
    base, changed = layer.base_layer(x), layer(x)
    mixed = layer(x, adapter_names=["__base__", ADAPTER])
    torch.testing.assert_close(mixed, torch.stack([base[0], changed[1]]))
    with pytest.raises(TypeError):
        layer(x, x)


def test_no_gradient_depends_on_memory_that_was_not_written() -> None:
    """PyTorch fills such memory with NaN for this test."""
    torch.use_deterministic_algorithms(True)
    try:
        values = measured(adapted(scale=0.5), inputs(torch.float32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(value.isfinite().all()) for value in values)


def test_with_dropout_factors_multiply_in_the_dtype_of_the_network() -> None:
    layer = adapted(torch.bfloat16, dropout=0.5).train().blocks[0]
    dtypes = []
    layer.lora_A[ADAPTER].register_forward_hook(
        lambda _, args, output: dtypes.append((args[0].dtype, output.dtype))
    )
    layer(torch.randn(6, SIZES[0], dtype=torch.bfloat16))
    assert dtypes == [(torch.bfloat16, torch.bfloat16)]


def test_layers_of_a_network_of_two_dtypes_have_factors_in_their_own() -> None:
    net = adapted(torch.bfloat16)
    net.blocks[0].base_layer.float()
    net.forward = lambda x: x
    net(torch.zeros(1))
    exact, rounded = net.blocks
    assert exact.rounded is None
    assert [factor.dtype for factor in rounded.rounded] == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_compiles_into_one_graph(dtype: torch.dtype) -> None:
    """And no later step compiles again."""
    torch._dynamo.reset()
    wanted = measured(adapted(dtype), inputs(dtype))
    net = adapted(dtype)
    for block in net.blocks:
        block.forward = torch.compile(
            block.forward, fullgraph=True, backend="aot_eager"
        )
    values = measured(net, inputs(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for value, expected in zip(values, wanted, strict=True):
        assert (value - expected).norm() <= tolerance * expected.norm()

    with torch.no_grad():
        for parameter in factors(net):
            parameter.mul_(1.5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        measured(net, inputs(dtype))
