"""``autopsy``: compare what another trainer does with clips, by its own config, with
what videotune does.
"""

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
from videotune.interop.translate import refuse_config_of_other_model, translate
from videotune.job.job import Job
from videotune.latent_cache.sampler import steps_per_epoch
from videotune.models.skeletons import explained
from videotune.trainer.build import make_timesteps


def autopsy(
    files: Sequence[Path | str],
    data: Path | str,
    *,
    base: str | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Return another trainer's account of clips beside ours, and the differences.

    No model is loaded.

    Args:
        files: their config.
        data: the clips.
        base: the base model, if their config does not name one that is known.
        sets: KEY=VALUE on top of their config, by their keys.

    Raises:
        VideotuneError: for a config that cannot be read, a trainer whose rules are not
            known, and if no model is named or no clip can be read.
    """
    theirs = read_foreign_config([Path(file) for file in files])
    changes = _changes(sets, theirs.trainer)
    theirs = replace(theirs, values={**theirs.values, **changes})
    imported = translate(theirs)
    for row in imported.rows:
        if row.key in changes and row.verdict == "unknown":
            raise VideotuneError(
                f"--set {row.key}: no rule of {theirs.trainer} knows this key"
            )

    config = dict(imported.config)
    if base:
        config["base_model_name"] = base
    else:
        refuse_config_of_other_model(theirs)
    if not {"base_model_name", "family"} & set(config):
        raise VideotuneError(f"{files[0]} names no known model. Pass it with --base")
    first_dataset = next(iter(config.get("datasets") or [{}]))
    config["datasets"] = [{**first_dataset, "path": str(data)}]
    config["cache_dir"] = None  # nothing is written to a folder that their file names

    result = check(config, allow_skips="all")
    if not result.account["clips"]:
        raise VideotuneError(f"{data} has no clips")
    with explained(
        f"{files[0]} has values that {theirs.trainer} would not accept either"
    ):
        applied = build_trainer_rules(theirs.trainer, theirs.values, result.job.spec)
        comparison = build_autopsy(
            theirs.trainer,
            applied,
            result.job.spec,
            result.account,
            _our_figures(result.job),
            [Path(data).absolute()],
        )
        return {"model": result.job.spec.title, **comparison}


def _changes(sets: Sequence[str], trainer: str) -> dict[str, Any]:
    """Parse KEY=VALUE options by another trainer's keys."""
    changes = {}
    for option in sets:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise VideotuneError(
                f"--set {option}: pass KEY=VALUE, by the keys of {trainer}"
            )
        changes[key] = parse_scalar(value)
    return changes


def _our_figures(job: Job) -> dict[str, Any]:
    return {
        "steps_per_epoch": float(steps_per_epoch(job.schedule)) if job.buckets else 0.0,
        "noise": [
            float(t) for t in make_timesteps(job.spec, job.config).at(NOISE_QUANTILES)
        ],
        "scale": job.config.lora.scale,
    }
