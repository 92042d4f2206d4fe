"""Find the spec of a run's most expensive step: in the cache, in the tables that come
with videotune, or by a run on fake tensors, which takes seconds to minutes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from videotune.config.graph_checks import cannot_capture
from videotune.config.part_checks import cannot_compute_in_parts
from videotune.files import read_typed, write_json
from videotune.job.job import Job
from videotune.memory.checkpointing import IN_PARTS
from videotune.models.base import DiffusersModel
from videotune.models.registry import find
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.shipped_readings import shipped_readings
from videotune.planner.step_spec import (
    TILED,
    StepReadings,
    StepSpec,
    assemble,
    is_consistent,
)
from videotune.planner.traffic import process_count
from videotune.trainer.build import DTYPES, weights_of

if TYPE_CHECKING:
    from videotune.planner.measure import FakeRun


def step_spec(job: Job, dtype: str) -> StepSpec:
    """Return the spec of a run's most expensive step, with a reading of IN_PARTS if the
    config asks for it.

    One that was read before comes first, since it is exact: the tables' is interpolated.
    """
    spec = known_step_spec(job, dtype)
    if spec is not None:
        return spec
    if job.config.gradient_checkpointing == IN_PARTS:
        return _read_in_parts(job, dtype)
    inputs = PlanInputs.of(job, dtype)
    spec = read_step_spec(inputs)
    _store(spec, _cache_file(job, inputs))
    return _of_run(spec, job)


def _of_run(spec: StepSpec, job: Job) -> StepSpec:
    """Return the spec with what depends on the run alone."""
    config = job.config
    reason = find(job.spec.name).no_cuda_graphs or cannot_capture(config)
    captures = (
        config.cuda_graphs is not False and process_count(job) == 1 and not reason
    )
    return replace(spec, captures=captures)


def step_spec_with_tiles(job: Job, dtype: str) -> StepSpec:
    """Return ``step_spec`` with a preview that is decoded in tiles, which is only needed
    if a preview does not fit otherwise.
    """
    inputs = PlanInputs.of(job, dtype)
    spec = step_spec(job, dtype)
    if inputs.preview is None or TILED in spec.other_phases["preview"]:
        return spec

    readings = shipped_readings(inputs)
    if readings is not None:
        return _with_tiles(spec, readings, inputs)
    spec = _with_tiles(spec, fake_run(inputs), inputs)
    _store(spec, _cache_file(job, inputs))
    return spec


def step_spec_in_parts(job: Job, dtype: str) -> StepSpec:
    """Return ``step_spec`` with a reading of IN_PARTS, if the run can be trained so. It is
    only needed if nothing else fits.
    """
    spec = step_spec(job, dtype)
    if IN_PARTS in spec.kept or cannot_compute_in_parts(job.config):
        return spec
    return _read_in_parts(job, dtype)


def _read_in_parts(job: Job, dtype: str) -> StepSpec:
    """Read the spec with IN_PARTS. No tables have that, so it is a run on fake tensors."""
    inputs = PlanInputs.of(job, dtype)
    run = fake_run(inputs)
    readings = shipped_readings(inputs) or run
    spec = assemble(readings, inputs, run.family, parts=run)
    _store(spec, _cache_file(job, inputs))
    return _of_run(spec, job)


def _with_tiles(spec: StepSpec, readings: StepReadings, inputs: PlanInputs) -> StepSpec:
    assert inputs.preview is not None
    tiled = readings.decode(inputs.preview, tiled=True)
    preview = {**spec.other_phases["preview"], TILED: tiled}
    return replace(spec, other_phases={**spec.other_phases, "preview": preview})


def known_step_spec(job: Job, dtype: str) -> StepSpec | None:
    """Return ``step_spec`` if nothing has to be run for it."""
    if job.base is None:
        return None
    inputs = PlanInputs.of(job, dtype)
    is_in_parts = job.config.gradient_checkpointing == IN_PARTS
    spec = _read_cached(_cache_file(job, inputs))
    if spec is not None and (IN_PARTS in spec.kept or not is_in_parts):
        return _of_run(spec, job)
    readings = shipped_readings(inputs)
    if readings is None or is_in_parts:
        return None
    return _of_run(assemble(readings, inputs, open_family(inputs)), job)


def _cache_file(job: Job, inputs: PlanInputs) -> Path:
    return job.cache / "plans" / f"{inputs.key}.json"


def _store(spec: StepSpec, path: Path) -> None:
    """Write a spec, without what depends on the run alone."""
    write_json(path, asdict(replace(spec, captures=False)))


def _read_cached(path: Path) -> StepSpec | None:
    """Return the spec of a cache file; None without one, or with impossible values.

    A dataset may bring its cache, so the file is not trusted.
    """
    try:
        spec: StepSpec = read_typed(path, StepSpec)
    except (OSError, ValueError):
        return None
    return spec if is_consistent(spec) else None


def read_step_spec(inputs: PlanInputs) -> StepSpec:
    """Read what a run's most expensive step and its encoders hold, on fake tensors."""
    run = fake_run(inputs)
    return assemble(run, inputs, run.family)


def fake_run(inputs: PlanInputs) -> FakeRun:
    """Return the run on fake tensors."""
    from videotune.planner.measure import FakeRun  # imports what trains, for a second

    return FakeRun(open_family(inputs), inputs.config)


def open_family(inputs: PlanInputs) -> DiffusersModel:
    """Return the base model's family as the run uses it, on the CPU, without weights."""
    dtype = DTYPES[inputs.dtype]
    weights = weights_of(inputs.config, inputs.dtype)
    family_class = find(inputs.spec.name)
    family = family_class(inputs.folder, torch.device("cpu"), dtype, weights)
    family.spec = inputs.spec
    return family
