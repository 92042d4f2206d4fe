"""The model card of a run, without anything private of this machine."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.bounds import CONFIG_BYTES, read_limited
from videotune.errors import VideotuneError
from videotune.lazy import huggingface_hub as hub
from videotune.model_spec import asset_title
from videotune.models.registry import find
from videotune.reporter import inventory, outcome
from videotune.reporter.build import environment, fill
from videotune.reporter.previews import step_in
from videotune.reporter.privacy import shareable
from videotune.reporter.read import Run, at, mapping
from videotune.reporter.sound_code import conditioning_modality
from videotune.runs.plan_facts import samples_per_step_words
from videotune.runs.schemas import REMEDIES
from videotune.text import as_argument

MAX_PREVIEWS = 4
"""Previews of a card, at most; they are of the last step that has some."""

_METHOD_TITLES = {
    "LORA": "LoRA",
    "FINE_TUNE": "Full fine-tuning",
    "EMBEDDING": "Textual inversion",
}

_PRIVATE = re.compile(
    r"datasets|base_(model_name|parts)|cache_dir|init_from|output_model_destination|"
    r"push_to|push_checkpoints_to|notify|samples|transformer\.file|sample_metrics\.(prompts|encoder)|"
    r"tracker_project|missing_caption_text|embedding\.init_text|sample\.negative"
)
"""Settings that name files, texts or accounts."""

_LICENCE = re.compile(r"[\w][\w .,+()/-]{0,79}")
"""How licences are called; other text of a README is not quoted."""

_STANDARD_LICENCES = ("apache-2.0", "mit")
"""Licences that the Hub has identifiers for; others are ``other`` with a name."""


def model_card(run: Run) -> Any:
    """Return the ``huggingface_hub.ModelCard`` of a run.

    Files have the paths of the repository: no folders, except ``samples`` for previews.

    Raises:
        VideotuneError: if the run has no exports.
    """
    if not run.exports:
        raise VideotuneError(
            f"{run.folder}: nothing is exported. Run: videotune export {as_argument(run.folder)}"
        )
    if run.config is None or run.plan is None:
        missing = "config.json" if run.config is None else "plan.json"
        raise VideotuneError(
            f"{run.folder / missing} is missing or damaged: restore a copy of it"
        )
    public_run = shareable(run)
    files = []
    for entry in public_run.exports or ():
        files.append({**entry, "path": Path(str(entry["path"])).name})
    public_run = replace(public_run, folder=Path(), exports=files)
    use = inventory.use(public_run)
    verdict = outcome.verdict(public_run)
    family = find(str(run.setting("family"))).spec
    base = hub_id(run)
    licence = base_licence(run, family.licence)
    settings = []
    for row in inventory.settings(public_run)["own"]:
        if not _PRIVATE.match(row[0]) and "/" not in row[1]:
            settings.append(row)

    name = run.folder.resolve().name
    steps = sorted({step_in(file) or 0 for file in files})
    loss = dict(run.held_out_losses).get(steps[-1])
    data = _card_data(
        run,
        name=name,
        base=base,
        family_name=family.name,
        licence=licence.lower(),
        use=use,
        loss=loss,
    )
    facts = {
        "name": name,
        "method": _method_title(run),
        "base": base or _base_title(run) or family.title,
        "licence": licence,
        "d": use,
        "own": settings,
        "run": public_run,
        "verdict": verdict,
        "samples_per_step": samples_per_step_words(mapping(run.plan)),
        "steps": steps,
        "loss": loss,
    }
    templates = environment("videotune.reporter").overlay(autoescape=False)
    text = fill(templates, "card.md.j2", facts)
    return hub.ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _method_title(run: Run) -> str:
    """Return what a run has trained; VideotuneError if its config does not tell."""
    method = str(run.setting("training_method"))
    if method not in _METHOD_TITLES:
        raise VideotuneError(
            f"{run.folder / 'config.json'}: settings.training_method is none of {', '.join(_METHOD_TITLES)}: {REMEDIES['config']}"
        )
    return _METHOD_TITLES[method]


def _base_title(run: Run) -> str | None:
    return asset_title(str(run.setting("base_model_name")))


def _card_data(
    run: Run,
    *,
    name: str,
    base: str | None,
    family_name: str,
    licence: str,
    use: dict[str, Any],
    loss: float | None,
) -> Any:
    """Return the metadata of the card.

    Args:
        run: the run.
        name: name of the run.
        base: Hub id of the base model, or None.
        family_name: name of the model family.
        licence: licence of the base model, in lower case.
        use: the chapter ``inventory.use``.
        loss: the held-out loss of the exported step, relative to the first one, or
            None if it was not measured there.
    """
    method = run.setting("training_method")
    task = (
        "text-to-audio" if conditioning_modality(run) == "video" else _pipeline_tag(use)
    )
    relation = None
    if base:
        relation = "finetune" if method == "FINE_TUNE" else "adapter"
    tags = ["videotune", family_name]
    if method == "LORA":
        tags.append("lora")

    is_standard = licence in _STANDARD_LICENCES
    licence_name = None
    if not is_standard:
        licence_name = re.sub(r"[^a-z0-9.]+", "-", licence).strip("-")
    widget = []
    for url, prompt in previews(run).items():
        widget.append({"text": prompt, "output": {"url": url}})
    results = None
    if loss is not None:
        result = hub.EvalResult(
            task, "private", "clips kept aside", "relative_mse", loss
        )
        results = [result]
    return hub.ModelCardData(
        library_name="diffusers",
        base_model=base,
        pipeline_tag=task,
        model_name=name,
        instance_prompt=use["trigger"] or None,
        base_model_relation=relation,
        license=licence if is_standard else "other",
        license_name=licence_name,
        tags=tags,
        widget=widget or None,
        eval_results=results,
    )


def previews(run: Run) -> dict[str, str]:
    """Return the prompts of the latest previews by their path in the repository.

    The path is also valid in the run folder. Missing files are left out.
    """
    existing = []
    for record in run.of_kind("sample"):
        name = Path(str(record["path"])).name
        if (run.folder / "samples" / name).is_file():
            existing.append(record)
    latest = [record for record in existing if record["step"] == existing[-1]["step"]]
    return {
        f"samples/{Path(str(record['path'])).name}": str(record["prompt"])
        for record in latest[:MAX_PREVIEWS]
    }


def hub_id(run: Run) -> str | None:
    """Return the base model's id on the Hub; None for a local one."""
    name = str(at(run.config, "base", "name")).partition("@")[0]
    is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None
    return name if is_id and not Path(name).exists() else None


def base_licence(run: Run, default: str) -> str:
    """Return the licence in a local base model's README.md, else the default."""
    folder = Path(str(at(run.config, "base", "name"))).expanduser()
    readme = folder / "README.md"
    is_model = (folder / "model_index.json").is_file()
    if not is_model or not readme.is_file():
        return default  # config.json may name any folder of this machine
    text = read_limited(readme, CONFIG_BYTES, "a README").decode(errors="replace")
    data: Any = hub.ModelCard(text, ignore_metadata_errors=True).data
    licence = str(data.license_name or data.license or default)
    return licence if _LICENCE.fullmatch(licence) else default


def _pipeline_tag(use: dict[str, Any]) -> str:
    """Return the Hub's name of the task."""
    if use["shape"] is not None and use["shape"][0] == 1:
        return "text-to-image"
    return "image-to-video" if use["takes_image"] else "text-to-video"
