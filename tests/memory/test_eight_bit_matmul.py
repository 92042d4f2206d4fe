"""Products in eight bits: against float64, which layers have them, how they stream, and
which cards have them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_networks import (
    CPU,
    assert_same_bits,
    batch_of,
    deepen,
    rig,
)
from videotune.adapters.adapter_types import PARTS
from videotune.adapters.lora import add_lora
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.memory.eight_bit_matmul import (
    LARGEST,
    EightBitLinear,
    can_multiply,
    matmul_note,
    refusal,
    round_rows,
)
from videotune.memory.quantization import QuantizedLinear
from videotune.models.registry import find
from videotune.types import WeightDtypes

Bases = Callable[..., Path]
KINDS = tuple(LARGEST)


def opened(folder: Path, kind: str | None, packed: str | None = None) -> Any:
    return find("wan")(folder, CPU, torch.float32, WeightDtypes(packed, matmul=kind))


@pytest.fixture(scope="module")
def wide(tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan of four blocks whose widths are multiples of 16."""
    folder = tmp_path_factory.mktemp("wide") / "wan"
    return deepen(tiny_bases("wan"), folder, 4, attention_head_dim=16, ffn_dim=64)


def layer_of(kind: str, dtype: torch.dtype = torch.float32) -> EightBitLinear:
    torch.manual_seed(1)
    linear = nn.Linear(96, 48).requires_grad_(False)
    linear.weight.mul_(torch.logspace(-3, 2, 48)[:, None])
    weight = linear.weight.clone()
    layer = EightBitLinear(linear.to(dtype), kind, dtype)
    layer.set_weight(weight, CPU)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_off_by_half_a_step_of_its_row(kind: str) -> None:
    """A step of FLOAT_8 is an eighth of the power of two below, 2^-9 at least."""
    torch.manual_seed(2)
    rows = torch.randn(40, 96) * torch.logspace(-30, 30, 40)[:, None]
    rows[0] = 0
    packed, scales = round_rows(rows, kind)

    scaled = rows.double() / scales.double()
    powers = torch.zeros_like(scaled)
    if kind == "FLOAT_8":
        powers = torch.floor(torch.log2(scaled.abs().clamp(min=2**-6)))
    half = 2**powers / 16 if kind == "FLOAT_8" else torch.full_like(scaled, 0.5)
    assert bool(((packed.double() - scaled).abs() <= half * (1 + 1e-5)).all())
    assert not packed[0].float().any()
    assert packed.float().abs().amax(1)[1:].eq(LARGEST[kind]).all()


