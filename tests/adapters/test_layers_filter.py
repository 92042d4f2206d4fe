"""transformer.layers: which weights of a fine-tuning train."""

from collections.abc import Callable
from typing import Any

import pytest

from videotune.adapters.full import add_full, layers_of
from videotune.adapters.patterns import grouped
from videotune.errors import VideotuneError

Open = Callable[..., Any]


def test_a_module_trains_whole_and_a_parameter_by_itself(tiny_family: Open) -> None:
    net = tiny_family("wan").denoiser()
    names = list(dict(net.named_parameters()))
    assert layers_of(names, None) == names
    assert layers_of(names, ["blocks.1"]) == [name for name in names if name.startswith("blocks.1.")]
    assert layers_of(names, [r"blocks\.\d+\.attn1"]) == [name for name in names if ".attn1." in name]
    assert layers_of(names, ["to_q.bias"]) == [name for name in names if name.endswith(".to_q.bias")]
    both = layers_of(names, ["proj_out", "ffn.net.2.weight"])
    assert both == [name for name in names if name.startswith("proj_out.") or name.endswith("ffn.net.2.weight")]


def test_the_rest_is_frozen(tiny_family: Open) -> None:
    net = tiny_family("wan").denoiser()
    chosen = add_full(net, ["blocks.0.ffn"])
    assert chosen
    assert {name for name, parameter in net.named_parameters() if parameter.requires_grad} == set(chosen)
    assert all(name.startswith("blocks.0.ffn.") for name in chosen)


@pytest.mark.parametrize(
    ("layers", "words"),
    [(["blocks.7"], "'blocks.7' matches no module or parameter"), (["blocks.0", "b(("], "not a valid pattern")],
)
def test_layers_that_are_not_there_are_errors(layers: list[str], words: str, tiny_family: Open) -> None:
    with pytest.raises(VideotuneError, match=r"transformer\.layers") as caught:
        add_full(tiny_family("wan").denoiser(), layers)
    assert words in str(caught.value)


def test_groups_write_a_block_s_number_as_a_star() -> None:
    paths = ["blocks.0.attn1.to_out.0", "blocks.0.ffn.net.2", "blocks.11.attn1.to_out.0", "proj_out"]
    assert grouped(paths) == {"blocks.*.attn1.to_out.0": 2, "blocks.*.ffn.net.2": 1, "proj_out": 1}
