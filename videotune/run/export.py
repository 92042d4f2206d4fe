"""``export``: a run's LoRA in the formats that others read, each read back before it is called done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune import __version__
from videotune.config.resolve import Resolved, resolve
from videotune.errors import DONE, VideotuneError
from videotune.export.lora import Exported, export_lora
from videotune.families.find import place, spec_for
from videotune.files import read_json, write_json
from videotune.report.html import write_report
from videotune.run.folder import read_run_config, run_settings
from videotune.run.models import lora_settings, open_models
from videotune.train.state import Checkpoint, complete_checkpoints, last_checkpoint
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor


def exactly(error: float) -> str:
    """How near two values are, in words."""
    return f"within {error:.0e}" if error else "the same to the bit"


def export(run: Path, formats: Sequence[str] = (), step: int | None = None, out: Path | None = None) -> int:
    """Export a checkpoint of a run (the newest, or the one of ``step``)."""
    settings = run_settings(run)
    base = place(settings["base_model_name"], weights=False)
    spec = spec_for(settings["family"], base)
    resolved = resolve(settings, {}, spec)
    checkpoint = pick(run, step)
    family = open_models(spec, base, resolved.config)
    state = checkpoint.load()[0]
    for done in export_run(run, family, state, checkpoint.step, resolved, formats, out):
        print(
            f"{done.format}: {done.path}  ({done.modules} modules, read back by diffusers: ΔW {exactly(done.max_error)})"
        )
    write_report(run)
    return DONE


def pick(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest.

    Raises VideotuneError that lists the complete ones.
    """
    if step is None:
        return last_checkpoint(run)
    found = {checkpoint.step: checkpoint for checkpoint in complete_checkpoints(run)}
    if step not in found:
        raise VideotuneError(
            f"{run} has no complete checkpoint of step {step}; it has {', '.join(map(str, found)) or 'none'}"
        )
    return found[step]


def named_formats(value: str | list[str]) -> list[str]:
    """The formats that ``output_model_format`` names."""
    return [value] if isinstance(value, str) else value


def check_formats(value: str | list[str], family: Family) -> None:
    """Raise VideotuneError for a format that could not be written: before a training, not after it."""
    for name in named_formats(value):
        if name not in family.key_maps():
            known = ", ".join(sorted(family.key_maps()))
            raise VideotuneError(f"output_model_format: {family.spec.title} has {known}, not {name!r}")


def export_run(
    run: Path,
    family: Family,
    state: Mapping[str, Tensor],
    step: int,
    resolved: Resolved,
    formats: Sequence[str] = (),
    out: Path | None = None,
) -> list[Exported]:
    """Write each format, and the list of them into ``exports.json``."""
    config = resolved.config
    wanted = list(formats) or named_formats(config.output_model_format)
    folder = out or Path(config.output_model_destination or run / "export")
    facts = _facts(run, family, step, resolved)
    scale = lora_settings(config).scale
    done = []
    for format in wanted:
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run.resolve().name)
        path = folder / f"{name}-step-{step}{'' if format == 'diffusers' else '-' + format}.safetensors"
        done.append(export_lora(family, format, state, scale, path, facts))
    listed = run / "exports.json"
    before = read_json(listed) if listed.is_file() else []
    new = [exported.to_json(run) for exported in done]
    paths = {line["path"] for line in new}
    write_json(listed, [line for line in before if line["path"] not in paths] + new)
    return done


def _facts(run: Path, family: Family, step: int, resolved: Resolved) -> dict[str, Any]:
    """What the file says of itself, so that it can be used years later."""
    config, kept = resolved.config, read_run_config(run)
    plan, file = read_json(run / "plan.json"), config.transformer.file
    files = [Path(one).name for one in ([file] if isinstance(file, str) else file or []) if one]
    base = Path(kept["base"]["name"]).name if Path(kept["base"]["name"]).is_absolute() else kept["base"]["name"]
    return {
        "videotune": __version__,
        "base": {**kept["base"], "name": base},  # of a local folder its name alone: the file is made to be shared
        **({"transformer_file": files} if files else {}),
        "data": kept["data"],
        "step": step,
        "steps": kept["steps"],
        "effective_batch": plan["effective_batch"],
        "views_by_the_end": plan["views"]["per_window"],
        "triggers": [dataset.trigger for dataset in config.datasets if dataset.trigger],
        "fps": config.video_config.target_fps,
        "buckets": [bucket["shape"] for bucket in plan["buckets"]],
        "rank": config.lora.rank,
        "alpha": "baked into lora_B",
        "use": f"pipe = {family.pipeline_class().__name__}.from_pretrained({base!r}); "
        "pipe.load_lora_weights(THIS_FILE)",
    }
