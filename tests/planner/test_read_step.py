"""Where the spec of a run's step comes from, and when nothing has to be read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clips import noise, write_dataset
from tests.support.made_steps import StepRun
from tests.support.trainers import Lab, job_of
from videotune.files import read_json
from videotune.job.job import Job
from videotune.memory.checkpointing import ATTENTION_SAVED, IN_PARTS, OFF, ON
from videotune.planner import read_step
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import (
    fake_run,
    known_step_spec,
    open_family,
    step_spec,
    step_spec_in_parts,
    step_spec_with_tiles,
)
from videotune.planner.step_spec import ASIDE, TILED, UNCHANGED, StepSpec, assemble

DTYPE = "BFLOAT_16"
MODES = {OFF, ATTENTION_SAVED, ON}
PREVIEWS = {"sample_after": 2, "samples": 1}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The toy base model and a clip."""
    clips = write_dataset(tmp_path / "clips", {"a.mkv": noise(9, 32, 32)}, {}, fps=16)
    return Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)


class Sources:
    """Tables and runs on fake tensors, whose numbers tell them apart, and what was
    asked of them.
    """

    def __init__(self) -> None:
        self.tables: StepRun | None = None
        self.asked: list[str] = []

    def shipped(self, inputs: PlanInputs) -> StepRun | None:
        assert type(inputs) is PlanInputs
        return self.tables

    def run(self, inputs: PlanInputs) -> StepRun:
        self.asked.append(inputs.dtype)
        run = StepRun(2)
        run.family = open_family(inputs)
        return run


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    sources = Sources()
    monkeypatch.setattr(read_step, "shipped_readings", sources.shipped)
    monkeypatch.setattr(read_step, "fake_run", sources.run)
    return sources


def assembled(job: Job, run: StepRun, parts: StepRun | None = None) -> StepSpec:
    inputs = PlanInputs.of(job, DTYPE)
    return assemble(run, inputs, open_family(inputs), parts)  # type: ignore[arg-type]


def test_a_step_is_read_once_and_kept_without_what_is_the_run_s_own(
    lab: Lab, sources: Sources
) -> None:
    job = job_of(lab)
    assert known_step_spec(job, DTYPE) is None
    spec = step_spec(job, DTYPE)
    assert spec == replace(assembled(job, StepRun(2)), captures=True)
    assert sources.asked == [DTYPE]
    file = job.cache / "plans" / f"{PlanInputs.of(job, DTYPE).key}.json"
    assert read_json(file)["captures"] is False
    assert step_spec(job, DTYPE) == known_step_spec(job, DTYPE) == spec
    assert sources.asked == [DTYPE]

    plain = job_of(lab, {"cuda_graphs": False})
    assert step_spec(plain, DTYPE) == replace(spec, captures=False)
    assert sources.asked == [DTYPE]
    assert not replace(step_spec(replace(job, processes=2), DTYPE)).captures
    assert known_step_spec(replace(job, base=None), DTYPE) is None


def test_a_table_needs_no_run_and_a_kept_reading_comes_before_it(
    lab: Lab, sources: Sources
) -> None:
    sources.tables = StepRun(1)
    job = job_of(lab)
    assert step_spec(job, DTYPE) == replace(assembled(job, StepRun(1)), captures=True)
    assert sources.asked == []
    assert not (job.cache / "plans").exists()

    sources.tables = None
    read = step_spec(job, DTYPE)
    sources.tables = StepRun(1)
    assert step_spec(job, DTYPE) == read


@pytest.mark.parametrize("has_tables", [True, False])
def test_blocks_in_parts_are_read_by_a_run_where_they_are_needed(
    has_tables: bool, lab: Lab, sources: Sources
) -> None:
    """A table has the other modes."""
    tables = StepRun(1) if has_tables else None
    sources.tables = tables
    job = job_of(lab)
    spec = step_spec_in_parts(job, DTYPE)
    expected = assembled(job, tables or StepRun(2), parts=StepRun(2))
    assert spec == replace(expected, captures=True)
    assert spec.kept.keys() == {*MODES, IN_PARTS}
    asked = len(sources.asked)
    assert step_spec_in_parts(job, DTYPE) == spec
    assert len(sources.asked) == asked

    full = job_of(lab, {"training_method": "FINE_TUNE"})
    assert step_spec_in_parts(full, DTYPE).kept.keys() == MODES


