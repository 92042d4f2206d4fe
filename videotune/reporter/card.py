"""The model card of a run: what was trained on what, how it went, and how its files are used; with nothing of this machine."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.lazy import huggingface_hub as hub
from videotune.models.registry import find
from videotune.reporter import inventory, outcome
from videotune.reporter.build import environment, fill
from videotune.reporter.previews import step_in
from videotune.reporter.read import Run, at, mapping, number

PREVIEWS = 4
"""At most so many previews, those of the last step that has some, go with a card."""

_PRIVATE = ("datasets", "base_model_name", "base_parts", "cache_dir", "init_from", "output_model_destination", "push_to",
            "samples", "sample_metrics.prompts", "sample_metrics.encoder", "transformer.file", "tracker_project")  # fmt: skip
"""Settings that name files, texts or accounts."""

_STANDARD = ("apache-2.0", "mit")
"""Licences of base models that the Hub knows by these words; it knows others as ``other``, with a name."""


def model_card(run: Run) -> Any:
    """The ``huggingface_hub.ModelCard`` of a run that has exports.

    Files are named as they lie in a repository: without folders, previews in ``samples``.
    """
    names = [{**entry, "path": Path(str(entry["path"])).name} for entry in run.exports or ()]
    found = replace(run, folder=Path(), exports=names)
    use, verdict, best = inventory.use(found), outcome.verdict(found), None
    name, tasks = run.folder.resolve().name, _task(found, use)
    if (value := number(verdict["latest"]["best"])) is not None:
        what = {"dataset_type": "private", "dataset_name": "held-out clips", "metric_type": "mse"}
        title = f"validation loss at step {verdict['best']:g}, each noise level divided by the base model's"
        best = [hub.EvalResult(task_type=tasks, metric_name=title, metric_value=value, **what)]
    method, family = run.setting("training_method"), find(str(run.setting("family")))
    base, licence = hub_id(run), base_licence(run, family.spec.licence)
    adapter, standard = method != "FINE_TUNE", licence.lower() in _STANDARD
    data = hub.ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        library_name="diffusers",
        pipeline_tag=tasks,
        license=licence.lower() if standard else "other",
        license_name=None if standard else re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-"),
        tags=["videotune", family.spec.name, *(["lora"] if method == "LORA" else [])],
        instance_prompt=use["trigger"] or None,
        widget=[{"text": text, "output": {"url": url}} for url, text in previews(run).items()] or None,
        model_name=name,
        eval_results=best,
    )
    own = [
        row for row in inventory.settings(found)["own"] if row[0] not in _PRIVATE and not re.search(r"[/\\]", row[1])
    ]
    facts = {
        "name": name,
        "base": base,
        "family": family.spec.title,
        "licence": licence,
        "use": use,
        "verdict": verdict,
    }
    facts |= {"run": found, "clips": _clips(run), "views": mapping(at(run.plan, "views", "per_window")), "own": own}
    facts |= {"steps": {step_in(entry) for entry in names}, "method": method, "files": names}
    text = fill(environment("videotune.reporter").overlay(autoescape=False), "card.md.j2", facts)
    return hub.ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def previews(run: Run) -> dict[str, str]:
    """Prompts of the newest previews that are there, by their paths in the repository."""
    samples = [record for record in run.of_kind("sample") if (run.folder / str(record["path"])).is_file()]
    last = [record for record in samples if record["step"] == samples[-1]["step"]][:PREVIEWS]
    return {f"samples/{Path(str(record['path'])).name}": str(record["prompt"]) for record in last}


def hub_id(run: Run) -> str | None:
    """The base model's id on the Hub; None for one that lies on this machine."""
    name = str(at(run.config, "base", "name")).partition("@")[0]
    return name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).exists() else None


def base_licence(run: Run, otherwise: str) -> str:
    """As the base's own README.md says it, where it lies on this machine; else ``otherwise``, the family's."""
    readme = Path(str(at(run.config, "base", "name"))).expanduser() / "README.md"
    if not readme.is_file():
        return otherwise
    data = hub.ModelCard.load(readme, ignore_metadata_errors=True).data
    return str(data.license_name or data.license or otherwise)


def _task(run: Run, use: Mapping[str, Any]) -> str:
    shape = use["shape"]
    if shape is not None and shape[0] == 1:
        return "text-to-image"
    return "image-to-video" if "ImageToVideo" in "".join(use["pipelines"]) else "text-to-video"


def _clips(run: Run) -> dict[str, float]:
    used = [clip for clip in run.clips if clip["used"]]
    seconds = sum(number(clip["source_seconds"]) or 0 for clip in used)
    captions = sum(any(clip["captions"] or ()) for clip in used) / max(1, len(used))
    return {"used": len(used), "held_out": sum(bool(clip["held_out"]) for clip in run.clips), "seconds": seconds,
            "captions": captions}  # fmt: skip
