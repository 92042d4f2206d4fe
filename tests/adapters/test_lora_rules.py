"""Which modules an adapter's rules name, what OFT refuses, and how parameters find
their place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from videotune.adapters.layers import Overlay, add_full, load_weights
from videotune.adapters.lora import (
    ADAPTER,
    bind_parameters,
    idle_targets,
    in_one_scale,
    inject,
    matching,
    of_module,
    refuse_uneven,
    rule_of,
)
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.model_spec import ConnectorRules
from videotune.models.registry import find


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


def test_block_sizes_near_the_refused_one_are_offered() -> None:
    net = nn.ModuleDict({"large": nn.Linear(24, 1), "small": nn.Linear(12, 1)})
    with pytest.raises(VideotuneError, match=r"large has 24; take one of 2, 3, 4, 6$"):
        refuse_uneven(net, ["large", "small"], 5)
    with pytest.raises(VideotuneError, match=r"take one of 3, 4, 6, 12$"):
        refuse_uneven(net, ["large", "small"], 11)


RULES = Lora(
    rank=4,
    alpha=8,
    modules=[{"pattern": "to_q", "rank": 2}, {"pattern": "to_k", "alpha": 2}],
)
"""Scales: 2 without a rule, 8 / 2 for to_q, 2 / 4 for to_k."""


@pytest.mark.parametrize(
    ("path", "rank", "alpha"), [("to_v", 4, 8), ("to_q", 2, 8), ("to_k", 4, 2)]
)
def test_a_module_has_the_rank_and_alpha_of_its_rule(
    path: str, rank: int, alpha: float
) -> None:
    settings = of_module(RULES, f"blocks.1.{path}")
    assert (settings.rank, settings.alpha) == (rank, alpha)
    assert settings.scale == alpha / rank


@pytest.mark.parametrize("variant", ["LORA", "DORA", "LOHA", "LOKR"])
def test_adapters_are_built_by_the_rules_of_their_modules(
    variant: str, tiny_family: Callable[..., Any]
) -> None:
    """Rank and scale of each module's layer, of rules and of none."""
    family = tiny_family("wan")
    net = family.denoiser()
    settings = RULES.model_copy(update={"variant": variant, "targets": "attention"})
    inject(net, family.spec, settings)
    for path, rank, scale in (("to_v", 4, 2), ("to_q", 2, 4), ("to_k", 4, 0.5)):
        for block in range(2):
            layer = net.get_submodule(f"blocks.{block}.attn1.{path}")
            assert layer.r[ADAPTER] == rank
            assert layer.scaling[ADAPTER] == scale


def test_a_rule_that_names_no_module_of_the_targets_is_refused(
    tiny_family: Callable[..., Any],
) -> None:
    family = tiny_family("wan")
    settings = Lora(targets=["attn1.to_q"], modules=[{"pattern": "to_k", "rank": 2}])
    with pytest.raises(
        VideotuneError, match=r"^lora\.modules: 'to_k' .* module of lora\.targets,"
    ):
        inject(family.skeleton(), family.spec, settings)


def test_in_one_scale_every_update_is_that_of_its_module() -> None:
    """Only what begins at zero is multiplied, so that DoRA's magnitudes stay."""
    generator = torch.Generator().manual_seed(0)
    state = {"step": torch.ones(1)}
    for path, rank in (("to_q", 2), ("to_v", 4), ("to_k", 4)):
        name = f"transformer.blocks.1.{path}"
        state[f"{name}.lora_A.weight"] = torch.randn(rank, 3, generator=generator)
        state[f"{name}.lora_B.weight"] = torch.randn(5, rank, generator=generator)
        state[f"{name}.lora_magnitude_vector"] = torch.randn(5, generator=generator)

    scaled = in_one_scale(state, RULES)
    assert list(scaled) == list(state)
    for path, factor in (("to_q", 4 / 2), ("to_v", 1), ("to_k", 0.5 / 2)):
        name = f"transformer.blocks.1.{path}.lora_B.weight"
        torch.testing.assert_close(scaled.pop(name), factor * state[name])
    for name, value in scaled.items():
        assert value is state[name]


def two_blocks() -> nn.ModuleList:
    return nn.ModuleList(
        nn.ModuleDict({"to_q": nn.Linear(2, 2), "to_out": nn.Linear(2, 2)})
        for _ in range(2)
    )


