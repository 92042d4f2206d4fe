"""The model card of a run: what was trained on what, how it went, how its files are used; with nothing of this machine."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.lazy import huggingface_hub as hub
from videotune.models.registry import find
from videotune.reporter import inventory, outcome
from videotune.reporter.build import environment, fill
from videotune.reporter.previews import step_in
from videotune.reporter.read import Run, at, number

PREVIEWS = 4
"""At most so many previews, those of the last step that has some, go with a card."""

_PRIVATE = re.compile(
    r"datasets|base_(model_name|parts)|cache_dir|init_from|output_model_destination|push_to|samples|transformer\.file|"
    r"sample_metrics\.(prompts|encoder)|tracker_project|missing_caption_text|embedding\.init_text"
)
"""Settings that name files, texts or accounts."""

_STANDARD = ("apache-2.0", "mit")
"""Licences of base models that the Hub knows by these words; it knows others as ``other``, with a name."""


def model_card(run: Run) -> Any:
    """The ``huggingface_hub.ModelCard`` of a run.

    Files are named as they lie in a repository: without folders, previews in ``samples``. Raises VideotuneError for a run
    without exports.
    """
    if not run.exports:
        raise VideotuneError(f"{run.folder} has no exports: videotune export {run.folder}")
    files = [{**entry, "path": Path(str(entry["path"])).name} for entry in run.exports]
    shown = replace(run, folder=Path(), exports=files)
    use = inventory.use(shown)
    verdict = outcome.verdict(shown)
    name = run.folder.resolve().name
    family = find(str(run.setting("family"))).spec
    method = run.setting("training_method")
    base = hub_id(run)
    task = _task(use)
    licence = base_licence(run, family.licence)
    best = number(verdict["latest"]["best"])
    result = (
        None
        if best is None
        else [hub.EvalResult(task, "private", "held-out clips", "relative_mse", best)]
    )
    standard = licence.lower() in _STANDARD
    data = hub.ModelCardData(
        library_name="diffusers", base_model=base, pipeline_tag=task, model_name=name,
        instance_prompt=use["trigger"] or None,
        base_model_relation=("finetune" if method == "FINE_TUNE" else "adapter") if base else None,
        license=licence.lower() if standard else "other",
        license_name=None if standard else re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-"),
        tags=["videotune", family.name, *(["lora"] if method == "LORA" else [])],
        widget=[{"text": text, "output": {"url": url}} for url, text in previews(run).items()] or None,
        eval_results=result,
    )  # fmt: skip
    own = [
        row
        for row in inventory.settings(shown)["own"]
        if not _PRIVATE.match(row[0]) and "/" not in row[1]
    ]
    facts = {
        "name": name,
        "base": base or family.title,
        "licence": licence,
        "d": use,
        "own": own,
        "run": shown,
    }
    facts |= {"verdict": verdict, "steps": sorted({step_in(file) or 0 for file in files})}
    text = fill(
        environment("videotune.reporter").overlay(autoescape=False), "card.md.j2", facts
    )
    return hub.ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def previews(run: Run) -> dict[str, str]:
    """Prompts of the newest previews that are there, by their paths in the run's folder and in a repository."""
    there = [
        record
        for record in run.of_kind("sample")
        if (run.folder / str(record["path"])).is_file()
    ]
    last = [record for record in there if record["step"] == there[-1]["step"]][:PREVIEWS]
    return {
        f"samples/{Path(str(record['path'])).name}": str(record["prompt"]) for record in last
    }


def hub_id(run: Run) -> str | None:
    """The base model's id on the Hub; None for one that lies on this machine."""
    name = str(at(run.config, "base", "name")).partition("@")[0]
    return (
        name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).exists() else None
    )


def base_licence(run: Run, otherwise: str) -> str:
    """As the base's own README.md says it, where it lies on this machine; else ``otherwise``, the family's."""
    readme = Path(str(at(run.config, "base", "name"))).expanduser() / "README.md"
    data = (
        hub.ModelCard.load(readme, ignore_metadata_errors=True).data
        if readme.is_file()
        else hub.ModelCardData()
    )
    return str(data.license_name or data.license or otherwise)


def _task(use: dict[str, Any]) -> str:
    if use["shape"] is not None and use["shape"][0] == 1:
        return "text-to-image"
    return "image-to-video" if "ImageToVideo" in "".join(use["pipelines"]) else "text-to-video"
