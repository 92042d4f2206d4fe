"""``plan --timesteps``: which noise levels a run would draw, as a curve of characters, by band and by expert."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from videotune.config.schema import Config
from videotune.console import print_table
from videotune.diffusion.timesteps import shift_of_tokens
from videotune.errors import DONE
from videotune.latent_cache.sampler import steps_per_epoch
from videotune.trainer.components import make_objective
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import open_job
from videotune.types import ModelSpec

BANDS = 9
"""Equal parts of [0, 1], those of the journal's by_t; and as many levels at which the ruler reads."""

ROWS, COLUMNS = 8, 72
"""Size of the curve in characters."""


def plot_noise_levels(words: Overrides, *, as_json: bool = False) -> int:
    """Print the distribution of t; of a shift by resolution one for each bucket of the clips."""
    resolved, spec, base = resolve_config(words, planning=True)
    shapes: dict[str, tuple[int, float]] = {}
    if resolved.config.timestep_shift == "resolution":
        job = open_job(resolved, spec, base, to_look=True)
        turns = float(steps_per_epoch(job.schedule))
        sizes = zip(job.shapes, job.buckets, job.schedule.batches, strict=True)
        shapes = {str(shape): (spec.tokens(shape), len(bucket) / batch / turns) for shape, bucket, batch in sizes}
    facts = levels(spec, resolved.config, shapes)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return DONE
    for one in facts["distributions"]:
        _show(one, facts["ruler"])
    return DONE


def levels(spec: ModelSpec, config: Config, shapes: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """{"ruler": the levels it reads at, "distributions": [of each bucket: shift, share of steps, bands, experts, density]}.

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
    return {"ruler": [round(t, 4) for t in fixed.quantiles(BANDS).tolist()], "distributions": found}


def curve(density: list[float]) -> list[str]:
    """A density over [0, 1] as ROWS lines of blocks, the highest value at the top."""
    eighths = " ▁▂▃▄▅▆▇█"
    top = max(density) or 1.0
    heights = [round(value / top * ROWS * 8) for value in density]
    rows = range(ROWS - 1, -1, -1)
    return ["".join(eighths[min(8, max(0, height - 8 * row))] for height in heights) for row in rows]


def _show(one: dict[str, Any], validation: list[float]) -> None:
    of = f", {one['share_of_steps']:.0%} of the steps: {one['bucket']}" if one["bucket"] else ""
    print(f"noise levels: {one['distribution']}, shift {one['shift']:g}{of}")
    for line in curve(one["density"]):
        print(f"  {line}")
    print(f"  {'0 data':<{COLUMNS - 7}}1 noise")
    rows = []
    for i, share in enumerate(one["bands"]):
        inside = [f"{t:.3f}" for t in validation if i / BANDS <= t < (i + 1) / BANDS or (t == 1 and i == BANDS - 1)]
        rows.append([f"{i / BANDS:.3f} to {(i + 1) / BANDS:.3f}", f"{share:.1%}", ", ".join(inside) or "none"])
    print_table("by band, as the journal's by_t", ["t", "share of draws", "the ruler reads at"], rows, right=(1,))
    if len(one["experts"]) > 1:
        print("experts: " + ", ".join(f"{name} {share:.1%}" for name, share in one["experts"].items()))
