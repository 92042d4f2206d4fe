"""YAML configs hold the same keys, with comments, and numbers as people write them."""

from pathlib import Path

import pytest

from videotune.config.load import read_config
from videotune.config.resolve import resolve
from videotune.errors import VideotuneError


def test_yaml_is_json_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    numbers = (
        "# a run\nlearning_rate: 1e-4  # slow\nresolution: 64x64\nlora:\n  rank: 8\n"
    )
    path.write_text(numbers + "samples: [a cat, 1e3 dogs]\n")
    config = resolve(read_config(path), {}, None).config
    assert (config.learning_rate, config.resolution, config.lora.rank) == (
        1e-4,
        "64x64",
        8,
    )
    assert config.samples == ["a cat", "1e3 dogs"]


@pytest.mark.parametrize(
    "text", ["017", "1:30", "1_000", "0x10", "0b11", "on", "2026-11-22", "2026-13-45"]
)
def test_words_that_yaml_1_1_takes_for_numbers_are_refused(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"steps: {text}\n")
    with pytest.raises(VideotuneError, match=text):
        resolve(read_config(path), {}, None)


def test_plain_words_stay_words_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "gradient_checkpointing: on\nsamples: [no, 1:30, 2026-11-22]\nsave_every: 7\nsteps: ~\n"
    )
    config = resolve(read_config(path), {}, None).config
    assert (config.gradient_checkpointing, config.samples) == (
        "ON",
        ["no", "1:30", "2026-11-22"],
    )
    assert (config.save_every, config.steps) == (7, 2000)
