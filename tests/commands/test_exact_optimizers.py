"""A run that stops and goes on is the run that never stopped, whatever its optimizer and its adapter."""

from pathlib import Path

import pytest

from tests.commands.safety_kit import (
    Finished,
    Make,
    assert_same_run,
    resume,
    state,
)
from tests.runs import open_run, prepare
from tests.shell import train
from videotune.config.resolve import parse
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.planner.plan import bytes_a_parameter
from videotune.trainer.distributed import DistributedContext

FULL = ("training_method=FINE_TUNE", "train_dtype=BFLOAT_16", "learning_rate=0.001")

ADAPTER = ("lora.rank=4", "lora.targets=linear")
SCALED = (*ADAPTER, "lora.alpha=6", "lora.dropout=0.2")
ROUNDED = (*FULL, "optimizer.masters=STOCHASTIC_ROUNDING")
KINDS = {
    "PRODIGY": ("optimizer=PRODIGY", "learning_rate=1"),
    "MUON": ("optimizer=MUON", "timestep_stratified=true", "batch_size=2", "ema=0.5"),
    "LION_8BIT": ("optimizer=LION_8BIT", "lora.rank=64", "timestep_distribution=BETA"),
    "rounded by chance": (*ROUNDED, "ema=0.5"),
    "rounded by chance within backward": (*ROUNDED, "optimizer.step_in_backward=true"),
    **{kind: (f"lora.variant={kind}", *SCALED) for kind in ("DORA", "LOHA", "LOKR")},
    "OFT": ("lora.variant=OFT", *ADAPTER),
    "layers": (*FULL, 'transformer.layers=["blocks.1.attn1", "norm2"]'),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_never_stopped(
    kind: str, overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    assert train(overrides(*KINDS[kind], "steps=2", "save_every=2"), tmp_path / "run") == DONE
    assert resume(tmp_path / "run", "steps=4", "save_every=4") == DONE
    assert_same_run(tmp_path / "run", finished(*KINDS[kind], "steps=4", "save_every=4"), 4)


def test_several_processes_cannot_update_within_backward(overrides: Make, tmp_path: Path) -> None:

    job = open_run(overrides("optimizer.step_in_backward=true"), tmp_path / "run", None).job
    with pytest.raises(VideotuneError, match="gradients of 2 processes have to be summed"):
        prepare(job, tmp_path / "run", dist=DistributedContext(0, 2))


@pytest.mark.parametrize("kind", ["ADAMW", "LION_8BIT", "MUON"])
def test_the_plan_knows_how_large_a_checkpoint_gets(kind: str, finished: Finished) -> None:
    """To a tenth of what lies there, and never much less; small matrices are kept in float32 whatever their optimizer."""
    run = finished(f"optimizer={kind}", "lora.rank=256", "steps=1", "ema=0.9")
    there = sum(value.numel() * value.element_size() for value in state(run, 1).values())
    plan, config = read_json(run / "plan.json"), parse(read_json(run / "config.json")["settings"])
    planned = plan["disk"]["checkpoint_bytes"]
    assert planned == bytes_a_parameter(config) * plan["adapter"]["parameters"]
    assert 0.9 * there <= planned <= 1.25 * there
