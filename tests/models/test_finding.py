"""What names a part's bytes, and which file stands for which expert."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from videotune.errors import VideotuneError
from videotune.models import model_files
from videotune.models.base_model import part_files
from videotune.models.model_files import fingerprint
from videotune.models.wan import Wan
from videotune.types import Expert, ModelSpec


@pytest.fixture
def two(tiny_bases: Callable[[str], Path]) -> ModelSpec:
    """The facts of a family with two experts."""
    spec = Wan.read_spec(tiny_bases("wan"))
    return replace(spec, experts=(Expert("high", 0.875, 1.0), Expert("low", 0.0, 0.875)))


def a_file(path: Path) -> str:
    save_file({"weight": torch.zeros(1)}, path)
    return str(path)


def test_files_go_to_the_experts_in_order(two: ModelSpec, tmp_path: Path) -> None:
    assert [two.part_of(name) for name in (None, "high", "low")] == ["transformer", "transformer", "transformer_2"]
    high, low = a_file(tmp_path / "model_high_noise.safetensors"), a_file(tmp_path / "model_low_noise.safetensors")
    assert part_files([high, low], two) == {"transformer": Path(high), "transformer_2": Path(low)}
    assert part_files([None, low], two) == {"transformer_2": Path(low)}
    assert part_files(None, two) == part_files([], two) == {}
    for given, said in (
        ([low, high], "model_low_noise.safetensors stands for the expert 'high', and is one for 'low' by its name"),
        (high, r"1 given; .* takes 2 \(high, low; null"),
        ([a_file(tmp_path / "a.safetensors")] * 2, "a.safetensors is given for two experts"),
        ([None, str(tmp_path / "none.safetensors")], "no such file"),
    ):
        with pytest.raises(VideotuneError, match=said):
            part_files(given, two)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(VideotuneError, match=r"it must be a \.safetensors file"):
        part_files([None, str(tmp_path / "a.gguf")], two)


def test_a_change_of_one_tensor_of_a_large_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 40 tensors in turn, small and large ones, although not a tenth of the file is read."""
    monkeypatch.setattr(model_files, "SAMPLED_ABOVE", 1 << 10)
    monkeypatch.setattr(model_files, "BLOCK", 1 << 10)
    path = tmp_path / "model.safetensors"
    tensors = {f"{i:02d}.{kind}": torch.zeros(size) for i in range(20) for kind, size in (("w", 1 << 14), ("b", 8))}
    seen = set()
    for changed in (None, *tensors):
        value = {name: tensor + (name == changed) for name, tensor in tensors.items()}
        save_file(value, path)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(tensors)
    assert sum(length for _, length in model_files._blocks(path, path.stat().st_size)) < path.stat().st_size / 10