def test_a_run_in_parts_reads_them_at_once(lab: Lab, sources: Sources) -> None:
    """A reading without them, and a table, are not enough for it."""
    sources.tables = StepRun(1)
    job = job_of(lab, {"gradient_checkpointing": IN_PARTS})
    assert known_step_spec(job, DTYPE) is None
    spec = step_spec(job, DTYPE)
    assert spec == assembled(job, StepRun(1), parts=StepRun(2))
    assert sources.asked == [DTYPE]
    assert known_step_spec(job, DTYPE) == spec
    assert step_spec(job, DTYPE) == spec
    assert sources.asked == [DTYPE]


@pytest.mark.parametrize("has_tables", [True, False])
def test_a_preview_in_tiles_is_read_once_where_it_is_needed(
    has_tables: bool, lab: Lab, sources: Sources
) -> None:
    sources.tables = StepRun(1) if has_tables else None
    job = job_of(lab, PREVIEWS)
    spec = step_spec_with_tiles(job, DTYPE)
    preview = PlanInputs.of(job, DTYPE).preview
    assert preview is not None
    assert spec.other_phases["preview"] == {
        UNCHANGED: {"vae": 2 * preview.frames},
        ASIDE: {"vae": 2 * preview.frames},
        TILED: {"vae": preview.frames},
    }
    plain = step_spec(job, DTYPE)
    others = {"encoding text", "encoding clips"}
    assert spec.other_phases.keys() == others | {"preview"}
    if has_tables:
        assert TILED not in plain.other_phases["preview"]
        assert sources.asked == []
    else:
        assert plain == spec
        asked: list[Any] = list(sources.asked)
        assert step_spec_with_tiles(job, DTYPE) == spec
        assert sources.asked == asked == [DTYPE] * 2
    without = job_of(lab)
    assert step_spec_with_tiles(without, DTYPE) == step_spec(without, DTYPE)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_file_that_is_no_reading_is_read_anew(
    text: str, lab: Lab, sources: Sources
) -> None:
    job = job_of(lab)
    file = job.cache / "plans" / f"{PlanInputs.of(job, DTYPE).key}.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert known_step_spec(job, DTYPE) is None
    assert step_spec(job, DTYPE).captures
    assert known_step_spec(job, DTYPE) is not None


def test_the_family_of_a_reading_is_the_run_s_on_the_cpu(lab: Lab) -> None:
    job = job_of(lab, {"weight_dtype": "FLOAT_8"})
    inputs = replace(
        PlanInputs.of(job, DTYPE), spec=replace(job.spec, title="of this run")
    )
    family = open_family(inputs)
    assert family.folder == inputs.folder
    assert (family.device, family.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert family.weights.transformer == "FLOAT_8"
    assert family.spec == inputs.spec

    run = fake_run(inputs)
    assert run.config is inputs.config
    assert run.family.spec == inputs.spec


@pytest.mark.parametrize("has_tables", [True, False])
@pytest.mark.parametrize("mode", [ON, IN_PARTS])
def test_an_optimizer_class_is_measured_for_every_reading(
    mode: str, has_tables: bool, lab: Lab, sources: Sources
) -> None:
    """Momentum is half of what AdamW keeps."""
    sources.tables = StepRun(1) if has_tables else None
    optimizer = {
        "optimizer.name": "torch.optim:SGD",
        "optimizer.args": {"momentum": 0.9},
    }
    job = job_of(lab, optimizer | {"gradient_checkpointing": mode})
    assert step_spec(job, DTYPE).optimizer_share == pytest.approx(0.5, rel=0.02)
