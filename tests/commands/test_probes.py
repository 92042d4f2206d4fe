"""Samples that are measured while a run trains: what they cost and leave behind, and that nothing of the run moves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.safety_kit import equal, facts_of, of_kind, state, warnings_of
from tests.shell import train
from videotune.errors import DONE, INTERRUPTED
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.resume import Resume
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
def two(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same run with probes, stopped after its second step and taken up again, and without, in one go."""
    folder = tmp_path_factory.mktemp("probed")
    fixed = (
        "resolution=32x32",
        "learning_rate=0.01",
        "lora.rank=2",
        "sample_after=0",
        "validate_every=0",
        "warmup_steps=0",
    )
    places = (f"base_model_name={tiny_bases('wan')}", f"cache_dir={folder / 'cache'}", "dataloader_threads=0")
    quiet = Overrides(data=str(small_clips), sets=(*fixed, *places, *SETS, "sample_metrics.budget=0"))
    assert train(quiet, folder / "quiet") == DONE
    (folder / "run").mkdir()
    (folder / "run" / "control.json").write_text('{"stop": true}')
    probed = Overrides(data=str(small_clips), sets=(*fixed, *places, *SETS, *PROBED))
    assert train(probed, folder / "run") == INTERRUPTED
    assert train(Overrides(), folder / "run", resume=Resume()) == DONE
    return folder / "run", folder / "quiet"


def test_probes_change_nothing_of_the_training(two: tuple[Path, Path]) -> None:
    """Bit for bit, with an average of the weights too, over a stop and a resume."""
    run, quiet = two
    assert equal(state(run, 4), state(quiet, 4))
    assert facts_of(run) == facts_of(quiet)
    assert of_kind(quiet, "probe") == []
    assert not (quiet / "probe").exists()


