"""What patterns name: modules that an adapter is put into, and layers that train."""

from collections.abc import Callable
from typing import Any

import pytest

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
