"""Exporting a run: its formats, a file for each expert, what stands in their headers, and the list of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from videotune._version import __version__
from videotune.adapters.lora import in_one_scale
from videotune.config.resolve import Resolved
from videotune.config.schema import Config
from videotune.console import echo
from videotune.exporter.adapter_export import export_embedding, export_lora
from videotune.exporter.formats import CONFIG, Exported, changes_nothing, named_formats
from videotune.exporter.full import export_full, export_merged
from videotune.files import hash_path, write_json
from videotune.job.experts import of_expert, prefix, trained
from videotune.models.base import DiffusersModel
from videotune.models.base_model import own_files, place
from videotune.runs.run_dir import read_run_config
from videotune.runs.schemas import read_record
from videotune.trainer.build import DTYPES
from videotune.trainer.text_encoders import ROWS, by_part
from videotune.types import ModelSpec


def export_run(
    run: Path,
    family: DiffusersModel,
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
    config = resolved.config
    spec = family.spec
    if config.lora.modules:
        state = {
            f"{begin}{key}": value
            for begin in {prefix(spec, expert) for expert in trained(spec, config)}
            for key, value in in_one_scale(of_expert(state, begin), config.lora).items()
        }
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run.resolve().name)
    begin = (
        out or Path(config.output_model_destination or run / "export")
    ) / f"{name}-step-{step}"
    facts = _facts(run, step, resolved)
    done = []
    if merge:
        adapters = {
            expert: of_expert(state, prefix(spec, expert)) for expert in trained(spec, config)
        }
        facts |= {"expert": list(adapters)} if len(spec.experts) > 1 else {}
        facts |= {"merged": config.lora.variant, "use": _whole(family)}
        path = begin.with_name(f"{begin.name}-merged")
        done = [
            export_merged(family, adapters, config.lora.scale, _base(config, spec), path, facts)
        ]
    dtype = DTYPES[config.output_dtype] if config.output_dtype else None
    experts = () if merge else experts_of(family, config, state, tell)
    for format in () if merge else formats or named_formats(config):
        ending = "" if format == "diffusers" else f"-{format}"
        if config.training_method == "EMBEDDING":
            path = begin.with_name(begin.name + ending)
            own = of_expert(state, ROWS)
            told = facts | _use(
                family, config, None, format, facts["base"].get("parts", facts["base"]["name"])
            )
            done += export_embedding(family, format, own, config.embedding.token, path, told)
            continue
        for expert in experts:
            own = of_expert(state, prefix(spec, expert) if expert else "")
            path = begin.with_name(
                begin.name + ending + (family.spec.export_suffix(expert) if expert else "")
            )
            told = facts | ({"expert": expert} if expert and len(spec.experts) > 1 else {})
            told |= _use(
                family,
                config,
                expert,
                format,
                facts["base"].get("parts", facts["base"]["name"]),
            )
            if config.training_method == "FINE_TUNE":
                net, text = by_part(family, own)
                network = expert or spec.experts[0].name
                done.append(
                    export_full(
                        family, network, net, _base(config, spec), path, told, text, dtype
                    )
                )
            else:
                path = path.with_name(f"{path.name}.safetensors")
                done.append(
                    export_lora(
                        family, format, own, config.lora.scale, path, told, expert, dtype
                    )
                )
    _list(run, done)
    return done


def experts_of(
    family: DiffusersModel,
    config: Config,
    state: Mapping[str, Tensor],
    tell: Callable[[str], None],
) -> tuple[str | None, ...]:
    """The experts that get a file each; None where what trained is no expert's."""
    if not config.transformer.train:
        return (None,)
    names = trained(family.spec, config)
    if config.training_method != "LORA" or len(names) == 1:
        return names
    idle = [
        name for name in names if changes_nothing(of_expert(state, prefix(family.spec, name)))
    ]
    if not idle or len(idle) == len(
        names
    ):  # where all are, the export says that there is nothing to write
        return names
    tell(
        f"the expert {idle[0]} has had no step, so no file is written for it: more steps, or a shorter expert_period"
    )
    return tuple(name for name in names if name not in idle)


def _list(run: Path, done: Sequence[Exported]) -> None:
    """Put what was written into exports.json, in the place of what lay there before."""
    listed = run / "exports.json"
    before = read_record(listed) if listed.is_file() else []
    new = [exported.to_json(run) | {"hash": hash_path(exported.path)} for exported in done]
    paths = {line["path"] for line in new}
    write_json(listed, [line for line in before if line["path"] not in paths] + new)


def _facts(run: Path, step: int, resolved: Resolved) -> dict[str, Any]:
    """What the file says of itself, so that it can be used years later."""
    config = resolved.config
    kept = read_run_config(run)
    plan = read_record(run / "plan.json")
    file = config.transformer.file
    name = kept["base"]["name"]
    parts = config.base_parts
    files = [Path(one).name for one in ([file] if isinstance(file, str) else file or []) if one]
    return {
        "videotune": __version__,
        # of a local folder the last part alone: the file is made to be shared
        "base": {**kept["base"], "name": shared_name(name)}
        | ({"parts": shared_name(parts)} if parts else {}),
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


def _base(config: Config, spec: ModelSpec) -> Path:
    """Where the base model lies, with the weights that it was trained from."""
    return place(
        str(config.base_parts or config.base_model_name), files=own_files(config, spec)
    ).folder


def shared_name(name: str) -> str:
    """A base model's name as a file that is made to be shared says it."""
    return Path(name).name if Path(name).is_absolute() else name


def _whole(family: DiffusersModel) -> str:
    """How a folder of a whole model is used, in code."""
    return f"pipe = {family.pipeline_class().__name__}.from_pretrained(THIS_FOLDER)"


def _use(
    family: DiffusersModel, config: Config, expert: str | None, format: str, base: str
) -> dict[str, Any]:
    """How the file is used, in code, and what of it a reader might ask; ``base``: the base model's name."""
    pipeline = family.pipeline_class().__name__
    kind = config.lora.variant
    if config.training_method == "FINE_TUNE":
        return {"use": _whole(family)}
    if config.training_method == "EMBEDDING":
        use = (
            f"class Pipeline({pipeline}, TextualInversionLoaderMixin): pass; pipe = Pipeline.from_pretrained({base!r}); "
            "pipe.load_textual_inversion(THIS_FILE); prompt = pipe.maybe_convert_prompt(prompt, pipe.tokenizer)"
        )
        return {"vectors": config.embedding.vectors, "use": use}
    begin = f"pipe = {pipeline}.from_pretrained({base!r}); "
    alpha = (
        "baked into lora_B"
        if kind in ("LORA", "DORA")
        else "none"
        if kind == "OFT"
        else "baked into the weights"
    )
    if kind in ("LORA", "DORA"):
        second = (
            ", load_into_transformer_2=True" if expert != family.spec.experts[0].name else ""
        )
        use = f"{begin}pipe.load_lora_weights(THIS_FILE{second})"
    elif format == "comfyui":
        use = "a LoRA loader of ComfyUI, for the model alone"
    else:
        net = f"pipe.{family.spec.part_of(expert)}"
        use = (
            f"import json, peft, safetensors.torch; {begin}head = safetensors.safe_open(THIS_FILE, 'pt').metadata(); "
            f"{net}.add_adapter(peft.get_peft_config(json.loads(head['{CONFIG}']))); "
            f"peft.set_peft_model_state_dict({net}, safetensors.torch.load_file(THIS_FILE))"
        )
    return {"variant": kind, "rank": config.lora.rank, "alpha": alpha, "use": use}