def test_a_probe_at_each_checkpoint_and_before_the_first_step(two: tuple[Path, Path]) -> None:
    run, _ = two
    lines = of_kind(run, "probe")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(run) == []
    assert len({line["probe"] for line in lines}) == 1
    paths = {sample["path"] for line in lines for sample in line["samples"]}
    assert paths == {path.relative_to(run).as_posix() for path in (run / "probe").glob("*.mp4")}
    assert len(paths) == 12
    known = {clip["path"] for clip in json.loads((run / "check.json").read_text())["clips"]}
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
    "text encoder": ("t2v", ("training_method=FINE_TUNE", "text_encoder.train=true")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_trained_is_probed(
    kind: str, said: Callable[..., Overrides], tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Of two experts, and of captions encoded in the step: what was learnt is seen, and nothing of the training moves."""
    variant, more = KINDS[kind]
    base = tiny_bases("wan", variant)
    sets = ("steps=4", "save_every=2", f"base_model_name={base}", f"cache_dir={tmp_path / 'cache'}", *more)
    assert train(said(*sets), tmp_path / "quiet") == DONE
    assert train(said(*sets, *PROBED), tmp_path / "run") == DONE
    assert equal(state(tmp_path / "run", 4), state(tmp_path / "quiet", 4))
    assert facts_of(tmp_path / "run") == facts_of(tmp_path / "quiet")
    lines = of_kind(tmp_path / "run", "probe")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(tmp_path / "run") == []
    energy = [line["motion"]["energy"] for line in lines]
    assert energy[0]["to_base"] == 1
    assert len({one["value"] for one in energy}) == 3


def test_the_bases_samples_are_drawn_once_and_kept(two: tuple[Path, Path]) -> None:
    run, _ = two
    with np.load(run / "probe" / "base.npz") as file:
        assert file["films"].shape == (4, 5, 16, 16, 3)
    assert json.loads((run / "probe.json").read_text())["reading"]["name"] == of_kind(run, "probe")[0]["probe"]
    assert len(list((run / "probe").glob("step-000000-*.mp4"))) == 4


def test_another_embedding_on_the_way_reads_the_bases_samples_anew(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie there as pixels, so the last reading compares with them by the new measure."""
    run = tmp_path / "run"
    shutil.copytree(two[0], run)
    other = replace(probes.default_embedding(), name="edges-0")
    monkeypatch.setattr(probes, "default_embedding", lambda: other)
    before = (run / "probe" / "base.npz").read_bytes()
    assert train(Overrides(sets=("steps=6",)), run, resume=Resume()) == DONE
    *_, old, new = of_kind(run, "probe")
    assert new["step"] == 6
    assert new["embedding"] == "edges-0"
    assert new["probe"] != old["probe"]
    assert new["replication"]["base"] == old["replication"]["base"]
    assert (run / "probe" / "base.npz").read_bytes() == before


def test_other_probes_than_the_bases_are_not_measured(two: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two[0], run)
    assert train(Overrides(sets=("steps=6", "sample_metrics.steps=2")), run, resume=Resume()) == DONE
    assert "no longer those" in of_kind(run, "probe")[-1]["not_measured"]


def test_a_probe_that_fails_is_told_and_the_run_goes_on(
    said: Callable[..., Overrides], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such picture")

    monkeypatch.setattr(probes, "measured", fail)
    assert train(said("steps=1", *PROBED), tmp_path / "run") == DONE
    assert warnings_of(tmp_path / "run") == [
        f"the probe at step {step} failed: RuntimeError: no such picture" for step in (0, 1)
    ]
    assert of_kind(tmp_path / "run", "probe") == []


def test_a_run_too_short_to_pay_is_not_measured(said: Callable[..., Overrides], tmp_path: Path) -> None:
    """By the default budget, and nothing is drawn."""
    assert train(said("steps=1", "sample_metrics.budget=0.05"), tmp_path / "run") == DONE
    lines = of_kind(tmp_path / "run", "probe")
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["not_measured"].startswith("budget: two measurements would take about")
    assert "not drawn before step 1" in lines[1]["not_measured"]
    assert not (tmp_path / "run" / "probe").exists()


def test_probes_are_the_smallest_that_the_model_draws() -> None:
    rules = VideoRules(frame_step=4, frame_rest=1, side_multiple=16, fps=16, spatial_stride=8, temporal_stride=4)
    assert metric_shape(ClipShape(17, 480, 832, 16.0), rules) == ClipShape(5, 240, 416, 16.0)
    assert metric_shape(ClipShape(17, 16, 48, 16.0), rules) == ClipShape(5, 16, 16, 16.0)
    assert metric_shape(ClipShape(1, 64, 64, 16.0), rules) == ClipShape(1, 32, 32, 16.0)
    only = VideoRules(0, 49, 16, 8, 8, 4, most_frames=49, size=(480, 720))
    assert metric_shape(ClipShape(49, 480, 720, 8.0), only) == ClipShape(49, 480, 720, 8.0)


def test_what_is_drawn_and_what_it_costs(said: Callable[..., Overrides]) -> None:
    """The captions of clips, the same seeds for each; twice the steps of the run halve the share that a probe is."""
    job = open_job(
        *resolve_config(
            said(
                "steps=100",
                "sample_metrics.budget=0.05",
                "sample_metrics.samples=6",
                "sample_metrics.steps=3",
                "sample.guidance=2",
            )
        )
    )
    plan = sample_metrics_plan(job)
    assert plan is not None
    captions = {caption for clip in job.library.clips for caption in clip.captions}
    assert len(plan.prompts) == 2
    assert set(plan.prompts) <= captions
    assert plan.drawn == [(0, 42), (1, 42), (0, 43), (1, 43), (0, 44), (1, 44)]
    longer = open_job(*resolve_config(said("steps=200", "sample_metrics.budget=0.05")))
    assert share_of_run(plan, longer) == pytest.approx(share_of_run(plan, job) / 2)
    tokens = job.spec.tokens(plan.settings.shape)
    windows = [job.spec.tokens(window.shape) for window in job.training_windows]
    assert share_of_run(plan, job) == pytest.approx(6 * 3 * 2 * tokens / (3 * 100 * sum(windows) / len(windows)))
    assert metric_prompts(open_job(*resolve_config(said("sample_metrics.budget=0")))) == []


def test_a_model_that_is_told_first_frames_is_told_those_of_held_out_clips(
    small_clips: Path, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Where none is held out, of training clips; in the windows' own shape, since that is what is cached."""
    from videotune.models.registry import find

    variant = next(name for name in find("wan").variants if "i2v" in name)
    sets = (f"base_model_name={tiny_bases('wan', variant)}", f"cache_dir={tmp_path}", "resolution=32x32")
    job = open_job(*resolve_config(Overrides(data=str(small_clips), sets=sets)))
    plan = sample_metrics_plan(job)
    assert plan is not None
    assert len(plan.told) == len(plan.prompts) == 2
    assert all(str(window.shape) == str(plan.settings.shape) for window in plan.told)
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert all(prompt in captions[window.clip_id] for prompt, window in zip(plan.prompts, plan.told, strict=True))
