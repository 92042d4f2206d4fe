"""A step whose passes are repeated, because compiled blocks failed in the middle."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, trainer_of
from videotune.errors import VideotuneError
from videotune.memory.compiling import CompiledBlocks
from videotune.process_watch import ProcessLost
from videotune.trainer import step
from videotune.trainer.loop import train_loop
from videotune.trainer.repeated_passes import run_with_fallbacks

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


ROOM = torch.OutOfMemoryError("no room")
OTHER = RuntimeError("another reason")


class Passes:
    """The passes of a step, which fail with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.events: list[str] = []

    def run(self) -> None:
        self.events.append("passes")
        if self.errors:
            raise self.errors.pop(0)

    def start_again(self) -> None:
        self.events.append("again")


def graphs_of(passes: Passes, count: int) -> Any:
    class Graphs:
        def __len__(self) -> int:
            return count

        def give_up(self, reason: str) -> None:
            passes.events.append(f"give up: {reason}")

    return Graphs()


NO_ROOM = "give up: the device has no room for them beside the rest of a step"


def test_graphs_make_room_once_and_what_is_compiled_may_fail_after_it() -> None:
    for count in (1, 2):
        passes = Passes(ROOM)
        graphs = graphs_of(passes, count)
        run_with_fallbacks(passes.run, passes.start_again, None, graphs)
        assert passes.events == ["passes", "again", NO_ROOM, "passes"]

    compiled = CompiledBlocks()
    passes = Passes(ROOM, OTHER)
    graphs = graphs_of(passes, 1)
    run_with_fallbacks(passes.run, passes.start_again, compiled, graphs)
    assert passes.events == ["passes", "again", NO_ROOM, *["passes", "again"], "passes"]
    assert compiled.failure is not None

    for count in (None, 1):
        compiled = CompiledBlocks()
        passes = Passes(OTHER)
        graphs = None if count is None else graphs_of(passes, count)
        run_with_fallbacks(passes.run, passes.start_again, compiled, graphs)
        assert passes.events == ["passes", "again", "passes"]
        assert compiled.failure is not None
    # What has failed before is not compiled again, so the next error is the model's own.
    passes = Passes(OTHER)
    with pytest.raises(RuntimeError, match="another reason"):
        run_with_fallbacks(passes.run, passes.start_again, compiled, None)
    assert passes.events == ["passes"]


@pytest.mark.parametrize(
    ("count", "error", "is_compiled"),
    [
        (0, ROOM, False),
        (0, ROOM, True),
        (1, OTHER, False),
        (None, ROOM, False),
        (None, ROOM, True),
        (None, VideotuneError("a setting"), True),
    ],
)
def test_other_errors_are_the_step_s(
    count: int | None, error: Exception, is_compiled: bool
) -> None:
    passes = Passes(error)
    graphs = None if count is None else graphs_of(passes, count)
    compiled = CompiledBlocks() if is_compiled else None
    with pytest.raises(type(error), match=str(error)):
        run_with_fallbacks(passes.run, passes.start_again, compiled, graphs)
    assert passes.events == ["passes"]
