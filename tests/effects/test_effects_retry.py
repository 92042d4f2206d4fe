"""A step that has no room ends the run with its state saved, or is tried once more with what needs less memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, lines_of, overrides_of
from tests.failing_forward import failing_forward
from tests.shell import train
from videotune.errors import DONE, DoesNotFit


@pytest.mark.effect("out_of_memory")
def test_a_step_is_retried_where_it_is_allowed_and_ends_the_run_where_not(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(run: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / run / "checkpoints" / "step-4" / "weights.safetensors")

    assert train(overrides_of(lab), tmp_path / "straight") == DONE
    with failing_forward(3), pytest.raises(DoesNotFit, match="out of memory in step 3"):
        train(overrides_of(lab, {"out_of_memory": "stop"}), tmp_path / "stopped")
    with failing_forward(3):
        assert train(overrides_of(lab, {"out_of_memory": "retry"}), tmp_path / "again") == DONE
    assert "Trying once more with gradient_checkpointing=ON" in capsys.readouterr().err
    straight, again = weights("straight"), weights("again")
    assert all(torch.equal(again[name], value) for name, value in straight.items())
    assert any("out of memory in step 3" in line["text"] for line in lines_of(tmp_path / "again", "warning"))
    (resumed,) = lines_of(tmp_path / "again", "resume")
    assert resumed["from_step"] == 2
    assert resumed["changes"] == ["gradient_checkpointing: 'OFF' -> 'ON'"]
