"""What a run does beside its steps: readings of the ruler, previews, probes; how often, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from videotune.trainer.run_spec import Job
from videotune.trainer.trainer import times
from videotune.types import ModelSpec
from videotune.validation.previews import prompts_of, sample_settings, usual_shape
from videotune.validation.sample_plan import SampleMetricsPlan, sample_metrics_plan
from videotune.validation.selection import QUANTILES, validation_windows

PASSES_A_STEP = 3
"""Forward and backward of a training step in forward passes."""


def tokens_a_step(job: Job) -> float:
    """Tokens of a step's samples in one process, on the average over the buckets."""
    sizes = zip(job.shares, job.schedule.batches, job.shapes, strict=True)
    return sum(share * batch * job.spec.tokens(shape) for share, batch, shape in sizes) / job.processes


def passes_of(spec: ModelSpec, guidance: float) -> int:
    """Forward passes of a denoising step: guidance above 1 asks a second time, where the network is not told it."""
    return 2 if guidance > 1 and not spec.guidance_embedded else 1


def share_of_steps(job: Job, tokens: float) -> float:
    """What it costs to put so many tokens through the network, as a share of the time of all steps.

    An estimate for before a step was timed: attention makes larger shapes dearer than that, and what is no pass of the
    denoiser is left out. Steps are shared by all processes; what is done between them is not.
    """
    return tokens / (PASSES_A_STEP * tokens_a_step(job) * job.steps)


def beside(job: Job) -> dict[str, Any]:
    """What a whole run does beside its steps, as ``plan.json`` has it; None for what it does not.

    ``readings`` and ``previews``: count, passes through the denoiser of one, and the share of the steps' time that all of
    them take, estimated. ``probes``: the share that they take at most.
    """
    return {"readings": readings(job), "previews": previews(job), "probes": probes(job)}


def readings(job: Job) -> dict[str, Any] | None:
    """Each window at nine noise levels; twice where averages of the weights are kept, which are read beside the weights."""
    count, twice = times(job.config.validate_every, job.steps), 1 + (job.config.ema.decay is not None)
    if not count:
        return None
    held_out, training = validation_windows(job.library.held_out_windows, job.training_windows)
    windows = (*held_out, *training)
    tokens = QUANTILES * twice * sum(job.spec.tokens(window.shape) for window in windows)
    passes = QUANTILES * twice * len(windows)
    return {
        "count": count,
        "held_out_windows": len(held_out),
        "training_windows": len(training),
        "passes": passes,
        "share": rounded(share_of_steps(job, count * tokens)),
    }


def previews(job: Job) -> dict[str, Any] | None:
    """Each prompt by so many denoising steps, of two passes with guidance for which the network is asked twice."""
    count, prompts = times(job.config.sample_after, job.steps), prompts_of(job)
    if not (count and prompts):
        return None
    settings = sample_settings(job.config, job.spec, usual_shape(job))
    passes = len(prompts) * settings.steps * passes_of(job.spec, settings.guidance)
    tokens = passes * job.spec.tokens(settings.shape)
    return {
        "count": count,
        "prompts": len(prompts),
        "passes": passes,
        "share": rounded(share_of_steps(job, count * tokens)),
    }


def probes(job: Job) -> dict[str, Any] | None:
    """At most the budget, and no more than one before the first step and at each checkpoint; None: it cannot pay for two."""
    plan, budget = sample_metrics_plan(job), job.config.sample_metrics.budget
    if plan is None or 2 * (one := share_of_run(plan, job)) > budget:
        return None
    saves = times(job.config.save_every, job.steps, 0) if job.config.save_every else 1
    return {"share_at_most": rounded(min(budget, (1 + saves) * one))}


def share_of_run(plan: SampleMetricsPlan, job: Job) -> float:
    """What a probe costs as a share of the whole training, estimated before a step was timed; decoding is left out."""
    settings, spec = plan.settings, job.spec
    passes = passes_of(spec, settings.guidance)
    return share_of_steps(job, plan.samples * settings.steps * passes * spec.tokens(settings.shape))


def rounded(share: float) -> float:
    """Three digits: it is an estimate."""
    return float(f"{share:.3g}")


def share_of_all(found: Mapping[str, Any]) -> float:
    """Readings, previews and probes together, as a share of the steps' time."""
    estimated = sum(one["share"] for one in (found["readings"], found["previews"]) if one)
    return float(estimated + (found["probes"] or {"share_at_most": 0.0})["share_at_most"])
