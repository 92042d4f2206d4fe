"""``plan --timesteps``: which noise levels a run would train, by band, by bucket and by expert."""

from dataclasses import replace
from typing import Any, Unpack

import torch

from videotune.config.schema import Config
from videotune.diffusion.timesteps import shift_of_tokens
from videotune.latent_cache.sampler import steps_per_epoch
from videotune.trainer.components import make_objective
from videotune.trainer.resolve_config import ConfigSource, Layers, overrides, resolve_config
from videotune.trainer.run_spec import open_job
from videotune.types import ModelSpec

BANDS = 9
"""Equal parts of [0, 1], those of the journal's by_t; and as many levels at which the validation loss is taken."""

COLUMNS = 72
"""Points of a density."""


def noise_levels(config: ConfigSource = None, **layers: Unpack[Layers]) -> dict[str, Any]:
    """The distribution of t that a run would train; of a shift by resolution one for each bucket of the clips."""
    resolved, spec, base = resolve_config(overrides(config, layers), planning=True)
    shapes: dict[str, tuple[int, float]] = {}
    if resolved.config.timestep_shift == "resolution":
        job = open_job(resolved, spec, base, to_look=True)
        turns = float(steps_per_epoch(job.schedule))
        sizes = zip(job.shapes, job.buckets, job.schedule.batches, strict=True)
        shapes = {str(shape): (spec.tokens(shape), len(bucket) / batch / turns) for shape, bucket, batch in sizes}
    return levels(spec, resolved.config, shapes)


def levels(spec: ModelSpec, config: Config, shapes: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """{"validation": the levels of the validation loss, "distributions": [...]}.

    A distribution has its bucket, shift, share of the steps, bands, experts and density.

    ``shapes``: tokens and share of the steps of each bucket where the shift depends on it; empty: one for all.
    """
    fixed = make_objective(spec, config).timesteps
    rule, found = spec.shift_by_tokens, []
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
                "experts": {expert.name: round(ts.mass(expert.t_lo, expert.t_hi), 4) for expert in spec.experts},
                "density": [round(value, 4) for value in (ts.cdf(edges).diff() * COLUMNS).tolist()],
            }
        )
    return {"validation": [round(t, 4) for t in fixed.quantiles(BANDS).tolist()], "distributions": found}
