"""``export``: what a run has learnt in the formats that others read, each read back before it is called done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune import __version__
from videotune.config.resolve import Resolved, resolve
from videotune.console import echo
from videotune.errors import DONE, VideotuneError
from videotune.export.embedding import export_embedding
from videotune.export.formats import CONFIG, changes_nothing, refuse_format
from videotune.export.full import export_full
from videotune.export.lora import export_lora
from videotune.export.merge import export_merged
from videotune.export.verify import Exported
from videotune.families.find import expert_part, part_files, place, spec_for
from videotune.files import hash_path, write_json
from videotune.records import read_record
from videotune.report.build import write_report
from videotune.train.checkpoint import pick
from videotune.train.components import lora_settings, open_models
from videotune.train.experts import of_expert, prefix, trained
from videotune.train.run_dir import read_run_config, run_settings
from videotune.train.text_encoders import ROWS, by_part
from videotune.types import Family, FamilySpec

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.config.schema import Config


def exactly(error: float) -> str:
    """How near two values are, in words."""
    return f"within {error:.0e}" if error else "the same to the bit"


def export(
    run: Path, formats: Sequence[str] = (), step: int | None = None, out: Path | None = None, merge: bool = False
) -> int:
    """Export a checkpoint of a run (the newest, or the one of ``step``); ``merge``: as a model that needs no adapter.

    Raises VideotuneError where there is nothing to merge, or a format is named for it.
    """
    settings = run_settings(run)
    base = place(settings["base_model_name"], weights=False)
    spec = spec_for(settings["family"], base)
    resolved = resolve(settings, {}, spec)
    checkpoint = pick(run, step)
    family = open_models(spec, base, resolved.config)
    if merge:
        refuse_merge(resolved.config, formats)
    state = checkpoint.load("ema" if checkpoint.has_ema else "weights")
    for done in export_run(run, family, state, checkpoint.step, resolved, formats, out, merge=merge):
        read = f"{done.modules} parts, read back by {done.reader}: {exactly(done.max_error)}"
        print(f"{done.format}: {done.path}  ({read})")
    write_report(run)
    return DONE


def check_formats(config: Config, family: Family) -> None:
    """Raise VideotuneError for a format that could not be written: before a training, not after it."""
    method, title = config.training_method, family.spec.title
    for name in _named_formats(config):
        if method == "FINE_TUNE" and name != "diffusers":
            raise VideotuneError(f"output_model_format: a fine-tuned model is a diffusers folder, not {name!r}")
        if method == "EMBEDDING" and name not in family.embedding_keys():
            known = ", ".join(sorted(family.embedding_keys()))
            raise VideotuneError(f"output_model_format: {title} has {known}, not {name!r}")
        if method == "LORA":
            refuse_format(family, config.lora.variant, name)


def _named_formats(config: Config) -> list[str]:
    named = config.output_model_format
    return [named] if isinstance(named, str) else list(named)


def refuse_merge(config: Config, formats: Sequence[str]) -> None:
    """Raise VideotuneError where a run has no adapter, or --merge stands beside a format."""
    if config.training_method == "EMBEDDING":
        raise VideotuneError("--merge: new tokens are no adapter: the base model stays as it is")
    if config.training_method == "FINE_TUNE":
        raise VideotuneError("--merge: a fine-tuned model has no adapter; its export is whole already")
    if formats:
        raise VideotuneError("--merge writes a folder in diffusers layout: it goes without --format")


def export_run(
    run: Path,
    family: Family,
    state: Mapping[str, Tensor],
    step: int,
    resolved: Resolved,
    formats: Sequence[str] = (),
    out: Path | None = None,
    tell: Callable[[str], None] = echo,
    merge: bool = False,
) -> list[Exported]:
    """Write each format, a file for each expert that was trained, and the list of them into ``exports.json``.

    An expert that has had no step, in a run so short that all of them fell to the other, has no file; ``tell`` hears of it.
    What trained of the text encoders alone has one, whatever the experts are. ``merge``: instead of all that, the base model
    with the adapters of all experts in its weights.
    """
    config, spec = resolved.config, family.spec
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run.resolve().name)
    begin = (out or Path(config.output_model_destination or run / "export")) / f"{name}-step-{step}"
    facts, done = _facts(run, step, resolved), []
    if merge:
        adapters = {expert: of_expert(state, prefix(spec, expert)) for expert in trained(spec, config)}
        facts |= {"expert": list(adapters)} if len(spec.experts) > 1 else {}
        facts |= {"merged": config.lora.variant, "use": _whole(family)}
        path = begin.with_name(f"{begin.name}-merged")
        done = [export_merged(family, adapters, lora_settings(config).scale, _base(config, spec), path, facts)]
    experts = () if merge else experts_of(family, config, state, tell)
    for format in () if merge else formats or _named_formats(config):
        ending = "" if format == "diffusers" else f"-{format}"
        if config.training_method == "EMBEDDING":
            path, own = begin.with_name(begin.name + ending), of_expert(state, ROWS)
            own_facts = facts | _use(family, config, None, format, facts["base"]["name"])
            done += export_embedding(family, format, own, config.embedding.token, path, own_facts)
            continue
        for expert in experts:
            own = of_expert(state, prefix(spec, expert) if expert else "")
            path = begin.with_name(begin.name + ending + (family.export_suffix(expert) if expert else ""))
            own_facts = facts | ({"expert": expert} if expert and len(spec.experts) > 1 else {})
            own_facts |= _use(family, config, expert, format, facts["base"]["name"])
            if config.training_method == "FINE_TUNE":
                net, text = by_part(family, own)
                done.append(
                    export_full(family, expert or spec.experts[0].name, net, _base(config, spec), path, own_facts, text)
                )
            else:
                path = path.with_name(f"{path.name}.safetensors")
                done.append(export_lora(family, format, own, lora_settings(config).scale, path, own_facts, expert))
    _list(run, done)
    return done


def experts_of(
    family: Family, config: Config, state: Mapping[str, Tensor], tell: Callable[[str], None]
) -> tuple[str | None, ...]:
    """The experts that get a file each; None where what trained is no expert's."""
    if not config.transformer.train:
        return (None,)
    names = trained(family.spec, config)
    if config.training_method != "LORA" or len(names) == 1:
        return names
    idle = [name for name in names if changes_nothing(of_expert(state, prefix(family.spec, name)))]
    if not idle or len(idle) == len(names):  # where all are, the export says that there is nothing to write
        return names
    tell(f"the expert {idle[0]} has had no step, so no file is written for it: more steps, or a shorter expert_period")
    return tuple(name for name in names if name not in idle)