@pytest.mark.parametrize("rows", [0, 1, 17, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_rounded_numbers(kind: str, rows: int) -> None:
    """Forward x·Wᵀ + bias, backward g·W, each with its rounding, in float64."""
    layer = layer_of(kind)
    x = torch.randn(2, rows, 96, requires_grad=True)
    out = layer(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)

    packed, scales = round_rows(x.detach().flatten(0, 1), kind)
    weight = layer.packed.double() * layer.scales.double()
    truth = packed.double() * scales.double() @ weight.T + layer.bias.double()
    torch.testing.assert_close(out.flatten(0, 1).double(), truth, rtol=1e-5, atol=1e-5)

    # the weight's scales go to the gradient before it is rounded
    scaled = gradient.flatten(0, 1) * layer.scales.T
    packed, scales = round_rows(scaled, kind)
    truth = packed.double() * scales.double() @ layer.packed.double()
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad.flatten(0, 1).double(), truth, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_near_those_of_the_plain_layer(kind: str) -> None:
    """Output and gradient, in bfloat16 too."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer_of(kind, dtype)
        weight = layer.dequantize().double()
        x = torch.randn(64, 96).to(dtype).requires_grad_()
        out = layer(x)
        assert out.dtype == dtype
        gradient = torch.randn_like(out)
        out.backward(gradient)
        assert x.grad is not None
        pairs = {
            "out": (out, x.double() @ weight.T + layer.bias.double()),
            "gradient": (x.grad, gradient.double() @ weight),
        }
        for name, (value, truth) in pairs.items():
            error = (value.double() - truth).norm() / truth.norm()
            assert error < (0.05 if kind == "FLOAT_8" else 0.02), (name, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kind: str, bad: float) -> None:
    """So that the step is skipped: integers alone have no such number."""
    x = torch.randn(20, 96)
    x[3, 5] = bad
    out = layer_of(kind)(x)
    assert not torch.isfinite(out[3]).any()
    assert torch.isfinite(out[4]).all()


def test_a_gradient_of_the_bias_is_the_sum(wide: Path) -> None:
    layer = layer_of("INT_8")
    layer.bias.requires_grad_()
    layer(torch.randn(3, 4, 96)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((48,), 12.0))


def test_what_the_backward_pass_keeps_is_the_packed_weight() -> None:
    kept: list[torch.Tensor] = []
    layer = layer_of("FLOAT_8")
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        layer(torch.randn(20, 96, requires_grad=True))
    assert sum(x.nbytes for x in kept) == 96 * 48 + 4 * 48


def test_modulation_and_odd_sizes_stay_as_they_are() -> None:
    linear = nn.Linear(64, 64)
    assert can_multiply("blocks.0.attn1.to_q", linear)
    assert can_multiply("blocks.0.ff.net.0.proj", nn.Linear(64, 256))
    for path in ("norm1.linear", "adaLN_modulation.1", "attn1.to_gate_logits"):
        assert not can_multiply(f"blocks.0.{path}", linear)
    assert not can_multiply("blocks.0.attn1.to_q", nn.Linear(64, 24))
    assert not can_multiply("blocks.0.attn1.to_q", nn.Linear(24, 64))


@pytest.mark.parametrize("packed", [None, "INT_8"])
def test_layers_of_the_blocks_multiply_and_no_others(
    packed: str | None, wide: Path
) -> None:
    """Layers that cannot are stored as ``weight_dtype`` says."""
    net = opened(wide, "INT_8", packed).denoiser()
    layers = {
        path
        for path, module in net.named_modules()
        if isinstance(module, EightBitLinear)
    }
    assert len(layers) == 4 * 10
    assert all(path.startswith("blocks.") for path in layers)
    others = [
        module
        for module in net.modules()
        if isinstance(module, QuantizedLinear) and type(module) is QuantizedLinear
    ]
    assert not others, "all of Wan's layers in blocks multiply"
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert matmul_note(net, "it", "INT_8").startswith("40 of ")


def test_a_model_without_such_layers_is_refused(tiny_bases: Bases) -> None:
    with pytest.raises(VideotuneError, match="no layer that multiplies in INT_8"):
        opened(tiny_bases("wan"), "INT_8").denoiser()


@pytest.mark.parametrize(
    ("kind", "fraction", "mode"), [("FLOAT_8", 0.5, "OFF"), ("INT_8", 1.0, "ON")]
)
def test_streamed_is_resident_to_the_bit(
    kind: str, fraction: float, mode: str, wide: Path
) -> None:
    """With dropout; what a block leaves in its slot is made NaN."""
    family = opened(wide, kind)
    batch = batch_of(family)
    plain = rig(family, None, dropout=0.3).steps(batch, 2)
    streamed = rig(family, (fraction, mode), dropout=0.3).steps(batch, 2)
    assert_same_bits(plain, streamed)


@pytest.mark.parametrize("variant", PARTS)
def test_every_kind_of_adapter_learns(variant: str, wide: Path) -> None:
    family = opened(wide, "INT_8")
    batch, net = batch_of(family), family.denoiser()
    t = torch.full((len(batch),), 0.5)
    with torch.no_grad():
        before = family.predict(net, batch.x0, t, batch)

    parameters = add_lora(net, family.spec, Lora(rank=4, variant=variant), 0)
    out = family.predict(net, batch.x0, t, batch)
    # an adapter that rotates inputs rounds them anew
    torch.testing.assert_close(
        out.detach(), before, rtol=0, atol=0.05 * float(before.abs().max())
    )
    out.square().mean().backward()
    gradients = [parameter.grad for parameter in parameters.values()]
    assert any(
        gradient is not None and bool(gradient.abs().sum() > 0)
        for gradient in gradients
    )


def test_a_card_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with the remedy; the CPU has both kinds."""
    card = torch.device("cuda", 0)
    capability = {"of": (8, 6)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability["of"]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")

    assert refusal("INT_8", card) is None
    message = refusal("FLOAT_8", card)
    assert message is not None
    assert "a card has no products in FLOAT_8" in message
    assert "8.9, and it has 8.6. Set INT_8" in message

    capability["of"] = (7, 0)
    message = refusal("INT_8", card)
    assert message is not None
    assert message.endswith("it has 7.0. Leave it out")
    capability["of"] = (9, 0)
    for kind in KINDS:
        assert refusal(kind, card) is None
        assert refusal(kind, CPU) is None
        assert "this device is MPS" in (refusal(kind, torch.device("mps")) or "")
