"""``autopsy``: what another trainer does with clips by its own config, beside what videotune does with them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.commands.check import check
from videotune.errors import VideotuneError
from videotune.interop.autopsy import NOISE_QUANTILES, build_autopsy
from videotune.interop.command_files import parse_scalar
from videotune.interop.foreign_config import read_foreign_config
from videotune.interop.trainer_rules import build_trainer_rules
from videotune.interop.translate import translate
from videotune.latent_cache.sampler import steps_per_epoch
from videotune.models.loading import explained
from videotune.trainer.build import make_timesteps


def autopsy(
    files: Sequence[Path | str],
    data: Path | str,
    *,
    base: str | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Their account of the clips in ``data`` beside ours, and the differences; no model is loaded.

    ``base``: the model, where their config does not name one that is known; ``sets``: KEY=VALUE above their config, by
    their keys. Raises VideotuneError for a config that is not read, for a trainer whose rules are not known, and where no
    model is named or no clip can be read.
    """
    theirs = read_foreign_config([Path(file) for file in files])
    if odd := [one for one in sets if not one.partition("=")[0] or "=" not in one]:
        raise VideotuneError(f"--set {odd[0]}: give KEY=VALUE, by the keys of {theirs.trainer}")
    given = {key: parse_scalar(value) for key, _, value in (one.partition("=") for one in sets)}
    theirs = replace(theirs, values={**theirs.values, **given})
    imported = translate(theirs)
    if odd := [
        row.key for row in imported.rows if row.key in given and row.verdict == "unknown"
    ]:
        raise VideotuneError(f"--set {odd[0]}: no rule of {theirs.trainer} knows this key")
    config = imported.config | ({"base_model_name": base} if base else {})
    if not {"base_model_name", "family"} & set(config):
        raise VideotuneError(f"{files[0]} names no model that is known: give it as --base")
    first = next(iter(config.get("datasets") or [{}]))
    config |= {
        "datasets": [{**first, "path": str(data)}],
        "cache_dir": None,
    }  # nothing is written where a file says
    result = check(config, allow_skips="all")
    job = result.job
    if not result.account["clips"]:
        raise VideotuneError(f"{data} has no clips")
    ours = {
        "steps_per_epoch": float(steps_per_epoch(job.schedule)) if job.buckets else 0.0,
        "noise": [float(t) for t in make_timesteps(job.spec, job.config).at(NOISE_QUANTILES)],
        "scale": job.config.lora.scale,
    }
    roots = [Path(data).absolute()]
    with explained(f"{files[0]} has values that {theirs.trainer} would not take either"):
        applied = build_trainer_rules(theirs.trainer, theirs.values, job.spec)
        return {
            "model": job.spec.title,
            **build_autopsy(theirs.trainer, applied, job.spec, result.account, ours, roots),
        }
