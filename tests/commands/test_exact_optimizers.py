"""A run that stops and goes on is the run that never stopped, whatever its optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.safety_kit import Make
from tests.runs import open_run, prepare
from tests.shell import train
from videotune.errors import VideotuneError
from videotune.planner.plan import bytes_a_parameter
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.distributed import DistributedContext
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume

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


def state_of(run: Path) -> dict[str, torch.Tensor]:
    newest = complete_checkpoints(run)[-1]
    parts = ["weights", "optimizer", *(["ema"] if newest.has_ema else [])]
    return {f"{part} {name}": value for part in parts for name, value in newest.load(part).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_gone_on_is_never_having_stopped(kind: str, overrides: Make, tmp_path: Path) -> None:
    words = overrides(*KINDS[kind], "steps=4", "save_every=4")
    train(words, tmp_path / "whole")
    again = tmp_path / "again"
    train(overrides(*KINDS[kind], "steps=2", "save_every=2"), again)
    train(Overrides(sets=("steps=4", "save_every=4")), again, resume=Resume())
    one, other = state_of(tmp_path / "whole"), state_of(again)
    assert set(one) == set(other)
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
    lines = [[line["loss"], line["grad_norm"]] for line in read_journal(again) if line["kind"] == "step"]
    assert lines == [[x["loss"], x["grad_norm"]] for x in read_journal(tmp_path / "whole") if x["kind"] == "step"]


def test_a_loss_that_is_not_finite_is_told_and_updates_nothing_within_backward(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is given a loss that is not a number."""
    from videotune.trainer import step as room

    true, calls = room.denoising_loss, []

    def spoilt(*told: Any) -> Any:
        out = true(*told)
        calls.append(out)
        return type(out)(out.loss * float("nan"), out.mse, out.per_clip, out.t) if len(calls) == 2 else out

    monkeypatch.setattr(room, "denoising_loss", spoilt)
    run = tmp_path / "run"
    train(overrides("steps=3", "save_every=1", "optimizer.step_in_backward=true"), run)
    steps = {line["step"]: line for line in read_journal(run) if line["kind"] == "step"}
    assert [steps[k].get("skipped", False) for k in (1, 2, 3)] == [False, True, False]
    first, second, third = (one.load("weights") for one in complete_checkpoints(run))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, third[name]) for name, value in second.items())
    (text,) = [line["text"] for line in read_journal(run) if line["kind"] == "warning"]
    assert "step not applied: " in text
    assert "but for the tensors" not in text


def test_several_processes_cannot_update_within_backward(overrides: Make, tmp_path: Path) -> None:

    job = open_run(overrides("optimizer.step_in_backward=true"), tmp_path / "run", None).job
    with pytest.raises(VideotuneError, match="gradients of 2 processes have to be summed"):
        prepare(job, tmp_path / "run", dist=DistributedContext(0, 2))


@pytest.mark.parametrize("kind", ["ADAMW", "ADAMW_8BIT", "LION", "LION_8BIT", "MUON", "PRODIGY", "ADAFACTOR"])
def test_the_plan_knows_how_large_a_checkpoint_gets(kind: str, overrides: Make, tmp_path: Path) -> None:
    """To a tenth of what lies there, and never much less; small matrices are kept in float32 whatever their optimizer."""
    words = overrides(
        f"optimizer={kind}", "lora.rank=256", "steps=1", "ema=0.9", *(["learning_rate=1"] if kind == "PRODIGY" else [])
    )
    train(words, tmp_path / "run")
    (saved,) = complete_checkpoints(tmp_path / "run")
    there = sum(
        v.numel() * v.element_size() for part in ("weights", "optimizer", "ema") for v in saved.load(part).values()
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    job_bytes = plan["disk"]["checkpoint_bytes"]
    assert job_bytes == bytes_a_parameter(_config(tmp_path / "run")) * plan["adapter"]["parameters"]
    assert 0.9 * there <= job_bytes <= 1.25 * there


def _config(run: Path) -> Any:
    from videotune.config.resolve import parse

    return parse(json.loads((run / "config.json").read_text())["settings"])
