"""A step that has no room ends the run with its state saved, or is tried once more with what needs less memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import BASE, Lab
from tests.shell import train
from videotune.errors import DONE, DoesNotFit
from videotune.trainer import loop
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.trainer import Trainer


def fail_once(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The network has no room at this step, the first time that it comes."""
    make, failed = loop.step_records, []

    def with_hook(trainer: Trainer) -> Any:
        passes: list[int] = []

        def hook(module: Any, given: Any) -> None:
            passes.append(1)
            if len(passes) == step and not failed:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        trainer.net.register_forward_pre_hook(hook)
        return make(trainer)

    monkeypatch.setattr(loop, "step_records", with_hook)


@pytest.mark.effect("out_of_memory")
def test_another_try_where_it_is_allowed_and_an_end_where_not(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"base_model_name": str(lab.model), "cache_dir": str(lab.cache), "datasets": [{"path": str(lab.clips)}]}

    def words(**more: Any) -> Overrides:
        return Overrides(sets=tuple(f"{key}={json.dumps(value)}" for key, value in {**BASE, **places, **more}.items()))

    def weights(run: Path) -> dict[str, torch.Tensor]:
        return load_file(run / "checkpoints" / "step-4" / "weights.safetensors")

    assert train(words(), tmp_path / "straight") == DONE
    fail_once(monkeypatch, 3)
    with pytest.raises(DoesNotFit, match="out of memory in step 3"):
        train(words(out_of_memory="stop"), tmp_path / "stopped")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fail_once(monkeypatch, 3)
    assert train(words(out_of_memory="retry"), tmp_path / "again") == DONE
    assert "Trying once more with gradient_checkpointing=ON" in capsys.readouterr().err
    straight, again = weights(tmp_path / "straight"), weights(tmp_path / "again")
    assert all(torch.equal(again[name], value) for name, value in straight.items())
    lines = read_journal(tmp_path / "again")
    assert any(line["kind"] == "warning" and "out of memory in step 3" in line["text"] for line in lines)
    (resumed,) = [line for line in lines if line["kind"] == "resume"]
    assert resumed["from_step"] == 2
    assert resumed["changes"] == ["gradient_checkpointing: 'OFF' -> 'ON'"]
