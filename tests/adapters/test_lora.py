"""What patterns name: modules that an adapter is put into, and layers that train."""

from collections.abc import Callable
from typing import Any

import pytest

from videotune.adapters.layers import add_full, layers_of
from videotune.adapters.lora import matching
from videotune.errors import VideotuneError

Open = Callable[..., Any]


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


def test_a_module_trains_whole_and_a_parameter_by_itself(tiny_family: Open) -> None:
    net = tiny_family("wan").denoiser()
    names = list(dict(net.named_parameters()))
    assert layers_of(names, None) == names
    assert layers_of(names, ["blocks.1"]) == [name for name in names if name.startswith("blocks.1.")]
    assert layers_of(names, [r"blocks\.\d+\.attn1"]) == [name for name in names if ".attn1." in name]
    assert layers_of(names, ["to_q.bias"]) == [name for name in names if name.endswith(".to_q.bias")]
    both = layers_of(names, ["proj_out", "ffn.net.2.weight"])
    assert both == [name for name in names if name.startswith("proj_out.") or name.endswith("ffn.net.2.weight")]


@pytest.mark.parametrize(
    ("layers", "words"),
    [(["blocks.7"], "'blocks.7' matches no module or parameter"), (["blocks.0", "b(("], "not a valid pattern")],
)
def test_layers_that_are_not_there_are_errors(layers: list[str], words: str, tiny_family: Open) -> None:
    with pytest.raises(VideotuneError, match=r"transformer\.layers") as caught:
        add_full(tiny_family("wan").denoiser(), layers)
    assert words in str(caught.value)
