"""Plan how often validation, previews and sample metrics run, and what they cost.

Costs are counted in tokens that pass through the denoiser and never timed, so the same
settings give the same run on any machine.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

from videotune.config.sampling_sections import Forgetting, SampleMetrics
from videotune.data.remarks import Remark
from videotune.job.job import Job
from videotune.model_spec import ModelSpec
from videotune.trainer.trainer import count_due
from videotune.types import Window
from videotune.validation import selection
from videotune.validation.forgetting import LEVELS, OWN_GUIDANCE_AT
from videotune.validation.forgetting_plan import (
    PROMPT_COUNTS,
    ForgettingPlan,
    forgetting_plan,
)
from videotune.validation.overfitting import MIN_READINGS, too_few_readings
from videotune.validation.sample_metrics_plan import (
    SampleMetricsPlan,
    sample_metrics_plan,
)
from videotune.validation.selection import MAX_WINDOWS, MIN_WINDOWS

PASSES_PER_STEP = 3
"""Cost of the forward and backward pass of a training step, in forward passes."""

TOTAL_SHARE = 0.08
"""Default share of the run's time for all that is measured and sampled."""

VALIDATION_SHARE = 0.045
"""Default share of validation. Previews get the share that is left."""

METRICS_SHARE = SampleMetrics().budget
"""Default share of sample metrics."""

FORGETTING_SHARE = Forgetting().budget
"""Default share of what is read of the base model's abilities."""

WANTED_VALIDATIONS = 5
WANTED_PREVIEWS = 3
"""Number of runs, first and last included, that the share should pay for.

If it does not, each of them is made smaller.
"""

WANTED_READINGS = 3
"""Readings of the base model's abilities that the budget should pay for, after that of
the base model itself. If it does not, they have fewer prompts.
"""

SPACING = 250
"""Unit of the default spacings, in steps, if ``save_every`` is 0."""

PREVIEW_STEPS = (20, 12, 8)
"""Denoising steps of a preview if the family's default is too expensive."""


def tokens_per_step(job: Job) -> float:
    """Return the mean tokens that one process trains on in a step."""
    total = 0.0
    for share, batch_size, shape in zip(
        job.shares, job.schedule.batch_sizes, job.shapes, strict=True
    ):
        total += share * batch_size * job.spec.tokens(shape)
    return total / job.processes


def passes_per_step(spec: ModelSpec, guidance: float) -> int:
    """Return the forward passes of a denoising step.

    Guidance above 1 needs further passes, unless the network takes it as an input.
    """
    is_guided = guidance > 1 and not spec.guidance_embedded
    return spec.sample_passes if is_guided else 1


def share_of_steps(job: Job, tokens: float) -> float:
    """Estimate the cost of forward passes as a share of the time of all training steps.

    Attention makes larger shapes more expensive than this, and work outside the
    denoiser is not counted. Training steps are shared by all processes; the work
    between them is not.

    Args:
        job: the job.
        tokens: tokens that pass through the denoiser.
    """
    return tokens / (PASSES_PER_STEP * tokens_per_step(job) * job.steps)


def decide_spacings(job: Job) -> Job:
    """Set the spacing and size of validation and previews that the config leaves open.

    With sample metrics they take at most ``TOTAL_SHARE`` of the time of the steps. The
    first and the last of each always run.
    """
    if job.config.validation_windows is None:
        job = _with_planned(job, "validation_windows", _affordable_windows(job))
    if job.config.validate_every is None:
        count = VALIDATION_SHARE / _validation_share(job)
        job = _with_planned(job, "validate_every", _spacing(job, count))
    if job.config.sample_after is None:
        share = TOTAL_SHARE - _share_before_previews(job)
        steps, prompts = _affordable_preview(job, share)
        job = _with_planned(job, "sample.steps", steps)
        job = _with_planned(job, "samples", prompts)
        count = share / _preview_share(job)
        job = _with_planned(job, "sample_after", _spacing(job, count))
    return job


def _with_planned(job: Job, key: str, value: int | None) -> Job:
    """Set a key of the job's config, unless the value is None."""
    if value is None:
        return job
    return replace(job, resolved=job.resolved.with_planned({key: value}))


def _spacing(job: Job, count: float, unit: int = SPACING) -> int:
    """Return the steps between at most ``count`` events, at least two.

    The first event is before step 1, the last at the end. The spacing is a multiple of
    ``save_every``, or of ``unit`` if that is 0.
    """
    unit = job.config.save_every or unit
    intervals = max(2, int(count)) - 1
    return min(job.steps, unit * ceil(job.steps / (intervals * unit)))


