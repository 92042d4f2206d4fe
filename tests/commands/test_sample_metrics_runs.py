"""Samples that are measured while a run trains: what they cost and leave behind, and that nothing of the run moves."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.safety_kit import Finished, Make, assert_same_run, of_kind, resume, warnings_of
from tests.shell import train
from videotune.errors import DONE, INTERRUPTED
from videotune.files import read_json
from videotune.trainer.resolve_config import resolve_config
from videotune.trainer.run_spec import open_job
from videotune.types import ClipShape, VideoRules
from videotune.validation import sample_metrics as probes
from videotune.validation.overhead import share_of_run
from videotune.validation.sample_plan import (
    metric_prompts,
    metric_shape,
    sample_metrics_plan,
)

SETS = ("steps=4", "save_every=2", "ema.decay=0.5")
PROBED = ("sample_metrics.budget=100000", "sample_metrics.steps=1", "sample_metrics.samples=4", "sample.guidance=1")


@pytest.fixture(scope="module")
def two(overrides: Make, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run with sample metrics, stopped after its second step and resumed, and without, in one go."""
    run = tmp_path_factory.mktemp("probed") / "run"
    run.mkdir()
    (run / "control.json").write_text('{"stop": true}')
    assert train(overrides(*SETS, *PROBED), run) == INTERRUPTED
    assert resume(run) == DONE
    return run, finished(*SETS)


def test_sample_metrics_change_nothing_of_the_training(two: tuple[Path, Path]) -> None:
    """Bit for bit, with an average of the weights too, over a stop and a resume."""
    run, quiet = two
    assert_same_run(run, quiet, 4)
    assert of_kind(quiet, "sample_metrics") == []
    assert not (quiet / "sample_metrics").exists()


def test_metrics_at_each_checkpoint_and_before_the_first_step(two: tuple[Path, Path]) -> None:
    run, _ = two
    lines = of_kind(run, "sample_metrics")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(run) == []
    assert len({line["sample_metrics"] for line in lines}) == 1
    paths = {sample["path"] for line in lines for sample in line["samples"]}
    assert paths == {path.relative_to(run).as_posix() for path in (run / "sample_metrics").glob("*.mp4")}
    assert len(paths) == 12
    known = {clip["path"] for clip in read_json(run / "check.json")["clips"]}
    assert {sample["clip"] for line in lines for sample in line["samples"]} <= known
    first, last = lines[0], lines[-1]
    assert first["motion"]["energy"]["to_base"] == first["diversity"]["to_base"] == 1
    assert last["replication"]["base"] == first["replication"]["mean"]
    assert last["motion"]["energy"]["base"] == first["motion"]["energy"]["value"]
    assert last["motion"]["energy"]["value"] != first["motion"]["energy"]["value"], "what was learnt is seen"
    assert all(line["seconds"] > 0 for line in lines)


