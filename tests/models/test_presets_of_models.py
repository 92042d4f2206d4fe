"""Presets fit the published models that they name; those of the guide have the guide's numbers."""

import pytest

from videotune.config.load import flatten, preset_about, preset_names, read_preset
from videotune.config.resolve import resolve
from videotune.data.buckets import parse_resolution
from videotune.data.frame_sampling import snap_frames
from videotune.models.base_model import published, spec_for
from videotune.planner.fit import OPEN
from videotune.types import BasePlace, ModelSpec

PRESETS = [name for name in preset_names() if name != "toy"]


def spec_of(name: str) -> ModelSpec:
    """The spec of the published model that a preset names."""
    base = str(read_preset(name)["base_model_name"])
    folder = published(base)
    assert folder is not None
    return spec_for(None, BasePlace(base, folder))


EVERY = {
    "base_model_name": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "train_dtype": "BFLOAT_16",
    "weight_dtype": "FLOAT_8",
    "transformer.weight_dtype": "auto",
    "text_encoder.weight_dtype": "auto",
    "transformer.train": True,
    "text_encoder.train": False,
    "timestep_distribution": "LOGIT_NORMAL",
    "gradient_checkpointing": "CPU_OFFLOADED",
    "resolution": 512,
    "video_config.max_frames": 16,
    "video_config.frames": None,
    "video_config.target_fps": 24.0,
    "video_config.max_duration": 10.0,
    "video_config.temporal_consistency_weight": 0.0,
    "video_config.use_temporal_attention": True,
    "video_config.frame_sample_strategy": "uniform",
    "video_config.spatial_compression_ratio": None,
    "video_config.temporal_compression_ratio": None,
    "video_config.video_batch_size_multiplier": 0.5,
    "video_config.frame_dropout_probability": 0.0,
    "video_config.temporal_augmentation": False,
}
"""What the guide's presets have unless their row says otherwise."""

ROWS: dict[str, dict[str, object]] = {
    "#wan 2.2 LoRA.json": {
        "training_method": "LORA",
        "batch_size": 2,
        "learning_rate": 3e-4,
        "layer_offload_fraction": 0.5,
        "video_config.temporal_consistency_weight": 1.0,
    },
    "#wan 2.2 LoRA 8GB.json": {
        "training_method": "LORA",
        "batch_size": 1,
        "learning_rate": 3e-4,
        "weight_dtype": "NFLOAT_4",
        "layer_offload_fraction": 0.8,
        "resolution": 384,
        "video_config.max_frames": 8,
        "video_config.target_fps": 12.0,
        "video_config.max_duration": 5.0,
        "video_config.temporal_consistency_weight": 0.8,
        "video_config.spatial_compression_ratio": 16,
        "video_config.temporal_compression_ratio": 8,
        "video_config.video_batch_size_multiplier": 0.25,
    },
    "#wan 2.2 Finetune.json": {
        "training_method": "FINE_TUNE",
        "weight_dtype": "auto",
        "batch_size": 1,
        "learning_rate": 1e-4,
        "text_encoder.train": True,
        "text_encoder.learning_rate": 5e-5,
        "layer_offload_fraction": 0.7,
        "video_config.video_batch_size_multiplier": 0.3,
    },
    "#wan 2.2 Embedding.json": {
        "training_method": "EMBEDDING",
        "batch_size": 4,
        "embedding_learning_rate": 5e-3,
        "transformer.train": False,
        "timestep_distribution": "UNIFORM",
        "gradient_checkpointing": "ON",
        "layer_offload_fraction": None,
        "video_config.max_duration": 8.0,
        "video_config.temporal_consistency_weight": 0.5,
        "video_config.video_batch_size_multiplier": 0.8,
        "video_config.frame_dropout_probability": 0.1,
        "video_config.temporal_augmentation": True,
    },
}
"""The guide's table, row by row; what trains is not rounded."""

OURS = {"steps", "lora.rank", "lora.targets", "sample.resolution"}
"""What the guide does not name and its presets say."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_asks_for_what_its_model_takes_and_says_what_is_not_known(name: str) -> None:
    spec, preset = spec_of(name), read_preset(name)
    config = resolve({}, preset, spec).config
    frames = preset.get("video_config", {}).get("frames")
    assert frames is None or frames == snap_frames(frames, spec.rules)
    parse_resolution(config.resolution, spec.rules)
    assert ("I2V" in name) == (spec.given == "concat")
    assert ("A14B" in name) == (len(spec.experts) == 2)
    assert config.first_frame_probability == spec.first_frame
    assert config.timestep_shift == ("resolution" if spec.shift_by_tokens else spec.timestep_shift)
    assert "memory not measured" in preset_about(name)


@pytest.mark.parametrize("name", ROWS)
def test_the_guides_presets_have_the_guides_numbers(name: str) -> None:
    config = resolve({}, read_preset(name), spec_of(name)).config
    settings, row = flatten(config.model_dump(mode="json")), EVERY | ROWS[name]
    assert {key: settings[key] for key in row} == row
    assert set(flatten(read_preset(name))) - OURS <= set(row), "nothing is added"
    assert config.weight_dtype in preset_about(name) or config.training_method == "FINE_TUNE"


@pytest.mark.parametrize("name", [name for name in preset_names() if f"#{name}.json" not in ROWS])
def test_what_is_not_the_guides_leaves_memory_to_the_plan(name: str) -> None:
    assert not set(OPEN) & set(read_preset(name))
