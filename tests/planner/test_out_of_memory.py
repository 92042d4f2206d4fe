"""What is saved, told and offered after a step that did not fit into memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind
from tests.support.trainers import Lab, trainer_of
from videotune.config.resolve import parse
from videotune.distributed import DistributedContext
from videotune.planner.out_of_memory import (
    device_full_message,
    remedies,
    retry_settings,
    rounding_saves_nothing,
    same_result_settings,
    save_before_failed_step,
)
from videotune.runs.checkpoint import complete_checkpoints
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Trainer

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


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


def failed(trainer: Trainer, intact: bool) -> OutOfMemory:
    """The third step did not fit, with samples of the last bucket."""
    window_ids = [window.id for window in trainer.job.buckets[-1]]
    return OutOfMemory(3, (window_ids[-1],) * 2, intact)


BUCKETS = {"video_config.frames": [9, 17], "batch_size": 2}


@pytest.mark.parametrize("intact", [True, False])
def test_a_state_that_is_intact_is_saved_and_the_bucket_is_noted(
    intact: bool, lab: Lab
) -> None:
    trainer = trainer_of(lab, BUCKETS)
    rescue = save_before_failed_step(trainer, failed(trainer, intact))
    saved = [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]
    assert saved == ([2] if intact else [])
    assert ("videotune resume" in rescue) is intact

    trainer.journal.flush()
    (warning,) = of_kind(trainer.run, "warning")
    shape = trainer.job.buckets[-1][0].shape
    assert warning["step"] == 2
    assert warning["text"] == f"out of memory in step 3: bucket {shape}"


def test_of_several_processes_none_saves_by_itself(lab: Lab) -> None:
    trainer = trainer_of(lab, BUCKETS)
    trainer.dist = replace(trainer.dist, size=2)
    save_before_failed_step(trainer, failed(trainer, intact=True))
    assert not complete_checkpoints(trainer.run)


def test_the_message_has_the_samples_their_tokens_and_a_remedy_a_line(lab: Lab) -> None:
    trainer = trainer_of(lab, BUCKETS)
    error = failed(trainer, intact=True)
    first, *lines = device_full_message(trainer, error, "A rescue.").splitlines()
    shape = trainer.job.buckets[-1][0].shape
    assert first.startswith("out of memory in step 3: 2 samples of ")
    assert f" {shape} pixels" in first
    assert f" {trainer.job.spec.tokens(shape):,} tokens" in first
    assert first.endswith(" A rescue.")
    assert lines[1:] == [
        f"  {line}" for line in remedies(trainer.job.config, gpu=False)
    ]

    trainer.family.device = torch.device("cuda", 0)
    assert trainer.device.type == "cuda"
    on_card = device_full_message(trainer, error, "").splitlines()
    assert on_card[2:] == [f"  {line}" for line in remedies(trainer.job.config)]
    assert len(on_card) > len(lines) + 1


def test_a_run_tries_again_with_the_first_setting_if_its_config_says_so(
    lab: Lab,
) -> None:
    trainer = trainer_of(lab, BUCKETS | {"out_of_memory": "retry"})
    assert retry_settings(trainer) == ("micro_batch_size=1",)
    trainer.dist = DistributedContext(rank=0, size=2)
    assert retry_settings(trainer) == ()

    assert retry_settings(trainer_of(lab, BUCKETS)) == ()
    nothing_left = {"gradient_checkpointing": "ON", "out_of_memory": "retry"}
    alone = trainer_of(lab, nothing_left)
    assert retry_settings(alone) == ()
    alone.family.device = torch.device("cuda", 0)
    assert retry_settings(alone) == ("gradient_checkpointing=CPU_OFFLOADED",)
