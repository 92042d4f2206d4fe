"""What ``deterministic`` asks of torch while a run's steps are made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, overrides_of
from tests.shell import train
from videotune.errors import DONE, VideotuneError
from videotune.trainer import loop
from videotune.trainer.trainer import Trainer


@pytest.mark.effect("deterministic")
def test_deterministic_kernels_are_asked_for_in_every_step_and_then_no_more(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = loop.step_records
    asked: list[bool] = []
    unsafe = False

    def with_hook(trainer: Trainer) -> Any:
        def hook(module: Any, given: Any) -> None:
            asked.append(torch.are_deterministic_algorithms_enabled())
            if unsafe:  # of the few operations that have no deterministic kernel on a CPU
                torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))

        trainer.net.register_forward_pre_hook(hook)
        return make(trainer)

    monkeypatch.setattr(loop, "step_records", with_hook)

    def go(run: str, **more: Any) -> int:
        return train(overrides_of(lab, {"steps": 2, **more}), tmp_path / run)

    assert go("plain") == DONE
    assert asked == [False, False]
    assert go("same", deterministic=True) == DONE
    assert asked == [False, False, True, True]
    assert not torch.are_deterministic_algorithms_enabled()
    unsafe = True
    assert go("unsafe") == DONE
    with pytest.raises(VideotuneError, match="deterministic: an operation of this model cannot promise the same bits"):
        go("refused", deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