class Net(nn.Module):
    """Two blocks of a denoiser and two of connectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = two_blocks()
        self.connectors = nn.ModuleDict({"blocks": two_blocks()})


def test_modules_without_effect_are_named_and_do_not_train() -> None:
    spec = replace(find("wan").spec, idle_paths=(r"blocks\.1\.to_out",))
    idle = "blocks.1.to_out"
    acting = ["blocks.0.to_q", "blocks.0.to_out", "blocks.1.to_q"]
    for targets, without_effect in (("to_out", [idle]), (["to_q"], [])):
        assert idle_targets(Net(), spec, targets) == without_effect
    assert matching(Net(), spec, ["to_q", "to_out"]) == acting

    net = Net()
    del net.connectors
    trained = add_full(net, spec)
    assert {name.rpartition(".")[0] for name in trained} == set(acting)
    for name, parameter in net.named_parameters():
        assert parameter.requires_grad == (not name.startswith(idle)), name
    with pytest.raises(
        VideotuneError, match=rf"all 2 weights .* {idle}\.weight, have no effect"
    ):
        add_full(Net(), spec, [r"blocks\.1\.to_out"])
    with pytest.raises(VideotuneError, match=rf"all 1 modules .* {idle}, have no"):
        matching(Net(), spec, [r"blocks\.1\.to_out"])


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        ("connectors", ["connectors.blocks.0.to_q", "connectors.blocks.1.to_q"]),
        ([r"connectors\..*1\.to_out"], ["connectors.blocks.1.to_out"]),
        (["to_out"], ["blocks.0.to_out", "blocks.1.to_out"]),
        (
            [r"connectors\..*0\.to_q", r"blocks\.1\.to_q"],
            ["blocks.1.to_q", "connectors.blocks.0.to_q"],
        ),
        (
            [r"connectors\..*1\.to_out", "connectors"],
            [
                "connectors.blocks.0.to_q",
                "connectors.blocks.1.to_q",
                "connectors.blocks.1.to_out",
            ],
        ),
    ],
)
def test_a_target_names_modules_of_the_connectors_or_of_the_denoiser(
    targets: str | list[str], paths: list[str]
) -> None:
    rules = ConnectorRules("connectors", ("connectors.blocks",), ("to_q",), 1, 1)
    spec = replace(find("wan").spec, connectors=rules, connectors_in_step=True)
    assert matching(Net(), spec, targets) == paths
    with pytest.raises(
        VideotuneError,
        match=r"^lora\.targets: .* no Linear module of the connectors' blocks",
    ):
        matching(Net(), spec, [r"connectors\..*to_v"])


def test_parameters_are_bound_at_any_depth() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    weight = nn.Parameter(torch.full((2, 2), 7.0))
    bind_parameters(net, {"1.0.weight": weight})
    assert net[1][0].weight is weight
    assert not torch.equal(net[0].weight, weight)
    with pytest.raises(AssertionError):
        bind_parameters(net, {"0.weight": nn.Parameter(torch.zeros(3, 2))})


def test_weights_are_loaded_by_name() -> None:
    """Into the same parameters, in the dtype that they have."""
    parameters = {
        "a": nn.Parameter(torch.zeros(2, 3)),
        "b": nn.Parameter(torch.zeros(2)),
    }
    before = dict(parameters)
    state = {"b": torch.ones(2).double(), "a": torch.full((2, 3), 2.0)}
    load_weights(parameters, state, "the file")
    for name, parameter in parameters.items():
        assert parameter is before[name]
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter.data, state[name].float())


@pytest.mark.parametrize(
    ("shapes", "count", "first"),
    [
        ({"a": (2, 3)}, 1, "b"),
        ({"a": (2, 3), "b": (2,), "c": (1,)}, 1, "c"),
        ({"a": (3, 2), "b": (2,)}, 1, "a"),
        ({"a": (1, 3), "c": (2,)}, 3, "b"),
    ],
)
def test_weights_that_do_not_fit_what_trains_are_refused_and_none_is_loaded(
    shapes: dict[str, tuple[int, ...]], count: int, first: str
) -> None:
    parameters = {
        "a": nn.Parameter(torch.zeros(2, 3)),
        "b": nn.Parameter(torch.zeros(2)),
    }
    state = {name: torch.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(
        VideotuneError,
        match=f"^the file does not fit .* {count} tensors differ, the first is {first}$",
    ):
        load_weights(parameters, state, "the file")
    assert not any(parameter.any() for parameter in parameters.values())


def test_an_overlay_covers_its_own_tokens_alone() -> None:
    """The table has rows before, below and after those of the new tokens."""
    table = nn.Embedding(8, 2)
    rows = nn.Parameter(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    overlay = Overlay(table, rows, first=4)
    read = overlay(torch.arange(8))
    expected = table.weight.detach().clone()
    expected[4:6] = rows.detach()
    torch.testing.assert_close(read, expected)
