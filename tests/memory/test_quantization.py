"""Packed weights: their numbers, which layers have them, how they are loaded, streamed
and trained over.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from tests.support.tiny_networks import (
    BLOCKS,
    CPU,
    assert_same_bits,
    batch_of,
    deepen,
    rig,
)
from videotune.adapters.adapter_types import PARTS
from videotune.adapters.lora import adapter_off, add_lora, row_norms
from videotune.config.fields import ROUNDED
from videotune.config.sections import Lora
from videotune.memory.quantization import (
    QuantizedLinear,
    bytes_a_number,
    form,
    largest_list,
    pack,
    packed_note,
    unpack,
)
from videotune.models.model_files import weight_files
from videotune.models.registry import find, names
from videotune.types import WeightDtypes

Bases = Callable[..., Path]
SIZES = ((32, 128), (33, 7), (48, 100), (1, 1))
"""Weights that are whole blocks, and some that are not."""


def opened(
    name: str, folder: Path, kind: str | None, dtype: torch.dtype = torch.float32
) -> Any:
    return find(name)(folder, CPU, dtype, WeightDtypes(kind, kind))


@pytest.fixture(scope="module")
def deep(tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan of eight blocks."""
    return deepen(tiny_bases("wan"), tmp_path_factory.mktemp("deep") / "wan")


def dequantised(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        path: layer.dequantize()
        for path, layer in net.named_modules()
        if isinstance(layer, QuantizedLinear)
    }


def plain_with_the_same_numbers(family: Any, packed: nn.Module) -> nn.Module:
    """The family's denoiser with ordinary Linears that hold what the packed ones'
    numbers are.
    """
    net: nn.Module = find(family.spec.name)(family.folder, CPU, family.dtype).denoiser()
    for path, weight in dequantised(packed).items():
        net.get_submodule(path).weight.data = weight
    return net


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["FLOAT_8", "INT_8"])
def test_a_number_is_off_by_half_a_step_at_most(
    kind: str, size: tuple[int, int]
) -> None:
    """Against the block's own scale in float64.

    A step of FLOAT_8 is an eighth of the power of two below, 2^-9 at least.
    """
    torch.manual_seed(1)
    weight = torch.randn(size) * torch.logspace(-6, 3, size[0])[:, None]
    weight[0] = 0
    kept = pack(weight, kind)
    ours = unpack(kept, kind, size, torch.float32).double()
    flat = torch.cat(
        [
            weight.double().flatten(),
            torch.zeros(-weight.numel() % 128, dtype=torch.float64),
        ]
    ).view(-1, 128)
    scale = (
        flat.abs().amax(1, keepdim=True) / (448 if kind == "FLOAT_8" else 127)
    ).expand(flat.shape)
    scaled = flat / torch.where(scale > 0, scale, 1.0)
    powers = (
        torch.floor(torch.log2(scaled.abs().clamp(min=2**-6)))
        if kind == "FLOAT_8"
        else torch.zeros_like(flat)
    )
    half = scale * (2**powers / 16 if kind == "FLOAT_8" else 0.5)
    off = (ours - weight.double()).abs().flatten()
    assert bool((off <= half.flatten()[: len(off)] * (1 + 1e-5)).all())
    assert off.max() > 0 or weight.numel() == 1
    assert torch.equal(ours[0], weight[0].double()), "a block of zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nfloat_4_is_linear4bit_to_the_bit(dtype: torch.dtype) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    torch.manual_seed(2)
    linear = nn.Linear(192, 96)
    theirs = Linear4bit(192, 96, compute_dtype=dtype, quant_type="nf4")
    theirs.weight = Params4bit(
        linear.weight.data.clone(), requires_grad=False, quant_type="nf4"
    )
    theirs.bias = nn.Parameter(linear.bias.data.to(dtype), requires_grad=False)
    theirs = theirs.to("cpu")
    ours = QuantizedLinear(linear, "NFLOAT_4", dtype)
    ours.set_weight(linear.weight, CPU)
    ours.bias = theirs.bias
    state = theirs.weight.quant_state
    assert torch.equal(ours.packed, theirs.weight.data)
    assert torch.equal(ours.scales, state.absmax)
    out, gradients = [], []
    for layer in (theirs, ours):
        x = torch.randn(
            5, 192, dtype=dtype, generator=torch.Generator().manual_seed(3)
        ).requires_grad_()
        out.append(layer(x))
        out[-1].square().sum().backward()
        gradients.append(x.grad)
    if dtype == torch.float32:
        assert torch.equal(*out)
        assert torch.equal(*gradients)
    else:  # theirs rounds to float32 first and then to bf16
        torch.testing.assert_close(*out, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", ROUNDED)
def test_odd_sizes_of_four_bits_are_those_of_whole_blocks(kind: str) -> None:
    torch.manual_seed(3)
    weight = torch.randn(33, 7)
    whole = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 128)).view(
        -1, 128
    )
    ours = unpack(pack(weight, kind), kind, (33, 7), torch.float32).flatten()
    theirs = unpack(pack(whole, kind), kind, (len(whole), 128), torch.float32).flatten()
    torch.testing.assert_close(
        ours, theirs[: len(ours)], rtol=1e-2, atol=1e-2
    )  # scales are rounded beside others
    assert {
        name: (tuple(x.shape), x.dtype) for name, x in pack(weight, kind).items()
    } == form(kind, (33, 7))


