"""LoRA: what is injected where, and that step 0 is the base model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from videotune.adapters.lora import add_lora, load_lora, matching, updates
from videotune.config.schema import Lora
from videotune.errors import VideotuneError

Open = Callable[..., Any]


def forward(family: Any, net: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 2, 4, 4, generator=generator)
    text = torch.randn(1, 8, 16, generator=generator)
    with torch.no_grad():
        return net(hidden_states=x, timestep=torch.tensor([500.0]), encoder_hidden_states=text, return_dict=False)[0]


def test_step_0_is_the_base_model_exactly(tiny_family: Open) -> None:
    family = tiny_family("wan")
    before, net = forward(family, family.denoiser()), family.denoiser()
    add_lora(net, family.spec, Lora(rank=4), seed=0)
    assert torch.equal(before, forward(family, net))


def test_the_update_is_scale_b_a(tiny_family: Open) -> None:
    """Against a model whose weights were changed by ΔW."""
    family = tiny_family("wan")
    net = family.denoiser()
    settings = Lora(rank=4, alpha=10, targets="linear")
    state = add_lora(net, family.spec, settings, seed=0)
    for name, parameter in state.items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    merged = family.denoiser()
    modules = dict(merged.named_modules())
    for path, update in updates(state, settings.scale).items():
        modules[path].weight.data += update.float()
    torch.testing.assert_close(forward(family, net), forward(family, merged), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(forward(family, net), forward(family, family.denoiser()), atol=1e-3)


def test_a_is_drawn_by_its_modules_name(tiny_family: Open) -> None:
    """Which other modules have an adapter, and what was drawn before, change nothing."""
    family = tiny_family("wan")
    few = add_lora(family.denoiser(), family.spec, Lora(rank=4, targets=["attn1.to_q"]), seed=3)
    torch.rand(100)
    many = add_lora(family.denoiser(), family.spec, Lora(rank=4, targets="linear"), seed=3)
    other = add_lora(family.denoiser(), family.spec, Lora(rank=4, targets="linear"), seed=4)
    assert set(few) < set(many)
    for name, parameter in few.items():
        assert torch.equal(parameter, many[name])
        assert torch.equal(parameter, other[name]) == ("lora_B" in name)
    a = many["blocks.0.attn1.to_q.lora_A.weight"].detach()
    assert a.abs().max() <= a.shape[1] ** -0.5
    assert a.std().item() == pytest.approx(a.shape[1] ** -0.5 / 3**0.5, rel=0.2)


def test_adapters_are_float32_on_a_bf16_base(tiny_family: Open) -> None:
    family = tiny_family("wan", torch.bfloat16)
    net = family.denoiser()
    parameters = add_lora(net, family.spec, Lora(rank=2), seed=0)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    assert net.blocks[0].attn1.to_q.base_layer.weight.dtype == torch.bfloat16
    assert net.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32, "diffusers keeps it so"


def test_targets(tiny_family: Open) -> None:
    family = tiny_family("wan")
    net = family.skeleton()
    assert len(matching(net, family.spec, "attention")) == 2 * 2 * 4
    assert len(matching(net, family.spec, "linear")) == 2 * (2 * 4 + 2)
    assert matching(net, family.spec, ["attn2.to_k"]) == ["blocks.0.attn2.to_k", "blocks.1.attn2.to_k"]
    assert matching(net, family.spec, [r"blocks\.1\..*\.to_q"]) == ["blocks.1.attn1.to_q", "blocks.1.attn2.to_q"]


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["attn2.to_w"], "matches no Linear module of the blocks, such as blocks.0.attn1.to_q"),
        (["proj_out"], "matches no"),
        (["attn(("], "not a valid pattern"),
    ],
)
def test_targets_that_hit_nothing_are_errors(targets: Any, words: str, tiny_family: Open) -> None:
    family = tiny_family("wan")
    with pytest.raises(VideotuneError, match=r"lora\.targets") as caught:
        matching(family.skeleton(), family.spec, targets)
    assert words in str(caught.value)


def test_loading_another_adapter_is_an_error(tiny_family: Open) -> None:
    family = tiny_family("wan")
    mine = add_lora(family.denoiser(), family.spec, Lora(rank=2), seed=0)
    wider = add_lora(family.denoiser(), family.spec, Lora(rank=3), seed=0)
    more = add_lora(family.denoiser(), family.spec, Lora(rank=2, targets="linear"), seed=0)
    with pytest.raises(VideotuneError, match="the adapter's is"):
        load_lora(mine, wider, "x")
    with pytest.raises(VideotuneError, match="tensors differ"):
        load_lora(mine, more, "x")
    again = add_lora(family.denoiser(), family.spec, Lora(rank=2), seed=9)
    load_lora(again, mine, "x")
    assert all(torch.equal(again[name], mine[name]) for name in mine)
