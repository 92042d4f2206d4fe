"""What PEFT is told of each kind of adapter, which numbers an adapter and new rows begin
with, and adapters beside each other.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.test_adapter_types import Open
from tests.adapters.test_embedding import part_of
from videotune.adapters.adapter_types import peft_config, side_of
from videotune.adapters.layers import (
    SAMPLED,
    Overlay,
    first_rows,
    grouped,
    lay_rows,
    layers_of,
    named_by,
)
from videotune.adapters.lora import add_lora, locate_parameters, lora_parameters
from videotune.config.sections import Embedding, Lora
from videotune.errors import VideotuneError
from videotune.rng import generator_for

PATHS = ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("LORA", {"peft_type": "LORA", "lora_alpha": 2.0, "lora_dropout": 0.25, "init_lora_weights": False, "use_dora": False}),
        ("DORA", {"peft_type": "LORA", "lora_alpha": 2.0, "lora_dropout": 0.25, "init_lora_weights": False, "use_dora": True}),
        ("LOHA", {"peft_type": "LOHA", "alpha": 2.0, "rank_dropout": 0.25}),
        ("LOKR", {"peft_type": "LOKR", "alpha": 2.0, "rank_dropout": 0.25, "rank_dropout_scale": True}),
    ],
)  # fmt: skip
def test_peft_is_told_the_rank_alpha_and_dropout(
    kind: str, expected: dict[str, Any]
) -> None:
    config = peft_config(kind, 4, 0.5, 0.25, PATHS)
    settings = {name: getattr(config, name) for name in expected}
    settings["peft_type"] = config.peft_type.value
    assert settings == expected
    assert (config.r, set(config.target_modules)) == (4, set(PATHS))


def test_peft_is_told_the_block_size_of_a_rotation() -> None:
    config = peft_config("OFT", 4, 1.0, 0.0, PATHS)
    assert (config.peft_type.value, config.oft_block_size) == ("OFT", 4)
    assert set(config.target_modules) == set(PATHS)
    with pytest.raises(ValueError, match="oft is not a type of adapter"):
        peft_config("oft", 4, 1.0, 0.0, PATHS)


def test_the_side_of_a_rotation() -> None:
    sides = {side * (side - 1) // 2: side for side in range(2, 70)}
    for numbers in range(1, max(sides) + 1):
        if numbers in sides:
            assert side_of(numbers) == sides[numbers]
            continue
        with pytest.raises(VideotuneError, match=f"no rotation has {numbers} numbers"):
            side_of(numbers)


def test_factors_begin_as_their_names_draw_them(tiny_family: Open) -> None:
    """Uniform within one over the root of the columns; the other factor is zero."""
    family = tiny_family("wan")
    settings = Lora(rank=4, targets=[r"blocks\.0\.ffn\..*"])
    for name, parameter in add_lora(
        family.denoiser(), family.spec, settings, 3
    ).items():
        assert parameter.dtype == torch.float32
        if "lora_B" in name:
            assert not parameter.any()
            continue
        bound = parameter.shape[1] ** -0.5
        drawn = generator_for(3, "lora", name).uniform(
            -bound, bound, size=tuple(parameter.shape)
        )
        assert torch.equal(parameter, torch.tensor(drawn, dtype=torch.float32))


@pytest.mark.parametrize("variant", ["LORA", "DORA"])
def test_an_adapter_of_a_network_without_memory_takes_none(
    variant: str, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    settings = Lora(rank=4, variant=variant)
    parameters = add_lora(family.skeleton(), family.spec, settings, seed=0)
    assert all(parameter.is_meta for parameter in parameters.values())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


def test_adapters_of_one_network_are_told_apart(tiny_family: Open) -> None:
    family = tiny_family("wan")
    net = family.denoiser()
    paths = ["blocks.0.attn1.to_q", "blocks.1.attn1.to_q"]
    for name, rank in (("first", 2), ("second", 3)):
        config = peft_config("LORA", rank, 1.0, 0.0, paths)
        net.add_adapter(config, adapter_name=name)
    for name, rank in (("first", 2), ("second", 3)):
        parameters = lora_parameters(net, name)
        assert set(parameters) == {
            f"{path}.lora_{part}.weight" for path in paths for part in "AB"
        }
        assert {min(value.shape) for value in parameters.values()} == {rank}
    assert locate_parameters(net, "third") == {}


def test_blocks_of_one_kind_are_counted_together() -> None:
    paths = [
        "blocks.0.attn1.to_out.0",
        "blocks.1.attn1.to_out.0",
        "blocks.10.ffn",
        "proj.2",
        "blocks.0.ffn",
        "blocks.1.resnets.0.conv",
    ]
    assert list(grouped(paths).items()) == [
        ("blocks.*.attn1.to_out.0", 2),
        ("blocks.*.ffn", 2),
        ("proj.2", 1),
        ("blocks.*.resnets.0.conv", 1),
    ]


@pytest.mark.parametrize(
    ("rows", "mean", "deviation"),
    [(SAMPLED - 2, 1.0, 1.0), (2 * SAMPLED - 1, 1.0, 1.0), (2 * SAMPLED, 0.0, 0.0)],
)
def test_rows_without_words_are_drawn_around_some_thousand_rows(
    rows: int, mean: float, deviation: float
) -> None:
    """Each row of a table, and every other one where it has twice as many as are read.

    Here every other row is 0, and those between are 2.
    """
    part = part_of("t5")
    table = torch.zeros(rows, 16)
    table[1::2] = 2.0
    part.encoder.get_input_embeddings().weight = nn.Parameter(table)
    first = first_rows(part, Embedding(token="<x>", vectors=3), seed=5, name="clip")
    noise = generator_for(5, "embedding", "clip").standard_normal((3, 16), "float32")
    expected = mean + deviation * torch.from_numpy(noise)
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3)


def test_rows_are_drawn_by_the_name_of_the_first_encoder_if_none_is_given() -> None:
    part = part_of("t5")
    settings = Embedding(token="<x>")
    assert torch.equal(
        first_rows(part, settings, seed=1),
        first_rows(part, settings, seed=1, name="text_encoder"),
    )


def test_rows_are_where_the_table_is() -> None:
    part = part_of("t5")
    part.encoder.to("meta")
    assert lay_rows(part, ("<y>",), torch.zeros(1, 16)).is_meta


def test_a_pattern_that_names_nothing_is_answered_with_the_first_three_names() -> None:
    paths = ["one", "two", "three", "four"]
    with pytest.raises(VideotuneError, match=r"^key: 'x' .* one, two, three$"):
        named_by(paths, ["x"], "key", "module")
    with pytest.raises(
        VideotuneError,
        match=r"^transformer\.layers: .* module or parameter of the transformer, such as one$",
    ):
        layers_of(["one"], ["x"])
    with pytest.raises(
        VideotuneError,
        match=r"^text_encoder\.layers: .* of the text encoders, such as a\.b, a, clip\.a\.b$",
    ):
        layers_of(["clip.a.b"], ["x"], of_text=True)


def test_a_table_that_multiplies_its_rows_multiplies_new_ones() -> None:
    table: Any = nn.Embedding(4, 3)
    rows = nn.Parameter(torch.ones(2, 3))
    numbers = torch.tensor([3, 4, 5])
    plain = Overlay(table, rows, 4)(numbers)
    assert torch.equal(plain[1:], rows)
    table.embed_scale = 2.5
    scaled = Overlay(table, rows, 4)(numbers)
    assert torch.equal(scaled[1:], 2.5 * rows)
    assert torch.equal(scaled[0], table.weight[3])
