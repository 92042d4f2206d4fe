"""Checkpoints are complete or absent."""

from pathlib import Path

import pytest
import torch

from videotune.errors import VideotuneError
from videotune.train.state import MARKER, Checkpoint, complete_checkpoints, last_checkpoint, save_checkpoint

ADAPTER = {"a.lora_A.weight": torch.arange(6.0).view(2, 3)}
MOMENTS = {"a.lora_A.weight.exp_avg": torch.ones(2, 3), "a.lora_A.weight.step": torch.tensor(7.0)}


def save(run: Path, step: int, state: dict[str, int] | None = None, kind: str = "save") -> Checkpoint:
    return save_checkpoint(run, step, {"weights": ADAPTER, "optimizer": MOMENTS}, state or {}, kind)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 7, {"seed": 3})
    last = last_checkpoint(tmp_path)
    adapter, moments, state = last.load("weights"), last.load("optimizer"), last.state()
    assert torch.equal(adapter["a.lora_A.weight"], ADAPTER["a.lora_A.weight"])
    assert all(torch.equal(moments[key], value) for key, value in MOMENTS.items())
    assert state == {"step": 7, "seed": 3}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-7"], "nothing is left beside it"


def test_only_complete_ones_count(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step-100" / MARKER).unlink()
    (tmp_path / "checkpoints" / ".step-200.part").mkdir()
    assert [c.step for c in complete_checkpoints(tmp_path)] == [3, 20]
    assert last_checkpoint(tmp_path).step == 20
    save(tmp_path, 100)
    assert last_checkpoint(tmp_path).step == 100, "an incomplete one is written anew"


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="not finite"):
        save_checkpoint(tmp_path, 1, {"weights": {"w": torch.tensor([1.0, float("nan")])}}, {})
    assert complete_checkpoints(tmp_path) == []


def test_missing_pieces_are_errors(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="no complete checkpoint"):
        last_checkpoint(tmp_path)
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-1" / "optimizer.safetensors").unlink()
    with pytest.raises(VideotuneError, match=r"step 1: optimizer\.safetensors is missing"):
        last_checkpoint(tmp_path)


def test_a_torn_file_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    checkpoint, whole = last_checkpoint(tmp_path), (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(whole[:-4])
    with pytest.raises(VideotuneError, match="cannot be read"):
        checkpoint.load("weights")
    with pytest.raises(VideotuneError, match=rf"{len(whole) - 4} bytes of {len(whole)}"):
        last_checkpoint(tmp_path)
