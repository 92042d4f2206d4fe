"""``plan``: what a run would do: steps, views, tokens, memory, time, disk; and which noise levels it would train."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from videotune.config.schema import Config
from videotune.console import bar
from videotune.diffusion.timesteps import shift_of_tokens
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.job.experts import trained
from videotune.job.job import Job, open_job, refuse_skips
from videotune.job.overrides import ConfigSource, resolve_config, to_overrides
from videotune.latent_cache import exposure, sampler
from videotune.planner.fit import asked_card, fit, planned_dtype, to_json
from videotune.planner.memory import known_step_spec
from videotune.planner.plan import make_plan
from videotune.trainer import build
from videotune.types import ModelSpec
from videotune.validation.overhead import planned


@dataclass(frozen=True)
class PlanResult:
    """``plan``: what ``plan --json`` prints."""

    plan: dict[str, Any]
    job: Job

    @property
    def experts(self) -> int:
        """How many experts train."""
        return len(trained(self.job.spec, self.job.config))

    @property
    def exit_code(self) -> int:
        """0: the run fits, or no card is named; 2: the card or the disk is too small."""
        return (
            SKIPPED if self.plan["fits"] is False or self.plan["disk"]["short_bytes"] else DONE
        )


def plan(
    config: ConfigSource = None,
    *,
    vram: float | None = None,
    card: str | None = None,
    views: Sequence[int] = (),
    allow_skips: str | None = None,
    known: bool = False,
    **overrides: Any,
) -> PlanResult:
    """What a run would do, on a card with ``vram`` GB (10^9 bytes) of memory, or of that name; with neither on this machine.

    ``views``: how many times a window is to be seen, for which the steps are calculated, instead of 10, 20, 50 and 100.
    ``known``: memory and time are left out unless such a step was measured before, since measuring takes seconds.
    """
    job = planned(
        open_job(*resolve_config(to_overrides(config, overrides, allow_skips), planning=True))
    )
    refuse_skips(job, allow_skips)
    found = make_plan(job, views or exposure.TARGETS)
    free = shutil.disk_usage(
        Path.cwd()
    ).free  # a run lies below this folder, unless its --out names another
    found["disk"] |= {
        "free_bytes": free,
        "short_bytes": max(0, found["disk"].get("run_bytes", 0) - free),
    }
    if job.base is not None:
        limit, named = asked_card(vram, card)
        dtype = planned_dtype(job.config, limit is not None)
        if not known or known_step_spec(job, dtype) is not None:
            with bar("measuring without memory"):
                found |= to_json(
                    fit(job, dtype, limit, named),
                    job,
                    dtype,
                    found["disk"].get("checkpoint_bytes", 0),
                )
    elif vram or card:
        raise VideotuneError(
            "--vram, --card: what a run needs is read from its base model: name one (base_model_name)"
        )
    return PlanResult(found, job)


BANDS = 9
"""Equal parts of [0, 1], those of the journal's by_t; and as many levels at which the validation loss is taken."""

COLUMNS = 72
"""Points of a density."""


def noise_levels(config: ConfigSource = None, **overrides: Any) -> dict[str, Any]:
    """The distribution of t that a run would train; of a shift by resolution one for each bucket of the clips."""
    resolved, spec, base = resolve_config(to_overrides(config, overrides), planning=True)
    shapes: dict[str, tuple[int, float]] = {}
    if resolved.config.timestep_shift == "resolution":
        job = open_job(resolved, spec, base, to_look=True)
        turns = float(sampler.steps_per_epoch(job.schedule))
        sizes = zip(job.shapes, job.buckets, job.schedule.batches, strict=True)
        shapes = {
            str(shape): (spec.tokens(shape), len(bucket) / batch / turns)
            for shape, bucket, batch in sizes
        }
    return levels(spec, resolved.config, shapes)


def levels(
    spec: ModelSpec, config: Config, shapes: dict[str, tuple[int, float]]
) -> dict[str, Any]:
    """{"validation": the levels of the validation loss, "distributions": [...]}.

    A distribution has its bucket, shift, share of the steps, bands, experts and density.

    ``shapes``: tokens and share of the steps of each bucket where the shift depends on it; empty: one for all.
    """
    fixed = build.make_objective(spec, config).timesteps
    rule = spec.shift_by_tokens
    found = []
    several = shapes if rule is not None and shapes else {"": (0, 1.0)}
    for shape, (tokens, share) in several.items():
        ts = replace(fixed, shift=shift_of_tokens(tokens, rule)) if shape and rule else fixed
        edges = torch.linspace(0, 1, COLUMNS + 1, dtype=torch.float64)
        found.append(
            {
                "bucket": shape or None,
                "share_of_steps": round(share, 4),
                "distribution": ts.distribution,
                "shift": round(ts.shift, 4),
                "bands": [round(ts.mass(i / BANDS, (i + 1) / BANDS), 4) for i in range(BANDS)],
                "experts": {
                    expert.name: round(ts.mass(expert.t_lo, expert.t_hi), 4)
                    for expert in spec.experts
                },
                "density": [
                    round(value, 4) for value in (ts.cdf(edges).diff() * COLUMNS).tolist()
                ],
            }
        )
    return {
        "validation": [round(t, 4) for t in fixed.quantiles(BANDS).tolist()],
        "distributions": found,
    }
