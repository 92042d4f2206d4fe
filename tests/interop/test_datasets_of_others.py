"""Keys of other trainers' datasets become the same keys of ours."""

from pathlib import Path
from typing import Any

import pytest

from tests.interop.test_translate import CONFIGS
from videotune.config.suggestions import flat_leaves
from videotune.interop.foreign_config import ForeignConfig
from videotune.interop.translate import translate

MUSUBI = "dataset_config.datasets.0."
KOHYA = "dataset_config.datasets.0.subsets.0."
AI_TOOLKIT = "config.process.0.datasets.0."
PIPE = "dataset.directory.0."
SIMPLE = "data_backend_config.0."
TRAINER = "concepts.0."

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("musubi", MUSUBI + "video_directory",
     {MUSUBI + "caption_extension": "caption", MUSUBI + "num_repeats": 2.5},
     {"caption_extension": ".caption", "repeats": 3, "probability": 2.5 / 3}),
    ("kohya", KOHYA + "image_dir",
     {KOHYA + "shuffle_caption": True, KOHYA + "keep_tokens": 2, KOHYA + "caption_separator": ", ",
      KOHYA + "caption_tag_dropout_rate": 0.1, KOHYA + "flip_aug": True,
      KOHYA + "caption_dropout_rate": 0.2, "dataset_config.general.caption_prefix": "a,",
      KOHYA + "caption_suffix": "b", KOHYA + "enable_wildcard": True},
     {"caption_shuffle": True, "caption_keep_tokens": 2, "caption_separator": ",",
      "caption_tag_dropout": 0.1, "flip": "always", "caption_dropout": 0.2, "caption_prefix": "a,",
      "caption_suffix": "b", "caption_wildcards": True}),
    ("ai-toolkit", AI_TOOLKIT + "folder_path",
     {AI_TOOLKIT + "caption_ext": "txt", AI_TOOLKIT + "shuffle_tokens": True, AI_TOOLKIT + "keep_tokens": 1,
      AI_TOOLKIT + "token_dropout_rate": 0.3, AI_TOOLKIT + "flip_x": True},
     {"caption_extension": ".txt", "caption_shuffle": True, "caption_keep_tokens": 1,
      "caption_tag_dropout": 0.3, "flip": "always"}),
    ("diffusion-pipe", PIPE + "path",
     {PIPE + "cache_shuffle_num": 10, PIPE + "cache_shuffle_delimiter": "; ", PIPE + "num_repeats": 0.5,
      PIPE + "caption_prefix": "x "},
     {"caption_shuffle": True, "caption_variants": 10, "caption_separator": ";", "repeats": 1,
      "probability": 0.5, "caption_prefix": "x "}),
    ("simpletuner", SIMPLE + "instance_data_dir",
     {SIMPLE + "probability": 0.25, SIMPLE + "max_num_samples": 9, SIMPLE + "start_step": 5,
      SIMPLE + "end_step": 70, SIMPLE + "train_batch_size": 3, SIMPLE + "repeats": 1,
      SIMPLE + "caption_shuffle.enable": True, SIMPLE + "caption_shuffle.count": 3,
      SIMPLE + "caption_shuffle.position_start": 1, SIMPLE + "caption_shuffle.split_on": "period"},
     {"probability": 0.25, "max_clips": 9, "from_step": 5, "until_step": 70, "batch_size": 3,
      "repeats": 2, "caption_shuffle": True, "caption_variants": 4, "caption_keep_tokens": 1,
      "caption_separator": "."}),
    ("onetrainer", TRAINER + "path",
     {TRAINER + "text.enable_tag_shuffling": True, TRAINER + "text.keep_tags_count": 1,
      TRAINER + "text.tag_delimiter": "|", TRAINER + "text.tag_dropout_enable": True,
      TRAINER + "text.tag_dropout_mode": "RANDOM", TRAINER + "text.tag_dropout_probability": 0.2,
      TRAINER + "text_variations": 5, TRAINER + "image.enable_random_flip": True,
      TRAINER + "balancing": 1.5, TRAINER + "balancing_strategy": "REPEATS"},
     {"caption_shuffle": True, "caption_keep_tokens": 1, "caption_separator": "|",
      "caption_tag_dropout": 0.2, "caption_variants": 5, "flip": "always", "repeats": 2,
      "probability": 0.75}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "path", "keys", "ours"), CASES, ids=[case[0] for case in CASES]
)
def test_a_key_of_a_dataset_is_translated(
    trainer: str, path: str, keys: dict[str, Any], ours: dict[str, Any]
) -> None:
    values = flat_leaves({path: "clips", **keys})
    imported = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ()))
    (dataset,) = imported.config["datasets"]
    assert Path(dataset["path"]).name == "clips"
    assert {key: dataset[key] for key in ours} == pytest.approx(ours)
    for row in imported.rows:
        if row.key in keys and not row.note.startswith("see "):
            assert row.verdict in ("same", "translated", "differs"), row


MASKS: list[tuple[str, str, dict[str, Any], float, bool]] = [
    ("kohya", KOHYA + "image_dir",
     {"masked_loss": True, KOHYA + "conditioning_data_dir": "masks"}, 0.0, True),
    ("ai-toolkit", AI_TOOLKIT + "folder_path", {AI_TOOLKIT + "mask_path": "masks"}, 0.0, True),
    ("ai-toolkit", AI_TOOLKIT + "folder_path",
     {AI_TOOLKIT + "mask_path": "masks", AI_TOOLKIT + "mask_min_value": 0.25}, 0.25, True),
    ("diffusion-pipe", PIPE + "path", {PIPE + "mask_path": "masks"}, 0.0, True),
    ("onetrainer", TRAINER + "path", {"masked_training": True}, 0.1, False),
    ("onetrainer", TRAINER + "path", {"masked_training": True, "unmasked_weight": 0.5}, 0.5, False),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "path", "keys", "outside", "has_folder"), MASKS)
def test_masks_are_translated(
    trainer: str, path: str, keys: dict[str, Any], outside: float, has_folder: bool
) -> None:
    values = flat_leaves({path: "clips", **keys})
    imported = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ()))
    assert imported.config["loss_mask"]["outside"] == outside
    (dataset,) = imported.config["datasets"]
    assert ("loss_masks" in dataset) == has_folder
    if has_folder:
        assert Path(dataset["loss_masks"]).name == "masks"


@pytest.mark.parametrize(
    ("trainer", "path", "batch_size"),
    [
        ("musubi", "dataset_config.datasets.{}.video_directory", "dataset_config.datasets.{}.batch_size"),
        ("ai-toolkit", "config.process.0.datasets.{}.folder_path", "config.process.0.datasets.{}.batch_size"),
    ],
)  # fmt: skip
def test_batch_sizes_of_several_datasets_stay_apart(
    trainer: str, path: str, batch_size: str
) -> None:
    values: dict[str, Any] = {path.format(0): "a", batch_size.format(0): 4}
    config = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ())).config
    assert config["batch_size"] == 4
    assert "batch_size" not in config["datasets"][0]

    values |= {path.format(1): "b", batch_size.format(1): 2}
    config = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ())).config
    assert [dataset["batch_size"] for dataset in config["datasets"]] == [4, 2]
    assert "batch_size" not in config