def _validation_passes(job: Job) -> list[tuple[Window, int]]:
    """Return each window of a validation with its forward passes.

    With an average of the weights, each window is read twice. A target that keeps the
    base model's guidance costs two passes of the base model beside each.
    """
    readings = 1 if job.config.ema.decay is None else 2
    if job.config.distilled_guidance is not None:
        readings *= 3
    passes = []
    for windows in selection.validation_windows(job):
        levels_by_window = selection.quantiles_by_window(windows)
        for window, levels in zip(windows, levels_by_window, strict=True):
            passes.append((window, readings * len(levels)))
    return passes


def _validation_share(job: Job) -> float:
    """Return the share of one validation."""
    tokens = 0
    for window, count in _validation_passes(job):
        tokens += count * job.spec.tokens(window.shape)
    return share_of_steps(job, tokens)


def _affordable_windows(job: Job) -> int:
    """Return how many windows the share of ``WANTED_VALIDATIONS`` pays for."""
    num_windows = len(_validation_passes(job))
    share_per_window = WANTED_VALIDATIONS * _validation_share(job) / num_windows
    affordable = int(VALIDATION_SHARE / share_per_window)
    return min(MAX_WINDOWS, max(MIN_WINDOWS, affordable))


def _preview_passes(job: Job, steps: int, prompts: int) -> int:
    guidance = selection.preview_settings(job).guidance
    return steps * prompts * passes_per_step(job.spec, guidance)


def _preview_share(
    job: Job, steps: int | None = None, prompts: int | None = None
) -> float:
    """Return the share of one preview of each prompt.

    Args:
        job: the job.
        steps: denoising steps; None: those of the config.
        prompts: number of prompts; None: that of the config.
    """
    settings = selection.preview_settings(job)
    if prompts is None:
        prompts = max(1, len(selection.preview_prompts(job)))
    passes = _preview_passes(job, steps or settings.steps, prompts)
    return share_of_steps(job, passes * job.spec.tokens(settings.shape))


def _affordable_preview(job: Job, share: float) -> tuple[int | None, int | None]:
    """Return the largest size of previews that pays for ``WANTED_PREVIEWS``.

    Only keys at their default are changed.

    Returns:
        (denoising steps, number of prompts), None for a value that stays; the smallest
        size if none is cheap enough.
    """
    default_steps = selection.preview_settings(job).steps
    num_prompts = len(selection.preview_prompts(job))

    steps_choices = [default_steps]
    if _is_open(job, "sample.steps"):
        steps_choices += [steps for steps in PREVIEW_STEPS if steps < default_steps]
    prompt_choices = [num_prompts]
    if _is_open(job, "samples") and num_prompts > 1:
        prompt_choices.append(1)

    for steps, prompts in product(steps_choices, prompt_choices):
        if WANTED_PREVIEWS * _preview_share(job, steps, prompts) <= share:
            break
    return (
        steps if steps < default_steps else None,
        prompts if prompts < num_prompts else None,
    )


def _is_open(job: Job, key: str) -> bool:
    """Whether the user did not set a key."""
    return job.resolved.origins[key] in ("default", "family")


def overhead(job: Job) -> dict[str, Any]:
    """Return the validations, previews and sample metrics of a run for ``plan.json``.

    Each entry has the count, the forward passes of one, and the estimated share of the
    steps' time that all of them take; it is None if there are none.
    """
    return {
        "readings": validations(job),
        "previews": previews(job),
        "probes": metrics(job),
        "forgetting": forgetting(job),
    }


def notes_on_validations(job: Job) -> list[str]:
    """Say if a run has held-out clips, and too few validations for a verdict."""
    every = job.config.validate_every or 0
    if every == 0 or not job.library.held_out_windows:
        return []
    num_readings = count_due(every, job.steps)
    if num_readings >= MIN_READINGS:
        return []
    return [Remark("few_validations", too_few_readings(0, range(num_readings)))]


def validations(job: Job) -> dict[str, Any] | None:
    """Return the cost of the validations, or None if there are none."""
    count = count_due(job.config.validate_every or 0, job.steps)
    if not count:
        return None
    held_out, training = selection.validation_windows(job)
    return {
        "count": count,
        "held_out_windows": len(held_out),
        "training_windows": len(training),
        "passes": sum(passes for _, passes in _validation_passes(job)),
        "share": rounded(count * _validation_share(job)),
    }


def previews(job: Job) -> dict[str, Any] | None:
    """Return the cost of the previews, or None if there are none."""
    count = count_due(job.config.sample_after or 0, job.steps)
    num_prompts = len(selection.preview_prompts(job))
    if not count or not num_prompts:
        return None
    steps = selection.preview_settings(job).steps
    return {
        "count": count,
        "prompts": num_prompts,
        "steps": steps,
        "passes": _preview_passes(job, steps, num_prompts),
        "share": rounded(count * _preview_share(job)),
    }


