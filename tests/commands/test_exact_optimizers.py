"""A run that stops and goes on is the run that never stopped, whatever its optimizer."""

from pathlib import Path
from typing import Any

import pytest

from tests.commands.safety_kit import (
    Finished,
    Make,
    assert_same_run,
    equal,
    resume,
    state,
    steps_of,
    warnings_of,
)
from tests.runs import open_run, prepare
from tests.shell import train
from videotune.config.resolve import parse
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.planner.plan import bytes_a_parameter
from videotune.trainer.distributed import DistributedContext

FULL = ("training_method=FINE_TUNE", "train_dtype=BFLOAT_16", "learning_rate=0.001")

KINDS = {
    "PRODIGY": ("optimizer=PRODIGY", "learning_rate=1"),
    "MUON": ("optimizer=MUON", "timestep_stratified=true", "batch_size=2", "ema=0.5"),
    "ADAFACTOR": ("optimizer=ADAFACTOR", "timestep_distribution=BETA"),
    "LION_8BIT": ("optimizer=LION_8BIT", "lora.rank=64"),
    "rounded by chance": (*FULL, "optimizer.masters=STOCHASTIC_ROUNDING", "ema=0.5"),
    "rounded by chance within backward": (
        *FULL,
        "optimizer.masters=STOCHASTIC_ROUNDING",
        "optimizer.step_in_backward=true",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_never_stopped(
    kind: str, overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    assert train(overrides(*KINDS[kind], "steps=2", "save_every=2"), tmp_path / "run") == DONE
    assert resume(tmp_path / "run", "steps=4", "save_every=4") == DONE
    assert_same_run(tmp_path / "run", finished(*KINDS[kind], "steps=4", "save_every=4"), 4)


def test_a_loss_that_is_not_finite_updates_nothing_within_backward(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is given a loss that is not a number."""
    from videotune.trainer import step as step_module

    true, calls = step_module.denoising_loss, []

    def spoilt(*given: Any) -> Any:
        out = true(*given)
        calls.append(out)
        return type(out)(out.loss * float("nan"), out.mse, out.per_clip, out.t) if len(calls) == 2 else out

    monkeypatch.setattr(step_module, "denoising_loss", spoilt)
    run = tmp_path / "run"
    train(overrides("steps=3", "save_every=1", "optimizer.step_in_backward=true"), run)
    assert [line.get("skipped", False) for line in steps_of(run)] == [False, True, False]
    assert equal(state(run, 1), state(run, 2))
    assert not equal(state(run, 2), state(run, 3))
    (text,) = warnings_of(run)
    assert "step not applied: " in text
    assert "but for the tensors" not in text


def test_several_processes_cannot_update_within_backward(overrides: Make, tmp_path: Path) -> None:

    job = open_run(overrides("optimizer.step_in_backward=true"), tmp_path / "run", None).job
    with pytest.raises(VideotuneError, match="gradients of 2 processes have to be summed"):
        prepare(job, tmp_path / "run", dist=DistributedContext(0, 2))


@pytest.mark.parametrize("kind", ["ADAMW", "ADAMW_8BIT", "LION", "LION_8BIT", "MUON", "PRODIGY", "ADAFACTOR"])
def test_the_plan_knows_how_large_a_checkpoint_gets(kind: str, finished: Finished) -> None:
    """To a tenth of what lies there, and never much less; small matrices are kept in float32 whatever their optimizer."""
    rate = ("learning_rate=1",) if kind == "PRODIGY" else ()
    run = finished(f"optimizer={kind}", "lora.rank=256", "steps=1", "ema=0.9", *rate)
    there = sum(value.numel() * value.element_size() for value in state(run, 1).values())
    plan, config = read_json(run / "plan.json"), parse(read_json(run / "config.json")["settings"])
    planned = plan["disk"]["checkpoint_bytes"]
    assert planned == bytes_a_parameter(config) * plan["adapter"]["parameters"]
    assert 0.9 * there <= planned <= 1.25 * there
