"""LoRA's kin: each kind begins as the base, does what its definition says, and is
shared, switched off and counted alike.

And what patterns name: modules that an adapter is put into.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.support.run_results import updates
from videotune.adapters.adapter_types import (
    PARTS,
    by_module,
    kind_of,
    parse_param_name,
    side_of,
)
from videotune.adapters.effect import change, new_weight, rotations
from videotune.adapters.lora import (
    adapter_off,
    add_lora,
    bind_parameters,
    inject,
    lora_parameters,
    matching,
)
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.exporter.adapter_modules import AdapterModule
from videotune.exporter.lora_write import peft_settings

Open = Callable[..., Any]
KINDS = pytest.mark.parametrize("kind", PARTS)


def settings(kind: str, rank: int = 4, **more: Any) -> Lora:
    return Lora(
        rank=rank,
        alpha=None if kind == "OFT" else 1.5 * rank,
        targets="linear",
        variant=kind,
        **more,
    )


def forward(family: Any, net: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, text = (
        torch.randn(shape, generator=generator).to(family.dtype)
        for shape in ((1, 4, 2, 4, 4), (1, 8, 16))
    )
    with torch.no_grad():
        return net(
            hidden_states=x,
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=text,
            return_dict=False,
        )[0]


def shaken(state: dict[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """As after a training: every number moved."""
    for index, parameter in enumerate(state.values()):
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(index)
        )
    return state


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_begins_as_the_base_model_exactly(
    kind: str, dtype: torch.dtype, tiny_family: Open
) -> None:
    family = tiny_family("wan", dtype)
    net = family.denoiser()
    state = add_lora(net, family.spec, settings(kind), seed=0)
    assert torch.equal(forward(family, net), forward(family, family.denoiser()))
    assert {parameter.dtype for parameter in state.values()} == {torch.float32}
    assert {
        parameter for parameter in net.parameters() if parameter.requires_grad
    } == set(state.values())
    assert type(net) is type(family.denoiser()), "no wrapper around it"


@KINDS
def test_each_kind_does_what_its_definition_says(kind: str, tiny_family: Open) -> None:
    """Against a model whose weights were changed as ``new_weight`` says."""
    family = tiny_family("wan")
    net, merged = family.denoiser(), family.denoiser()
    scale = settings(kind).scale
    state = shaken(add_lora(net, family.spec, settings(kind), seed=0))
    for path, parts in by_module(state).items():
        weight = merged.get_submodule(path).weight
        weight.data = new_weight(weight, parts, scale).float()
    torch.testing.assert_close(
        forward(family, net), forward(family, merged), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(
        forward(family, net), forward(family, family.denoiser()), atol=1e-3
    )


@KINDS
def test_off_it_is_the_base_and_on_again_as_before(
    kind: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    net = family.denoiser()
    state = shaken(add_lora(net, family.spec, settings(kind), seed=0))
    on = forward(family, net)
    with adapter_off(net):
        assert torch.equal(forward(family, net), forward(family, family.denoiser()))
    assert torch.equal(forward(family, net), on)
    assert all(parameter.requires_grad for parameter in state.values())
    other = family.denoiser()
    add_lora(other, family.spec, settings(kind), seed=9)
    bind_parameters(other, state)
    assert all(
        lora_parameters(other)[name] is parameter for name, parameter in state.items()
    )
    assert torch.equal(forward(family, other), on), (
        "another network computes with the same parameters"
    )


@KINDS
def test_the_start_belongs_to_the_names_and_the_seed(
    kind: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    few = Lora(rank=4, alpha=None, targets=["attn1.to_q"], variant=kind)
    one = add_lora(family.denoiser(), family.spec, few, seed=3)
    torch.rand(10)
    many, other = (
        add_lora(family.denoiser(), family.spec, settings(kind), seed=seed)
        for seed in (3, 4)
    )
    assert set(one) < set(many)
    assert all(torch.equal(value, many[name]) for name, value in one.items())
    differs = {
        parse_param_name(name)[1]
        for name in many
        if not torch.equal(many[name], other[name])
    }  # type: ignore[index]
    drawn = {
        "LORA": {"lora_A"},
        "DORA": {"lora_A"},
        "LOHA": {"hada_w1_a", "hada_w1_b", "hada_w2_a"},
    }
    assert differs == drawn.get(kind, {"lokr_w2", "lokr_w2_a", "lokr_w2_b"} & differs)
    assert (kind == "OFT") == (not differs)


def rank_of_settings(state: dict[str, Any]) -> int:
    """The rank in PEFT's settings that belong to an adapter's shapes; of OFT the side
    of its rotations.
    """
    found = peft_settings(
        {
            path: AdapterModule(path, (path,), dict(parts))
            for path, parts in by_module(state).items()
        }
    )
    return int(found.r or found.oft_block_size)


@KINDS
def test_names_and_shapes_tell_the_kind_and_the_rank(
    kind: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    assert kind_of(["blocks.0.attn1.to_q.weight"]) is None
    for rank in (2, 4, 8):
        state = add_lora(family.denoiser(), family.spec, settings(kind, rank), seed=0)
        assert kind_of(state) == kind
        assert not any("default" in name for name in state), "an adapter's name"
        assert {place[0] for name in state if (place := parse_param_name(name))} == set(
            by_module(state)
        )
        assert set(updates(shaken(state), 1.0)) >= set(by_module(state))
        again = inject(
            family.denoiser(), family.spec, settings(kind, rank_of_settings(state))
        )
        assert {name: value.shape for name, value in again.items()} == {
            name: v.shape for name, v in state.items()
        }


def test_what_rank_means(tiny_family: Open) -> None:
    """LoHa's update has up to rank² dimensions, LoKr's larger factor rank, OFT turns
    rank inputs together.
    """
    family = tiny_family("wan")

    def of(kind: str, rank: int) -> dict[str, torch.Tensor]:
        state = add_lora(
            family.denoiser(), family.spec, Lora(rank=rank, variant=kind), seed=0
        )
        return by_module(shaken(state))["blocks.0.attn1.to_q"]

    loha, lokr, oft = of("LOHA", 3), of("LOKR", 2), of("OFT", 6)
    assert torch.linalg.matrix_rank(change(loha, 1.0)) == 9
    assert set(lokr) == {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}
    assert torch.linalg.matrix_rank(lokr["lokr_w2_a"] @ lokr["lokr_w2_b"]) == 2
    assert set(of("LOKR", 3)) == {"lokr_w1", "lokr_w2"}, (
        "from half its side up the factor is whole"
    )
    assert oft["oft_R"].shape == (24 // 6, 6 * 5 // 2)
    assert change(oft, 1.0).shape == (4, 6, 6)


def test_rotations_keep_lengths_to_the_fourth_order() -> None:
    numbers = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for size, tolerance in ((0.01, 1e-6), (0.1, 1e-2)):
        turned = rotations(size * numbers)
        own = torch.eye(4).double().expand(3, 4, 4)
        torch.testing.assert_close(
            turned @ turned.transpose(1, 2), own, rtol=0, atol=tolerance
        )
    assert side_of(6) == 4
    with pytest.raises(VideotuneError, match="no rotation has 7 numbers"):
        side_of(7)


def test_a_rotation_of_two_inputs_is_the_series_in_float64() -> None:
    """With Q = [[0, q], [-q, 0]]: Q² = -q², so R = (1 - 2 q² + q⁴) + (2 - 2 q²) Q."""
    numbers = torch.tensor([[0.1], [-0.3]])
    q = numbers.double()[:, 0]
    diagonal = 1 - 2 * q**2 + q**4
    beside = (2 - 2 * q**2) * q
    expected = torch.stack(
        [
            torch.stack([diagonal, beside], dim=1),
            torch.stack([-beside, diagonal], dim=1),
        ],
        dim=1,
    )
    torch.testing.assert_close(rotations(numbers), expected, rtol=0, atol=1e-15)


def test_effects_are_computed_on_the_cpu_wherever_the_adapter_is() -> None:
    with FakeTensorMode():
        parts = {
            "lora_A": torch.empty(2, 3, device="cuda"),
            "lora_B": torch.empty(4, 2, device="cuda"),
        }
        assert change(parts, 1.0).device.type == "cpu"


def test_rotations_that_do_not_cover_the_inputs_are_refused(tiny_family: Open) -> None:
    """PEFT would take another size with a warning."""
    family = tiny_family("wan")
    with pytest.raises(
        VideotuneError,
        match=r"OFT turns 5 inputs at a time, and blocks\.0.* has 24; take one of .*6",
    ):
        inject(family.denoiser(), family.spec, Lora(rank=5, variant="OFT"))


@pytest.mark.parametrize("kind", ["LORA", "DORA", "LOHA", "LOKR"])
def test_dropout_is_on_while_training_alone_and_keeps_the_mean(
    kind: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    net = family.denoiser()
    shaken(add_lora(net, family.spec, settings(kind, dropout=0.5), seed=0))
    layer = net.get_submodule("blocks.0.attn1.to_q")
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    base, plain = layer.base_layer(x), layer.eval()(x)
    layer.train()
    torch.manual_seed(0)
    first = layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first), "the draws are those of the seed"
    mean = torch.stack([layer(x) for _ in range(3000)]).mean(dim=0)
    assert not torch.allclose(first, plain)
    if kind in ("LORA", "LOHA", "LOKR"):
        torch.testing.assert_close(mean - base, plain - base, rtol=0.2, atol=0.05)
    assert torch.equal(layer.eval()(x), plain)


def test_targets(tiny_family: Open) -> None:
    family = tiny_family("wan")
    net = family.skeleton()
    assert len(matching(net, family.spec, "attention")) == 2 * 2 * 4
    assert len(matching(net, family.spec, "linear")) == 2 * (2 * 4 + 2)
    assert matching(net, family.spec, ["attn2.to_k"]) == [
        "blocks.0.attn2.to_k",
        "blocks.1.attn2.to_k",
    ]
    assert matching(net, family.spec, [r"blocks\.1\..*\.to_q"]) == [
        "blocks.1.attn1.to_q",
        "blocks.1.attn2.to_q",
    ]


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (
            ["attn2.to_w"],
            "matches no Linear module of the blocks, such as blocks.0.attn1.to_q",
        ),
        (["proj_out"], "matches no"),
        (["attn(("], "not a valid pattern"),
    ],
)
def test_targets_that_hit_nothing_are_errors(
    targets: Any, words: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    with pytest.raises(VideotuneError, match=r"lora\.targets") as caught:
        matching(family.skeleton(), family.spec, targets)
    assert words in str(caught.value)