def test_bytes_of_a_number() -> None:
    assert bytes_a_number("FLOAT_8") == bytes_a_number("INT_8") == 1 + 4 / 128
    assert bytes_a_number("NFLOAT_4") == pytest.approx(
        0.5 + 1 / 64 + 4 / 64 / 256, rel=1e-4
    )
    assert bytes_a_number("BFLOAT_16") == 2


def test_what_the_backward_pass_keeps_is_packed() -> None:
    linear = nn.Linear(256, 256, bias=False)
    layer, kept = QuantizedLinear(linear, "FLOAT_8", torch.float32), []
    layer.set_weight(linear.weight, CPU)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        layer(torch.randn(1, 256, requires_grad=True))
    assert sum(x.nbytes for x in kept) == 256 * 256 * (1 + 4 / 128)


@pytest.mark.parametrize("name", names())
def test_linears_of_the_blocks_are_packed_and_nothing_else(
    name: str, tiny_bases: Bases
) -> None:
    """The routing of HiDream's experts is no Linear and stays; so do norms, biases,
    tables, embeddings and the way out.
    """
    family, folder = opened(name, tiny_bases(name), "NFLOAT_4"), tiny_bases(name)
    packed, plain = family.denoiser(), opened(name, folder, None).denoiser()
    inside = tuple(f"{path}." for path in family.spec.blocks)
    in_float32 = set(getattr(plain, "_keep_in_fp32_modules", None) or ())
    for path, module in plain.named_modules():
        ours = packed.get_submodule(path)
        is_packed = (
            isinstance(module, nn.Linear)
            and path.startswith(inside)
            and in_float32.isdisjoint(path.split("."))
        )
        assert isinstance(ours, QuantizedLinear) == is_packed, path
    theirs = dict(plain.named_parameters())
    names_ours = {key for key, _ in packed.named_parameters()}
    layers = {
        path
        for path, module in packed.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    for key, value in packed.named_parameters():
        if key.rpartition(".")[0] not in layers or key.endswith(".bias"):
            assert torch.equal(value, theirs[key]), key
            assert value.dtype == theirs[key].dtype
    assert set(theirs) - names_ours == {f"{path}.weight" for path in layers}
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    assert "in place of" in packed_note(packed, "it", "NFLOAT_4")


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_packed_network_is_the_plain_one_with_rounded_numbers(
    kind: str, deep: Path
) -> None:
    """Losses, gradients and weights of two steps, to the bit."""
    family = opened("wan", deep, kind)
    batch = batch_of(family)
    ours = rig(family, None, dropout=0.3)
    net = plain_with_the_same_numbers(family, family.denoiser())
    family.denoiser = lambda expert: net
    assert_same_bits(
        ours.steps(batch, 2), rig(family, None, dropout=0.3).steps(batch, 2)
    )


@pytest.mark.parametrize(("kind", "fraction", "mode"), [
    ("FLOAT_8", 0.5, "OFF"), ("INT_8", 1.0, "ON"), ("NFLOAT_4", 0.75, "CPU_OFFLOADED"), ("BFLOAT_16", 1.0, "CPU_OFFLOADED"),
])  # fmt: skip
def test_streamed_bytes_are_the_resident_ones(
    kind: str, fraction: float, mode: str, deep: Path
) -> None:
    """To the bit, with dropout; what a block leaves in its slot is made NaN."""
    family = opened("wan", deep, kind)
    batch = batch_of(family)
    plain = rig(family, None, dropout=0.3).steps(batch, 2)
    streamed = rig(family, (fraction, mode), dropout=0.3).steps(batch, 2)
    assert_same_bits(plain, streamed)
    there = {
        entry.name: entry.size
        for entries in streamed.streams.host_weights.slots
        for entry in entries
    }
    layers = {
        f"{path}.packed": x
        for path, x in plain.net.named_modules()
        if f"{path}.packed" in there
    }
    assert len(layers) == len(streamed.streams.streamed) * 10
    for name, layer in layers.items():
        (shape, dtype) = form(kind, layer.shape)["packed"]
        assert there[name] == torch.empty(shape, dtype=dtype, device="meta").nbytes, (
            "packed bytes cross, not numbers"
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", names())
def test_every_family_streams_packed_weights(
    name: str, kind: str, tiny_bases: Bases, tmp_path: Path
) -> None:
    family = opened(name, deepen(tiny_bases(name), tmp_path / name), kind)
    batch = batch_of(family)
    plain = rig(family, None, dropout=0.3).steps(batch)
    for fraction in (0.25, 1.0):
        for mode in ("OFF", "ON", "CPU_OFFLOADED"):
            assert_same_bits(
                plain, rig(family, (fraction, mode), dropout=0.3).steps(batch)
            )
    assert len(plain.net.get_submodule(family.spec.blocks[0])) == BLOCKS


@pytest.mark.parametrize("kind", ["FLOAT_8", "NFLOAT_4"])
def test_numbers_do_not_depend_on_the_run_s_dtype(kind: str, deep: Path) -> None:
    """Packed from the file's own numbers; bf16 rounds what is made of them once more."""
    exact, rounded = (
        dequantised(opened("wan", deep, kind, d).denoiser())
        for d in (torch.float32, torch.bfloat16)
    )
    for path, value in exact.items():
        torch.testing.assert_close(value, rounded[path].float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("variant", PARTS)
def test_every_kind_of_adapter_begins_at_the_packed_base_and_learns(
    variant: str, deep: Path
) -> None:
    family = opened("wan", deep, "NFLOAT_4")
    batch, net = batch_of(family), family.denoiser()
    t = torch.full((len(batch),), 0.5)
    with torch.no_grad():
        before = family.predict(net, batch.x0, t, batch)
    layer = net.blocks[0].attn1.to_q
    norms = layer.dequantize().norm(dim=1)
    held = add_lora(net, family.spec, Lora(rank=4, variant=variant), 0)
    assert all(parameter.dtype == torch.float32 for parameter in held.values())
    if variant == "DORA":
        assert torch.equal(row_norms(net.blocks[0].attn1.to_q), norms)
        assert torch.equal(
            held["blocks.0.attn1.to_q.lora_magnitude_vector.weight"], norms
        )
    out = family.predict(net, batch.x0, t, batch)
    torch.testing.assert_close(
        out.detach(),
        before,
        rtol=0,
        atol=0 if variant in ("LORA", "LOHA", "LOKR") else 2e-6,
    )
    out.square().mean().backward()
    assert any(
        p.grad is not None and bool(p.grad.abs().sum() > 0) for p in held.values()
    )
    assert all(
        p.grad is None
        for name, p in net.named_parameters()
        if "packed" in name or "scales" in name
    )
    with torch.no_grad():
        for parameter in held.values():
            parameter.add_(0.05)
        assert not torch.equal(family.predict(net, batch.x0, t, batch), before)
        with adapter_off(net):
            assert torch.equal(family.predict(net, batch.x0, t, batch), before)


@pytest.mark.parametrize(
    ("kind", "streamed", "dtype"),
    [
        ("FLOAT_8", False, torch.bfloat16),
        ("INT_8", True, torch.float32),
        ("NFLOAT_4", False, torch.float32),
    ],
)
def test_a_text_encoder_reads_as_one_with_rounded_numbers(
    kind: str, streamed: bool, dtype: torch.dtype, tiny_bases: Bases
) -> None:
    """Its file is in float32; in bf16 all else is rounded to that, as ever."""
    folder = tiny_bases("wan")
    family, plain = (
        opened("wan", folder, kind, dtype),
        opened("wan", folder, None, dtype),
    )
    if streamed:
        family.stream_text = print
    ours = family.encode_text(["a red circle"])[0]["text"]
    before = plain.encode_text(["a red circle"])[0]["text"]
    encoder = plain.text_parts()["text_encoder"].encoder
    for path, weight in dequantised(
        opened("wan", folder, kind, dtype).part("text_encoder")
    ).items():
        assert path.startswith(f"{largest_list(encoder)}.")
        encoder.get_submodule(path).weight.data = weight
    assert torch.equal(ours, plain.encode_text(["a red circle"])[0]["text"])
    assert not torch.equal(ours, before)
    torch.testing.assert_close(
        ours, before, rtol=0, atol=0.5 * float(before.abs().max())
    )
    assert (
        family.fingerprints()["text_encoder"]
        == f"{plain.fingerprints()['text_encoder']}-{kind}"
    )


def test_an_older_fingerprint_is_still_that_of_plain_weights(tiny_bases: Bases) -> None:
    for name in names():
        plain, folder = opened(name, tiny_bases(name), None), tiny_bases(name)
        assert (
            plain.fingerprints()
            == find(name)(folder, CPU, torch.float32).fingerprints()
        )
        packed = opened(name, folder, "INT_8").fingerprints()
        assert {
            part for part, mark in plain.fingerprints().items() if mark != packed[part]
        } == {"text_encoder"}


def test_shard_by_shard_is_all_at_once(deep: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(deep, tmp_path / "shards")
    shutil.rmtree(folder / "transformer")
    net = WanTransformer3DModel.from_pretrained(deep / "transformer")
    net.save_pretrained(folder / "transformer", max_shard_size="30KB")
    assert len(weight_files(folder / "transformer")) > 3
    one, other = (
        opened("wan", place, "FLOAT_8").denoiser().state_dict()
        for place in (deep, folder)
    )
    assert one.keys() == other.keys()
    assert all(
        torch.equal(value.view(torch.uint8), other[key].view(torch.uint8))
        for key, value in one.items()
    )
    assert not any(value.is_meta for value in other.values())