KINDS = {
    "two experts": ("t2v-a14b", ("expert_period=1", "expert_share=0.5")),
    "new tokens": ("t2v", ("training_method=EMBEDDING", "embedding.token=<zorble>", "learning_rate=2")),
    "text encoder": ("t2v", ("training_method=FINE_TUNE", "text_encoder.train=true", "lora.rank=2")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_trained_is_measured(kind: str, overrides: Make, finished: Finished, tmp_path: Path) -> None:
    """Of two experts, and of captions encoded in the step: what was learnt is seen, and nothing of the training moves."""
    variant, more = KINDS[kind]
    sets, run = ("steps=4", "save_every=2", *more), tmp_path / "run"
    assert train(overrides(*sets, *PROBED, base=("wan", variant)), run) == DONE
    assert_same_run(run, finished(*sets, base=("wan", variant)), 4)
    lines = of_kind(run, "sample_metrics")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(run) == []
    energy = [line["motion"]["energy"] for line in lines]
    assert energy[0]["to_base"] == 1
    assert len({one["value"] for one in energy}) == 3


def test_other_settings_than_the_base_s_are_not_measured(two: tuple[Path, Path], tmp_path: Path) -> None:
    """The base's samples are made once and kept."""
    run = shutil.copytree(two[0], tmp_path / "run")
    with np.load(run / "sample_metrics" / "base.npz") as file:
        assert file["films"].shape == (4, 5, 16, 16, 3)
    assert (
        read_json(run / "sample_metrics.json")["reading"]["name"] == of_kind(run, "sample_metrics")[0]["sample_metrics"]
    )
    assert len(list((run / "sample_metrics").glob("step-000000-*.mp4"))) == 4
    assert resume(run, "steps=6", "sample_metrics.steps=2") == DONE
    assert "no longer those" in of_kind(run, "sample_metrics")[-1]["not_measured"]


def test_another_encoder_on_a_resume_compares_the_base_s_samples_anew(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie there as pixels, so the last measurement compares with them by the new encoder."""
    run = shutil.copytree(two[0], tmp_path / "run")
    other = replace(probes.default_embedding(), name="edges-0")
    monkeypatch.setattr(probes, "default_embedding", lambda: other)
    before = (run / "sample_metrics" / "base.npz").read_bytes()
    assert resume(run, "steps=6") == DONE
    *_, old, new = of_kind(run, "sample_metrics")
    assert (new["step"], new["embedding"]) == (6, "edges-0")
    assert new["sample_metrics"] != old["sample_metrics"]
    assert new["replication"]["base"] == old["replication"]["base"]
    assert (run / "sample_metrics" / "base.npz").read_bytes() == before


def test_a_failing_measurement_is_a_warning(overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such picture")

    monkeypatch.setattr(probes, "measured", fail)
    assert train(overrides("steps=1", *PROBED), tmp_path / "run") == DONE
    assert warnings_of(tmp_path / "run") == [
        f"the sample metrics at step {step} failed: RuntimeError: no such picture" for step in (0, 1)
    ]
    assert of_kind(tmp_path / "run", "sample_metrics") == []


def test_samples_have_the_smallest_shape_of_the_model() -> None:
    rules = VideoRules(frame_step=4, frame_rest=1, side_multiple=16, fps=16, spatial_stride=8, temporal_stride=4)
    assert metric_shape(ClipShape(17, 480, 832, 16.0), rules) == ClipShape(5, 240, 416, 16.0)
    assert metric_shape(ClipShape(17, 16, 48, 16.0), rules) == ClipShape(5, 16, 16, 16.0)
    assert metric_shape(ClipShape(1, 64, 64, 16.0), rules) == ClipShape(1, 32, 32, 16.0)
    only = VideoRules(0, 49, 16, 8, 8, 4, most_frames=49, size=(480, 720))
    assert metric_shape(ClipShape(49, 480, 720, 8.0), only) == ClipShape(49, 480, 720, 8.0)


def test_what_is_sampled_and_its_share_of_the_run(overrides: Make) -> None:
    """The captions of clips, the same seeds for each; twice the steps of the run halve the share."""

    def job_of(*sets: str) -> Any:
        return open_job(*resolve_config(overrides("sample_metrics.budget=0.05", *sets)))

    job = job_of("steps=100", "sample_metrics.samples=6", "sample_metrics.steps=3", "sample.guidance=2")
    plan = sample_metrics_plan(job)
    assert plan is not None
    captions = {caption for clip in job.library.clips for caption in clip.captions}
    assert len(plan.prompts) == 2
    assert set(plan.prompts) <= captions
    assert plan.pairs == [(0, 42), (1, 42), (0, 43), (1, 43), (0, 44), (1, 44)]
    assert share_of_run(plan, job_of("steps=200")) == pytest.approx(share_of_run(plan, job) / 2)
    tokens = job.spec.tokens(plan.settings.shape)
    windows = [job.spec.tokens(window.shape) for window in job.training_windows]
    assert share_of_run(plan, job) == pytest.approx(6 * 3 * 2 * tokens / (3 * 100 * sum(windows) / len(windows)))
    assert metric_prompts(job_of("sample_metrics.budget=0")) == []


def test_first_frames_of_samples_are_those_of_clips(overrides: Make) -> None:
    """Where none is held out, of training clips; in the windows' own shape, since that is what is cached."""
    job = open_job(*resolve_config(overrides("sample_metrics.budget=0.05", base=("wan", "i2v"))))
    plan = sample_metrics_plan(job)
    assert plan is not None
    assert len(plan.first) == len(plan.prompts) == 2
    assert all(str(window.shape) == str(plan.settings.shape) for window in plan.first)
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert all(prompt in captions[window.clip_id] for prompt, window in zip(plan.prompts, plan.first, strict=True))
