"""Which settings are offered after a step that did not fit into memory."""

from typing import Any

import pytest

from videotune.config.resolve import parse
from videotune.planner.out_of_memory import (
    remedies,
    rounding_saves_nothing,
    same_result_settings,
)

ON_A_CARD = True
ON_THE_CPU = False


def settings_of(keys: dict[str, Any], gpu: bool = ON_A_CARD) -> list[str]:
    config = parse({"batch_size": 1, **keys})
    return [setting for setting, _ in same_result_settings(config, gpu)]


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"batch_size": 1}, False),
        ({"batch_size": 2}, True),
        ({"batch_size": 4, "micro_batch_size": 1}, False),
        ({"batch_size": 4, "micro_batch_size": 2}, True),
        ({"batch_size": 2, "optimizer.step_in_backward": True}, False),
    ],
)
def test_a_pass_of_several_samples_is_split_first(
    keys: dict[str, Any], first: bool
) -> None:
    nested = {**keys}
    if nested.pop("optimizer.step_in_backward", False):
        nested["optimizer"] = {"step_in_backward": True}
    assert (settings_of(nested)[:1] == ["micro_batch_size=1"]) == first


@pytest.mark.parametrize(
    ("mode", "gpu", "expected"),
    [
        ("OFF", ON_A_CARD, ["gradient_checkpointing=ON", "layer_offload_fraction=0.5"]),
        ("OFF", ON_THE_CPU, ["gradient_checkpointing=ON"]),
        ("ATTENTION_SAVED", ON_A_CARD, ["gradient_checkpointing=ON"]),
        ("ATTENTION_SAVED", ON_THE_CPU, ["gradient_checkpointing=ON"]),
        (
            "ON",
            ON_A_CARD,
            ["gradient_checkpointing=CPU_OFFLOADED", "layer_offload_fraction=0.5"],
        ),
        ("ON", ON_THE_CPU, []),
        (
            "CPU_OFFLOADED",
            ON_A_CARD,
            ["gradient_checkpointing=IN_PARTS", "layer_offload_fraction=0.5"],
        ),
        ("IN_PARTS", ON_A_CARD, ["layer_offload_fraction=0.5"]),
    ],
)
def test_each_way_of_checkpointing_has_the_next_one(
    mode: str, gpu: bool, expected: list[str]
) -> None:
    assert settings_of({"gradient_checkpointing": mode}, gpu) == expected


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (None, ["layer_offload_fraction=0.5"]),
        (0.25, ["layer_offload_fraction=0.75"]),
        (0.7, ["layer_offload_fraction=1"]),
        (1.0, []),
    ],
)
def test_half_of_the_blocks_more_wait_on_the_host(
    fraction: float | None, expected: list[str]
) -> None:
    keys = {"gradient_checkpointing": "IN_PARTS", "layer_offload_fraction": fraction}
    assert settings_of(keys) == expected


def test_sharded_weights_do_not_wait_on_the_host() -> None:
    keys = {"gradient_checkpointing": "ON", "sharding": "FULL"}
    assert settings_of(keys) == []


@pytest.mark.parametrize(
    ("keys", "nothing"),
    [
        ({}, False),
        ({"weight_dtype": "INT_8"}, True),
        ({"transformer": {"weight_dtype": "FLOAT_8"}}, True),
        (
            {"weight_dtype": "INT_8", "transformer": {"weight_dtype": "BFLOAT_16"}},
            False,
        ),
        ({"transformer": {"matmul_dtype": "INT_8"}}, True),
        ({"layer_offload_fraction": 0.5}, False),
        ({"layer_offload_fraction": 1.0}, True),
    ],
)
def test_weights_are_rounded_once_and_only_where_the_card_holds_them(
    keys: dict[str, Any], nothing: bool
) -> None:
    config = parse(keys)
    assert rounding_saves_nothing(config) == nothing
    offers = any("weight_dtype=FLOAT_8" in line for line in remedies(config))
    assert offers == (not nothing)


def names_of(keys: dict[str, Any]) -> str:
    return " ".join(line.split(":")[0] for line in remedies(parse(keys)))


@pytest.mark.parametrize(
    ("setting", "with_it", "without_it"),
    [
        (
            "ema.device=host",
            {"ema": {"decay": 0.9, "device": "device"}},
            {"ema": {"decay": 0.9, "device": "host"}},
        ),
        ("ema.device=host", {"ema": {"decay": 0.9, "device": "device"}}, {}),
        (
            "ADAMW_8BIT",
            {"optimizer": {"name": "ADAMW"}},
            {"optimizer": {"name": "LION"}},
        ),
        ("lora.rank", {"lora": {"rank": 9}}, {"lora": {"rank": 8}}),
        ("lora.rank", {"lora": {"rank": 9}}, {"training_method": "FINE_TUNE"}),
        (
            "step_in_backward",
            {"training_method": "FINE_TUNE"},
            {"training_method": "FINE_TUNE", "gradient_accumulation_steps": 2},
        ),
        (
            "step_in_backward",
            {"training_method": "FINE_TUNE"},
            {
                "training_method": "FINE_TUNE",
                "optimizer": {"step_in_backward": True},
            },
        ),
        (
            "STOCHASTIC_ROUNDING",
            {"training_method": "FINE_TUNE", "train_dtype": "BFLOAT_16"},
            {"training_method": "FINE_TUNE", "train_dtype": "FLOAT_32"},
        ),
        (
            "STOCHASTIC_ROUNDING",
            {"training_method": "FINE_TUNE", "train_dtype": "BFLOAT_16"},
            {"train_dtype": "BFLOAT_16"},
        ),
    ],
)
def test_a_remedy_is_offered_only_where_it_would_help(
    setting: str, with_it: dict[str, Any], without_it: dict[str, Any]
) -> None:
    assert setting in names_of(with_it)
    assert setting not in names_of(without_it)
