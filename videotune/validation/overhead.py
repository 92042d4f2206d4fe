"""What a run does between its steps: validation, previews, sample metrics; how often by default, and what it costs.

Costs are counted in tokens that pass through the denoiser and never timed: the same settings give the same run anywhere.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

from videotune.config.schema import SampleMetrics
from videotune.job.job import Job
from videotune.trainer.trainer import times
from videotune.types import ModelSpec, Window
from videotune.validation import selection
from videotune.validation.selection import LEAST_WINDOWS, MOST_WINDOWS, SampleMetricsPlan

PASSES_A_STEP = 3
"""Forward and backward of a training step in forward passes."""

TOTAL_SHARE = 0.08
VALIDATION_SHARE = 0.045
METRICS_SHARE = SampleMetrics().budget
"""Shares of a run's time by default: of everything here, of validation, of sample metrics; previews take the rest."""

WANTED_VALIDATIONS = 5
WANTED_PREVIEWS = 3
"""Where the share does not pay for so many, first and last included, each one is made smaller."""

SPACING = 250
"""Default spacings are multiples of ``save_every``, or of so many steps where it is 0."""

PREVIEW_STEPS = (20, 12, 8)
"""Denoising steps of a preview where the family's own are too many."""


def tokens_a_step(job: Job) -> float:
    """Tokens of a step's samples in one process, on the average over the buckets."""
    sizes = zip(job.shares, job.schedule.batches, job.shapes, strict=True)
    return (
        sum(share * batch * job.spec.tokens(shape) for share, batch, shape in sizes)
        / job.processes
    )


def passes_of(spec: ModelSpec, guidance: float) -> int:
    """Forward passes of a denoising step: guidance above 1 asks a second time, unless the network takes it as an input."""
    return 2 if guidance > 1 and not spec.guidance_embedded else 1


def share_of_steps(job: Job, tokens: float) -> float:
    """What it costs to put so many tokens through the network, as a share of the time of all steps.

    An estimate for before a step was timed: attention makes larger shapes dearer than that, and what is no pass of the
    denoiser is left out. Steps are shared by all processes; what is done between them is not.
    """
    return tokens / (PASSES_A_STEP * tokens_a_step(job) * job.steps)


def planned(job: Job) -> Job:
    """The job with a spacing and a size for validation and previews, where the config leaves them open.

    Together with sample metrics they take at most ``TOTAL_SHARE`` of the steps' time. The first and the last always run.
    """
    if job.config.validation_windows is None:
        job = _with(job, "validation_windows", _affordable_windows(job))
    if job.config.validate_every is None:
        job = _with(
            job, "validate_every", _spacing(job, VALIDATION_SHARE / _one_validation(job))
        )
    if job.config.sample_after is None:
        left = TOTAL_SHARE - _taken(job)
        steps, prompts = _affordable_preview(job, left)
        job = _with(_with(job, "sample.steps", steps), "samples", prompts)
        job = _with(job, "sample_after", _spacing(job, left / _one_preview(job)))
    return job


def _with(job: Job, key: str, value: int | None) -> Job:
    """The job with a value for a key; None: as it is."""
    return (
        job if value is None else replace(job, resolved=job.resolved.with_planned({key: value}))
    )


def _spacing(job: Job, count: float, unit: int = SPACING) -> int:
    """Steps between at most ``count`` events, at least 2, the first before step 1 and the last at the end.

    A multiple of ``save_every``, or of ``unit`` where it is 0.
    """
    unit = job.config.save_every or unit
    most = max(2, int(count))
    return min(job.steps, unit * ceil(job.steps / ((most - 1) * unit)))


def _passes(job: Job) -> list[tuple[Window, int]]:
    """Each window of a validation, and its passes; twice as many where an average of the weights is read too."""
    twice = 1 + (job.config.ema.decay is not None)
    pairs = (
        zip(part, selection.levels_of(part), strict=True)
        for part in selection.validation_windows(job)
    )
    return [(window, twice * len(levels)) for part in pairs for window, levels in part]


def _one_validation(job: Job) -> float:
    return share_of_steps(
        job, sum(count * job.spec.tokens(window.shape) for window, count in _passes(job))
    )


def _affordable_windows(job: Job) -> int:
    """As many as leave room for ``WANTED_VALIDATIONS``."""
    share = WANTED_VALIDATIONS * _one_validation(job) / len(_passes(job))
    return min(MOST_WINDOWS, max(LEAST_WINDOWS, int(VALIDATION_SHARE / share)))


def _preview_passes(job: Job, steps: int, prompts: int) -> int:
    return steps * prompts * passes_of(job.spec, selection.preview_settings(job).guidance)


