"""Wan's presets fit the models that they name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from videotune.config.load import preset_about, preset_names, read_preset
from videotune.config.resolve import resolve
from videotune.families.wan import read_spec

KINDS = {
    "wan 2.1 1.3B LoRA 16GB": "t2v",
    "wan 2.1 14B LoRA 48GB": "t2v",
    "wan 2.1 I2V 14B LoRA 48GB": "i2v",
    "wan 2.2 LoRA": "ti2v",
    "wan 2.2 A14B LoRA 48GB": "t2v-a14b",
    "wan 2.2 A14B I2V LoRA 48GB": "i2v-a14b",
}


def test_all_presets_are_looked_at() -> None:
    assert set(KINDS) == {name for name in preset_names() if name.startswith("wan")}


@pytest.mark.parametrize("name", KINDS)
def test_a_preset_resolves_for_its_model_and_says_what_is_not_known(name: str, tiny_bases: Callable[..., Path]) -> None:
    spec = read_spec(tiny_bases("wan", KINDS[name]))
    config = resolve({}, read_preset(name), spec).config
    assert ("I2V" in (config.base_model_name or "").replace("TI2V", "")) == (spec.given == "concat")
    assert ("A14B" in (config.base_model_name or "")) == (len(spec.experts) == 2)
    assert config.first_frame_probability == spec.first_frame
    assert config.timestep_shift == spec.timestep_shift
    assert "memory not measured" in preset_about(name)


def test_the_guides_preset_has_the_guides_numbers(tiny_bases: Callable[..., Path]) -> None:
    config = resolve({}, read_preset("#wan 2.2 LoRA.json"), read_spec(tiny_bases("wan", "ti2v"))).config
    assert (config.batch_size, config.learning_rate, config.resolution) == (2, 3e-4, 512)
    assert (config.video_config.max_frames, config.video_config.temporal_consistency_weight) == (16, 1.0)
    assert (config.timestep_distribution, config.training_method) == ("LOGIT_NORMAL", "LORA")
    assert config.video_config.target_fps == 24.0
