"""YAML configs hold the same keys, with comments, and numbers as people write them."""

from pathlib import Path

from videotune.config.load import read_config
from videotune.config.resolve import resolve


def test_yaml_is_json_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "# a run\nlearning_rate: 1e-4  # slow\nresolution: 64x64\nlora:\n  rank: 8\nsamples: [a cat, 1e3 dogs]\n"
    )
    config = resolve(read_config(path), {}, None).config
    assert (config.learning_rate, config.resolution, config.lora.rank) == (1e-4, "64x64", 8)
    assert config.samples == ["a cat", "1e3 dogs"]