def _list(run: Path, done: Sequence[Exported]) -> None:
    """Put what was written into exports.json, in the place of what lay there before."""
    listed = run / "exports.json"
    before = read_record(listed) if listed.is_file() else []
    new = [exported.to_json(run) | {"hash": hash_path(exported.path)} for exported in done]
    paths = {line["path"] for line in new}
    write_json(listed, [line for line in before if line["path"] not in paths] + new)


def exported(run: Path, format: str) -> Path:
    """The run's file or folder in a format.

    Raises VideotuneError where there is none, or its bytes are not those that were written.
    """
    found = [line for line in read_record(run / "exports.json") if line["format"] == format]
    if not found:
        raise VideotuneError(f"{run / 'exports.json'} lists no export in the format {format}: videotune export {run}")
    path = run / found[0]["path"]
    if not path.exists() or hash_path(path) != found[0]["hash"]:
        raise VideotuneError(f"{path} is missing or damaged: remove it and write it again with videotune export {run}")
    return path


def _facts(run: Path, step: int, resolved: Resolved) -> dict[str, Any]:
    """What the file says of itself, so that it can be used years later."""
    config, kept, plan = resolved.config, read_run_config(run), read_record(run / "plan.json")
    file, name = config.transformer.file, kept["base"]["name"]
    files = [Path(one).name for one in ([file] if isinstance(file, str) else file or []) if one]
    return {
        "videotune": __version__,
        # of a local folder the last part alone: the file is made to be shared
        "base": {**kept["base"], "name": Path(name).name if Path(name).is_absolute() else name},
        **({"transformer_file": files} if files else {}),
        "data": kept["data"],
        "step": step,
        "steps": kept["steps"],
        "effective_batch": plan["effective_batch"],
        "views_by_the_end": plan["views"]["per_window"],
        "triggers": [dataset.trigger for dataset in config.datasets if dataset.trigger],
        "fps": config.video_config.target_fps,
        "buckets": [bucket["shape"] for bucket in plan["buckets"]],
        "ema": config.ema.decay,
    }


def _base(config: Config, spec: FamilySpec) -> Path:
    """Where the base model lies, with the weights that it was trained from."""
    return place(str(config.base_model_name), files=part_files(config.transformer.file, spec)).folder


def _whole(family: Family) -> str:
    """How a folder of a whole model is used, in code."""
    return f"pipe = {family.pipeline_class().__name__}.from_pretrained(THIS_FOLDER)"


def _use(family: Family, config: Config, expert: str | None, format: str, base: str) -> dict[str, Any]:
    """How the file is used, in code, and what of it a reader might ask; ``base``: the base model's name."""
    pipeline, kind = family.pipeline_class().__name__, config.lora.variant
    if config.training_method == "FINE_TUNE":
        return {"use": _whole(family)}
    if config.training_method == "EMBEDDING":
        use = (
            f"class Pipeline({pipeline}, TextualInversionLoaderMixin): pass; pipe = Pipeline.from_pretrained({base!r}); "
            "pipe.load_textual_inversion(THIS_FILE); prompt = pipe.maybe_convert_prompt(prompt, pipe.tokenizer)"
        )
        return {"vectors": config.embedding.vectors, "use": use}
    begin = f"pipe = {pipeline}.from_pretrained({base!r}); "
    alpha = "baked into lora_B" if kind in ("LORA", "DORA") else "none" if kind == "OFT" else "baked into the weights"
    if kind in ("LORA", "DORA"):
        second = ", load_into_transformer_2=True" if expert != family.spec.experts[0].name else ""
        use = f"{begin}pipe.load_lora_weights(THIS_FILE{second})"
    elif format == "comfyui":
        use = "a LoRA loader of ComfyUI, for the model alone"
    else:
        net = f"pipe.{expert_part(family.spec, expert)}"
        use = (
            f"import json, peft, safetensors.torch; {begin}head = safetensors.safe_open(THIS_FILE, 'pt').metadata(); "
            f"{net}.add_adapter(peft.get_peft_config(json.loads(head['{CONFIG}']))); "
            f"peft.set_peft_model_state_dict({net}, safetensors.torch.load_file(THIS_FILE))"
        )
    return {"variant": kind, "rank": config.lora.rank, "alpha": alpha, "use": use}