def _one_preview(job: Job, steps: int | None = None, prompts: int | None = None) -> float:
    """The share of a preview of each prompt."""
    settings = selection.preview_settings(job)
    prompts = max(1, len(selection.prompts_of(job))) if prompts is None else prompts
    count = _preview_passes(job, steps or settings.steps, prompts)
    return share_of_steps(job, count * job.spec.tokens(settings.shape))


def _affordable_preview(job: Job, share: float) -> tuple[int | None, int | None]:
    """(denoising steps, prompts; None: as they are) that pay for ``WANTED_PREVIEWS``, or the smallest."""
    own = selection.preview_settings(job).steps
    count = len(selection.prompts_of(job))
    open_keys = {
        key
        for key in ("sample.steps", "samples")
        if job.resolved.origins[key] in ("default", "family")
    }
    steps = (
        [own, *(few for few in PREVIEW_STEPS if few < own)]
        if "sample.steps" in open_keys
        else [own]
    )
    prompts = [count, 1] if "samples" in open_keys and count > 1 else [count]
    choices = list(product(steps, prompts))
    found = next(
        (one for one in choices if WANTED_PREVIEWS * _one_preview(job, *one) <= share),
        choices[-1],
    )
    return found[0] if found[0] < own else None, found[1] if found[1] < count else None


def overhead(job: Job) -> dict[str, Any]:
    """What a whole run does between its steps, as ``plan.json`` has it; None for what it does not.

    For each the count, the passes through the denoiser of one, and the share of the steps' time that all of them take,
    estimated.
    """
    return {"readings": validations(job), "previews": previews(job), "probes": metrics(job)}


def validations(job: Job) -> dict[str, Any] | None:
    """Each window at a third of the noise levels."""
    count = times(job.config.validate_every or 0, job.steps)
    if not count:
        return None
    held_out, training = selection.validation_windows(job)
    return {
        "count": count,
        "held_out_windows": len(held_out),
        "training_windows": len(training),
        "passes": sum(passes for _, passes in _passes(job)),
        "share": rounded(count * _one_validation(job)),
    }


def previews(job: Job) -> dict[str, Any] | None:
    """Each prompt by so many denoising steps, of two passes with guidance for which the network is asked twice."""
    count = times(job.config.sample_after or 0, job.steps)
    prompts = selection.prompts_of(job)
    if not (count and prompts):
        return None
    steps = selection.preview_settings(job).steps
    return {
        "count": count,
        "prompts": len(prompts),
        "steps": steps,
        "passes": _preview_passes(job, steps, len(prompts)),
        "share": rounded(count * _one_preview(job)),
    }


def metrics(job: Job) -> dict[str, Any] | None:
    """The base's samples and those at checkpoints; None where the budget does not pay for two."""
    plan = selection.sample_metrics_plan(job)
    if plan is None or not (every := metrics_spacing(plan, job)):
        return None
    count = times(every, job.steps)
    return {
        "count": count,
        "samples": plan.samples,
        "share": rounded(count * share_of_run(plan, job)),
    }


def metrics_spacing(plan: SampleMetricsPlan, job: Job) -> int:
    """The steps between sample metrics, a multiple of those between checkpoints; 0: the budget does not pay for two."""
    one = share_of_run(plan, job)
    budget = job.config.sample_metrics.budget
    return 0 if 2 * one > budget else _spacing(job, budget / one, job.steps)


def _taken(job: Job) -> float:
    """The share that is not left for previews: of validation and of sample metrics.

    A spacing that a user names may cost more than its own share; previews then still have theirs.
    """
    read = validations(job)
    sampled = metrics(job)
    of_validation = read["share"] if read else 0.0
    if job.resolved.origins["validate_every"] != "plan":
        of_validation = min(of_validation, VALIDATION_SHARE)
    return of_validation + min(METRICS_SHARE, sampled["share"] if sampled else 0.0)


def share_of_run(plan: SampleMetricsPlan, job: Job) -> float:
    """What sample metrics cost once, as a share of the whole training; decoding is left out."""
    settings = plan.settings
    spec = job.spec
    passes = passes_of(spec, settings.guidance)
    return share_of_steps(
        job, plan.samples * settings.steps * passes * spec.tokens(settings.shape)
    )


def rounded(share: float) -> float:
    """Three digits: it is an estimate."""
    return float(f"{share:.3g}")


def share_of_all(found: Mapping[str, Any]) -> float:
    """All of it together, as a share of the steps' time."""
    return float(sum(one["share"] for one in found.values() if one))
