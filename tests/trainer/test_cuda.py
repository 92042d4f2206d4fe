"""What only a CUDA device can show.

Deselected where there is none; none of it has run on one yet.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import Bases, Patch, train
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_results import steps_of
from tests.support.tiny_networks import no_host_sync
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.models.hunyuan_video15 import HunyuanVideo15
from videotune.trainer.loop import train_steps

pytestmark = pytest.mark.cuda


def words(small_clips: Path, base: Path, cache: Path, *sets: str) -> Overrides:
    fixed = (
        f"base_model_name={base}",
        f"cache_dir={cache}",
        "resolution=32x32",
        "sample_after=0",
        "validate_every=0",
    )
    return Overrides(data=str(small_clips), sets=(*fixed, *sets))


@pytest.mark.parametrize("anchored", [False, True])
def test_no_step_waits_for_the_host(
    anchored: bool, small_clips: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    """torch raises at any operation that makes the host wait for the device, from the
    second step on.

    ``anchored``: every other clip is a regularization clip, for which the base model is
    asked too.
    """
    said = words(
        small_clips, tiny_bases("wan"), tmp_path / "cache", "steps=12", "batch_size=2"
    )
    trainer = build_trainer(
        open_run(said, tmp_path / "run").job, tmp_path / "run", False
    )
    if anchored:
        clips = dict(trainer.source.clips)
        clips |= {
            name: replace(clips[name], kind="regularization", target="base")
            for name in sorted(clips)[::2]
        }
        trainer.source = replace(trainer.source, clips=clips)
    records: Any = train_steps(trainer)
    late = [next(records)]
    with no_host_sync():
        late += [next(records) for _ in range(10)]
    assert all(math.isfinite(record.read()["loss"]) for record in late)
    trainer.journal.close()


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_a_run_on_the_device_follows_the_one_on_the_cpu(
    dtype: str, small_clips: Path, tiny_bases: Bases, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The draws are the same on both, so the losses agree as far as the dtype carries."""
    on_device = words(
        small_clips,
        tiny_bases("wan"),
        tmp_path / "a",
        "steps=5",
        f"train_dtype={dtype}",
    )
    assert train(on_device, tmp_path / "device") == DONE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = words(
        small_clips,
        tiny_bases("wan"),
        tmp_path / "b",
        "steps=5",
        "train_dtype=FLOAT_32",
    )
    assert train(on_cpu, tmp_path / "cpu") == DONE
    ours, theirs = (
        [line["loss"] for line in steps_of(tmp_path / run)] for run in ("device", "cpu")
    )
    assert ours == pytest.approx(theirs, rel=1e-3 if dtype == "FLOAT_32" else 5e-2)


@pytest.mark.parametrize("checkpointing", ["ON", "OFF"])
def test_passes_as_graphs_are_the_same_passes(
    checkpointing: str, small_clips: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    """Two passes a step, an average, validation between steps: the same losses to the
    bit, captured and not.
    """
    found = {}
    for graphs in ("true", "false"):
        sets = (
            f"cuda_graphs={graphs}",
            f"gradient_checkpointing={checkpointing}",
            *("steps=8", "batch_size=4", "micro_batch_size=2"),
            *("validate_every=4", "ema.decay=0.9", "train_dtype=FLOAT_32"),
            "deterministic=true",  # or sums of the backward pass differ from run to run
        )
        said = words(small_clips, tiny_bases("wan"), tmp_path / "cache", *sets)
        assert train(said, tmp_path / graphs) == DONE
        found[graphs] = [line["loss"] for line in steps_of(tmp_path / graphs)]
    assert found["true"] == found["false"]


def test_a_pass_that_no_graph_can_hold_runs_without_one(
    small_clips: Path,
    tiny_bases: Bases,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """HunyuanVideo 1.5 makes the host wait; here it is captured all the same."""
    base = tiny_bases("hunyuan_video15")
    monkeypatch.setattr(HunyuanVideo15, "no_cuda_graphs", None)
    said = words(small_clips, base, tmp_path / "cache", "steps=5")
    assert train(said, tmp_path / "run") == DONE
    assert len(steps_of(tmp_path / "run")) == 5
    assert "cuda_graphs: off" in "".join(capsys.readouterr())
