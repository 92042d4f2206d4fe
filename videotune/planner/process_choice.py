"""Choose how many of several GPUs share each sample (``videotune plan --gpus``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from videotune.config.context_checks import faults_of_context, faults_of_context_in
from videotune.config.resolve import Resolved
from videotune.console import without_bars
from videotune.job.context_checks import (
    fault_of_parts,
    groups_of,
    refuse_unequal_parts,
)
from videotune.job.job import Job, open_job
from videotune.model_spec import ModelSpec
from videotune.planner.cluster import Cluster
from videotune.planner.fit import Fit, fit, planned_dtype, step_seconds
from videotune.planner.gpus import USUAL, Card
from videotune.planner.read_step import step_spec
from videotune.types import BasePlace

CLEARLY_SLOWER = 1.25
"""How much slower a sample may be with fewer processes that share it: their messages and
streamed blocks are calculated, not measured.
"""


@dataclass(frozen=True)
class Target:
    """The GPUs that a plan is for, all of one kind."""

    cluster: Cluster
    """The machines that they are in."""
    vram: int | None
    """Bytes of each. None: they are not known."""
    card: Card | None
    spare: int
    """Bytes of each that should stay free."""

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.cluster.processes


def shared_job(
    resolved: Resolved, spec: ModelSpec, base: BasePlace | None, target: Target
) -> Job:
    """Return the job on these GPUs.

    Unless the config sets ``context_parallel``, it is the smallest number with which the
    run fits and is not clearly slower than with a larger one. A card without a rate is
    compared as a usual one. A sample is shared within a machine.

    Raises:
        VideotuneError: if the GPUs cannot share the samples as the config says.
    """
    is_set = resolved.origins["context_parallel"] != "default"
    is_open = target.gpus > 1 and target.vram is not None and base is not None
    if is_set or not is_open or not spec.splits_tokens:
        return _open(resolved, spec, base, target.gpus)

    jobs = [_open(resolved, spec, base, target.gpus)]
    gpus_a_machine = target.cluster.gpus
    for parts in range(2, gpus_a_machine + 1):
        shared = resolved.with_planned({"context_parallel": parts})
        faults = [
            *faults_of_context(shared.config),
            *faults_of_context_in(shared.config, spec),
        ]
        if gpus_a_machine % parts or faults:
            continue
        with without_bars():  # the clips are read again, from the index
            job = open_job(shared, spec, base, processes=target.gpus // parts)
        if fault_of_parts(job) is None:
            jobs.append(job)
    return _best(jobs, target)


def _best(jobs: Sequence[Job], target: Target) -> Job:
    """Return the job with the fewest processes a sample of those that fit, or one that
    is clearly faster; if none fits, the one that needs least.
    """
    results = [_fit_of(job, target) for job in jobs]
    seconds = {}
    for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
        if result.fits:
            seconds[index] = _seconds_a_sample(job, result, target)
    for index in seconds:
        if seconds[index] <= CLEARLY_SLOWER * min(seconds.values()):
            return jobs[index]
    needed = [result.needed for result in results]
    return jobs[needed.index(min(needed))]


def _open(
    resolved: Resolved, spec: ModelSpec, base: BasePlace | None, gpus: int
) -> Job:
    groups = groups_of(resolved.config, gpus)
    job = open_job(resolved, spec, base, processes=groups)
    refuse_unequal_parts(job)
    return job


def _fit_of(job: Job, target: Target) -> Fit:
    dtype = planned_dtype(job.config, on_card=True, card=target.card)
    result = fit(job, dtype, target.vram, target.card, spare=target.spare)
    return replace(result, cluster=target.cluster)


def _seconds_a_sample(job: Job, result: Fit, target: Target) -> float:
    """Return the calculated seconds of a step for each of its samples."""
    dtype = planned_dtype(job.config, on_card=True, card=target.card)
    card = target.card or USUAL
    spec = step_spec(job, dtype)
    seconds = step_seconds(job, spec, result.training, card, dtype, target.cluster)
    return seconds / job.effective_batch
