"""Which modules an adapter's rules name, what OFT refuses, and how parameters find
their place.
"""

import pytest
import torch
from torch import nn

from videotune.adapters.layers import Overlay
from videotune.adapters.lora import bind_parameters, refuse_uneven, rule_of
from videotune.config.sections import Lora
from videotune.errors import VideotuneError


def test_a_rule_names_modules_by_a_regular_expression_or_their_last_parts() -> None:
    settings = Lora(
        modules=[
            {"pattern": r"blocks\.[01]\..*", "rank": 2},
            {"pattern": "to_q", "rank": 3},
        ]
    )
    ranks = {}
    for path in ("blocks.0.to_q", "blocks.7.to_q", "blocks.7.to_k", "to_q.blocks"):
        rule = rule_of(settings, path)
        ranks[path] = None if rule is None else rule.rank
    assert ranks == {
        "blocks.0.to_q": 2,
        "blocks.7.to_q": 3,
        "blocks.7.to_k": None,
        "to_q.blocks": None,
    }


def test_the_first_module_that_oft_cannot_divide_is_named_with_block_sizes() -> None:
    net = nn.ModuleDict({"even": nn.Linear(8, 1), "odd": nn.Linear(6, 1)})
    refuse_uneven(net, ["even", "odd"], 2)
    with pytest.raises(VideotuneError) as refused:
        refuse_uneven(net, ["even", "odd"], 4)
    assert "odd has 6" in str(refused.value)
    assert str(refused.value).endswith("take one of 2")


def test_parameters_are_bound_at_any_depth() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    weight = nn.Parameter(torch.full((2, 2), 7.0))
    bind_parameters(net, {"1.0.weight": weight})
    assert net[1][0].weight is weight
    assert not torch.equal(net[0].weight, weight)
    with pytest.raises(AssertionError):
        bind_parameters(net, {"0.weight": nn.Parameter(torch.zeros(3, 2))})


def test_an_overlay_covers_its_own_tokens_alone() -> None:
    """The table has rows before, below and after those of the new tokens."""
    table = nn.Embedding(8, 2)
    rows = nn.Parameter(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    overlay = Overlay(table, rows, first=4)
    read = overlay(torch.arange(8))
    expected = table.weight.detach().clone()
    expected[4:6] = rows.detach()
    torch.testing.assert_close(read, expected)