def metrics(job: Job) -> dict[str, Any] | None:
    """Return the cost of the sample metrics.

    None if there are none or the budget does not pay for two measurements.
    """
    plan = sample_metrics_plan(job)
    if plan is None:
        return None
    every = metrics_spacing(plan, job)
    if not every:
        return None
    count = count_due(every, job.steps)
    return {
        "count": count,
        "samples": plan.samples,
        "share": rounded(count * share_of_run(plan, job)),
    }


def metrics_spacing(plan: SampleMetricsPlan, job: Job) -> int:
    """Return the steps between measurements, a multiple of those between checkpoints.

    0 if the budget does not pay for two measurements.
    """
    share = share_of_run(plan, job)
    budget = job.config.sample_metrics.budget
    if 2 * share > budget:
        return 0
    return _spacing(job, budget / share, unit=job.steps)


def forgetting(job: Job) -> dict[str, Any] | None:
    """Return the cost of the readings of the base model's abilities.

    None if there are none or the budget does not pay for two of them.
    """
    planned = planned_forgetting(job)
    if planned is None:
        return None
    plan, every = planned
    count = count_due(every, job.steps)
    return {
        "count": count,
        "prompts": len(plan.prompts),
        "share": rounded(
            _forgetting_share(plan, job, readings=count - 1, with_base=True)
        ),
    }


def planned_forgetting(job: Job) -> tuple[ForgettingPlan, int] | None:
    """Return what is read of the base model's abilities, and the steps between readings.

    With the shipped prompts it reads as many as the budget pays for. None if there is
    nothing to read, or the budget does not pay for two readings.
    """
    budget = job.config.forgetting.budget
    for wanted in (WANTED_READINGS, 1):
        for count in PROMPT_COUNTS:
            plan = forgetting_plan(job, count)
            if plan is None:
                return None
            base = _forgetting_share(plan, job, readings=0, with_base=True)
            one_reading = _forgetting_share(plan, job, readings=1, with_base=False)
            if base + wanted * one_reading <= budget:
                affordable = 1 + (budget - base) / one_reading
                return plan, _spacing(job, affordable)
    return None


def _forgetting_share(
    plan: ForgettingPlan, job: Job, *, readings: int, with_base: bool
) -> float:
    """Return the cost of readings as a share of training.

    Args:
        plan: what is read.
        job: the job.
        readings: of the trained model.
        with_base: whether the base model is read too, which also draws the samples.
    """
    settings = plan.few_steps
    passes_of_path = (settings.steps + plan.many_steps) * passes_per_step(
        job.spec, settings.guidance
    )
    passes = readings * (LEVELS + passes_of_path)
    if with_base:
        drawing = plan.drawing.steps * passes_per_step(job.spec, plan.drawing.guidance)
        levels = LEVELS + len(OWN_GUIDANCE_AT)
        passes += drawing + 2 * levels + passes_of_path
    tokens = passes * len(plan.prompts) * job.spec.tokens(settings.shape)
    return share_of_steps(job, tokens)


def _share_before_previews(job: Job) -> float:
    """Return the share of validation, sample metrics and readings of the base model's
    abilities.

    A spacing that the user sets may cost more than the default share; only the default
    share counts then, so that some is left for previews.
    """
    validation = validations(job)
    validation_share = validation["share"] if validation else 0.0
    if job.resolved.origins["validate_every"] != "plan":
        validation_share = min(validation_share, VALIDATION_SHARE)

    sample_metrics = metrics(job)
    metrics_share = sample_metrics["share"] if sample_metrics else 0.0
    readings = forgetting(job)
    readings_share = readings["share"] if readings else 0.0
    return (
        validation_share
        + min(METRICS_SHARE, metrics_share)
        + min(FORGETTING_SHARE, readings_share)
    )


def share_of_run(plan: SampleMetricsPlan, job: Job) -> float:
    """Return the cost of a measurement as a share of training, without decoding."""
    settings = plan.settings
    passes = plan.samples * settings.steps
    passes *= passes_per_step(job.spec, settings.guidance)
    return share_of_steps(job, passes * job.spec.tokens(settings.shape))


def rounded(share: float) -> float:
    """Round an estimate to three significant digits."""
    return float(f"{share:.3g}")


def total_share(costs: Mapping[str, Any]) -> float:
    """Return the sum of the shares that ``overhead`` gives."""
    return float(sum(cost["share"] for cost in costs.values() if cost))
