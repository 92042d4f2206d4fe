"""A step whose passes are repeated, because compiled blocks failed in the middle."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, trainer_of
from videotune.memory.compiling import CompiledBlocks
from videotune.process_watch import ProcessLost
from videotune.trainer import step
from videotune.trainer.loop import train_loop

HALF = {
    "training_method": "FINE_TUNE",
    "train_dtype": "BFLOAT_16",
    "resolution": "32x32",
    "gradient_accumulation_steps": 2,
    "steps": 1,
    "learning_rate": 0.01,
}


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


@pytest.mark.parametrize("knobs", [HALF, {**HALF, "train_dtype": "FLOAT_32"}])
def test_each_sample_of_a_repeated_step_counts_once(
    lab: Lab, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two passes has left its gradients where the second one fails: with
    masters in the network, which the optimizer does not hold.
    """
    undisturbed = trainer_of(lab, knobs)
    train_loop(undisturbed)

    trainer = trainer_of(lab, knobs)
    trainer.pool.compiled = CompiledBlocks()
    plain_pass = step.forward_pass
    calls = 0

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the compiler failed")
        return plain_pass(*args, **kwargs)

    monkeypatch.setattr(step, "forward_pass", failing_once)
    train_loop(trainer)
    assert calls == 4, "two passes, both repeated"
    assert trainer.pool.compiled.failure is not None
    for name, parameter in undisturbed.parameters.items():
        assert torch.equal(trainer.parameters[name], parameter), name


def test_a_process_that_is_lost_in_a_compiled_pass_is_no_failure_of_the_compiler(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is not repeated: its messages would wait for that process."""
    calls = []
    trainer = trainer_of(lab, HALF)
    trainer.pool.compiled = CompiledBlocks()

    def losing(*inputs: Any) -> Any:
        calls.append(inputs)
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(step, "forward_pass", losing)
    with pytest.raises(ProcessLost, match="another process of the run is gone"):
        train_loop(trainer)
    assert len(calls) == 1
    assert trainer.pool.compiled.failure is None
