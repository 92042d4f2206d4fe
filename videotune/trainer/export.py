"""Export a run: a file for each format and expert, the metadata in their headers, and
the list of the files.
"""

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
from videotune.exporter.base_loras import weight_changes
from videotune.exporter.formats import (
    PEFT_CONFIG_KEY,
    Exported,
    configured_formats,
    has_no_effect,
)
from videotune.exporter.full import export_full, export_merged
from videotune.exporter.merged_file import export_merged_file
from videotune.exporter.single_file_export import export_single_file
from videotune.files import hash_path, write_json
from videotune.job.experts import of_expert, prefix, trained
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.models.base_model import own_files, place
from videotune.runs.run_dir import read_run_config
from videotune.runs.schemas import read_record
from videotune.trainer.build import DTYPES
from videotune.trainer.text_encoders import ROWS, by_part

COMFYUI_MODEL_USE = "ComfyUI/models/diffusion_models, for Load Diffusion Model"
"""How ComfyUI uses the file of a whole transformer."""


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
    """Write each format, one file per expert that was trained, and the list of the
    files in ``exports.json``.

    What trains only in text encoders has one file, however many experts there are.

    Args:
        run: the run folder.
        family: the base model.
        state: what trained, by the names of checkpoints.
        step: the step of the state.
        resolved: the run's config.
        formats: the formats to write. Empty: those that the config names.
        out: the folder to write to. None: as the config says.
        tell: prints a sentence, for example on an expert that has had no step and
            therefore has no file.
        merge: instead, write the base model with the adapters of all experts merged
            into its weights: a folder, and unless there are ``formats`` a file for
            ComfyUI.
    """
    config = resolved.config
    spec = family.spec
    if config.lora.modules:
        state = _in_one_scale(state, spec, config)

    run_name = "".join(
        c if c.isalnum() or c in "-_" else "_" for c in run.resolve().name
    )
    folder = out or Path(config.output_model_destination or run / "export")
    path = folder / f"{run_name}-step-{step}"
    facts = _facts(run, step, resolved)

    exported: list[Exported] = []
    if merge:
        exported += _export_merged(
            run, family, config, state, path, facts, tell, is_for_comfyui=not formats
        )
    else:
        experts = experts_of(family, config, state, tell)
        for format in formats or configured_formats(config, family):
            ending = "" if format == "diffusers" else f"-{format}"
            format_path = path.with_name(path.name + ending)
            if config.training_method == "EMBEDDING":
                exported += _export_embedding(
                    family, config, state, format, format_path, facts
                )
                continue
            for expert in experts:
                exported.append(
                    _export_expert(
                        family, config, state, format, expert, format_path, facts
                    )
                )
    _add_to_list(run, exported)
    return exported


def _in_one_scale(
    state: Mapping[str, Tensor], spec: ModelSpec, config: Config
) -> dict[str, Tensor]:
    """Return the adapter with one scale for all modules, where ``lora.modules`` gives
    them their own.
    """
    rescaled: dict[str, Tensor] = {}
    for name_prefix in {prefix(spec, expert) for expert in trained(spec, config)}:
        tensors = in_one_scale(of_expert(state, name_prefix), config.lora)
        rescaled.update((name_prefix + key, value) for key, value in tensors.items())
    return rescaled


def _export_merged(
    run: Path,
    family: DiffusersModel,
    config: Config,
    state: Mapping[str, Tensor],
    path: Path,
    facts: Mapping[str, Any],
    tell: Callable[[str], None],
    *,
    is_for_comfyui: bool,
) -> list[Exported]:
    """Write the base model with the adapters of all experts in its weights.

    It is a folder, and for ComfyUI a file of each changed transformer, if the family has
    such a layout.
    """
    spec = family.spec
    kept = [lora for lora in config.base_loras if not lora.training_only]
    changes = weight_changes(family, kept)
    adapters: dict[str, Mapping[str, Tensor]] = {}
    for expert in spec.experts:
        if expert.name in trained(spec, config):
            adapters[expert.name] = of_expert(state, prefix(spec, expert.name))
        elif spec.part_of(expert.name) in changes:
            adapters[expert.name] = {}  # only the LoRA files under the training

    folder = path.with_name(f"{path.name}-merged")
    metadata = {**facts, "merged": config.lora.variant}
    folder_facts = metadata | {"use": _use_of_whole_model(family)}
    if len(spec.experts) > 1:
        folder_facts["expert"] = list(adapters)
    exported = [
        export_merged(
            family,
            adapters,
            config.lora.scale,
            _base(config, spec),
            folder,
            folder_facts,
            changes,
        )
    ]
    if not is_for_comfyui or not _has_merged_file(family, tell):
        return exported

    # Listed now, because the folder is complete even if a file cannot be written.
    _add_to_list(run, exported)
    for expert_name in adapters:
        file_facts = metadata | {"use": COMFYUI_MODEL_USE}
        if len(spec.experts) > 1:
            file_facts["expert"] = expert_name
        suffix = spec.export_suffix(expert_name)
        file_path = folder.with_name(f"{folder.name}-comfyui{suffix}.safetensors")
        exported.append(
            export_merged_file(family, expert_name, folder, file_path, file_facts)
        )
    return exported


def _has_merged_file(family: DiffusersModel, tell: Callable[[str], None]) -> bool:
    """Return whether a merged model is one file for ComfyUI too; if not for its text
    connectors, print why.
    """
    if family.spec.connectors_in_step:
        tell(
            "no merged file is written for ComfyUI: it would hold the transformer without "
            "the text connectors, which are merged too. Use the LoRA file there"
        )
        return False
    return family.single_file_names() is not None


def _export_embedding(
    family: DiffusersModel,
    config: Config,
    state: Mapping[str, Tensor],
    format: str,
    path: Path,
    facts: Mapping[str, Any],
) -> list[Exported]:
    metadata = {**facts, **_use(family, config, None, format, _base_name(facts))}
    rows = of_expert(state, ROWS)
    return export_embedding(
        family, format, rows, config.embedding.token, path, metadata
    )


def _export_expert(
    family: DiffusersModel,
    config: Config,
    state: Mapping[str, Tensor],
    format: str,
    expert: str | None,
    path: Path,
    facts: Mapping[str, Any],
) -> Exported:
    """Write the file of an expert; None: of what trained only in text encoders."""
    metadata = dict(facts)
    tensors = of_expert(state, "")
    if expert:
        tensors = of_expert(state, prefix(family.spec, expert))
        path = path.with_name(path.name + family.spec.export_suffix(expert))
        if len(family.spec.experts) > 1:
            metadata["expert"] = expert
    metadata |= _use(family, config, expert, format, _base_name(facts))
    dtype = DTYPES[config.output_dtype] if config.output_dtype else None

    if config.training_method == "FINE_TUNE":
        denoiser, text = by_part(family, tensors)
        network = expert or family.spec.experts[0].name
        base = _base(config, family.spec)
        if format == "comfyui":
            path = path.with_name(f"{path.name}.safetensors")
            metadata["use"] = COMFYUI_MODEL_USE
            return export_single_file(
                family, network, denoiser, base, path, metadata, dtype
            )
        return export_full(family, network, denoiser, base, path, metadata, text, dtype)

    path = path.with_name(f"{path.name}.safetensors")
    return export_lora(
        family, format, tensors, config.lora.scale, path, metadata, expert, dtype
    )


def experts_of(
    family: DiffusersModel,
    config: Config,
    state: Mapping[str, Tensor],
    tell: Callable[[str], None],
) -> tuple[str | None, ...]:
    """Return the experts that get a file each; None stands for what belongs to no
    expert.
    """
    if not config.transformer.train:
        return (None,)
    names = trained(family.spec, config)
    if config.training_method != "LORA" or len(names) == 1:
        return names

    untrained = []
    for name in names:
        if has_no_effect(of_expert(state, prefix(family.spec, name))):
            untrained.append(name)
    # If no expert has changed, the export itself says that there is nothing to write.
    if not untrained or len(untrained) == len(names):
        return names

    tell(
        f"the expert {untrained[0]} has had no step, so no file is written for it: "
        "use more steps, or a shorter expert_period"
    )
    return tuple(name for name in names if name not in untrained)


def _add_to_list(run: Path, exported: Sequence[Exported]) -> None:
    """Add files to exports.json, in place of older entries with the same path."""
    list_file = run / "exports.json"
    entries = read_record(list_file) if list_file.is_file() else []
    new = [file.to_json(run) | {"hash": hash_path(file.path)} for file in exported]
    new_paths = {entry["path"] for entry in new}
    others = [entry for entry in entries if entry["path"] not in new_paths]
    write_json(list_file, others + new)


def _facts(run: Path, step: int, resolved: Resolved) -> dict[str, Any]:
    """Return the metadata of a file, by which it can be used years later."""
    config = resolved.config
    run_config = read_run_config(run)
    plan = read_record(run / "plan.json")

    # The file is made to be shared, so of a local folder only the last part is named.
    base = {**run_config["base"], "name": shared_name(run_config["base"]["name"])}
    if config.base_parts:
        base["parts"] = shared_name(config.base_parts)
    facts: dict[str, Any] = {"videotune": __version__, "base": base}

    files = config.transformer.file or []
    if isinstance(files, str):
        files = [files]
    file_names = [Path(file).name for file in files if file]
    if file_names:
        facts["transformer_file"] = file_names
    if config.base_loras:
        facts["base_loras"] = [
            {
                "file": Path(lora.file).name,
                "strength": lora.strength,
                "training_only": lora.training_only,
            }
            for lora in config.base_loras
        ]

    facts |= {
        "data": run_config["data"],
        "step": step,
        "steps": run_config["steps"],
        "effective_batch": plan["effective_batch"],
        "views_by_the_end": plan["views"]["per_window"],
        "triggers": [dataset.trigger for dataset in config.datasets if dataset.trigger],
        "fps": config.video_config.target_fps,
        "buckets": [bucket["shape"] for bucket in plan["buckets"]],
        "ema": config.ema.decay,
    }
    return facts


def _base(config: Config, spec: ModelSpec) -> Path:
    """Return the folder of the base model, with the weights that were trained from."""
    name = str(config.base_parts or config.base_model_name)
    return place(name, files=own_files(config, spec)).folder


def _base_name(facts: Mapping[str, Any]) -> str:
    """Return the name of the folder or repository that pipelines load."""
    name: str = facts["base"].get("parts", facts["base"]["name"])
    return name


def shared_name(name: str) -> str:
    """Return a base model's name as a file that is made to be shared names it."""
    return Path(name).name if Path(name).is_absolute() else name


def _use_of_whole_model(family: DiffusersModel) -> str:
    """Return the code that loads the folder of a whole model."""
    return f"pipe = {family.pipeline_class().__name__}.from_pretrained(THIS_FOLDER)"


def _load_loras(family: DiffusersModel, config: Config, option: str) -> str:
    """Return the code that loads a LoRA after those that it was trained on top of."""
    load_lora = family.load_lora
    below = [lora for lora in config.base_loras if not lora.training_only]
    if not below:
        return f"{load_lora}(THIS_FILE{option})"

    names = [f"base_{index}" for index in range(len(below))]
    lines = [
        f"{load_lora}({Path(lora.file).name!r}, adapter_name={name!r})"
        for name, lora in zip(names, below, strict=True)
    ]
    lines.append(f"{load_lora}(THIS_FILE, adapter_name='new'{option})")
    strengths = [*(lora.strength for lora in below), 1.0]
    owner = load_lora.rpartition(".")[0]
    lines.append(f"{owner}.set_adapters({[*names, 'new']}, {strengths})")
    return "; ".join(lines)


def _use(
    family: DiffusersModel, config: Config, expert: str | None, format: str, base: str
) -> dict[str, Any]:
    """Return the code that loads a file, and what else a reader might ask.

    Args:
        family: the base model.
        config: the run's settings.
        expert: of the file.
        format: of the file.
        base: name of the base model.
    """
    if config.training_method == "FINE_TUNE":
        return {"use": _use_of_whole_model(family)}

    pipeline = family.pipeline_class().__name__
    if config.training_method == "EMBEDDING":
        use = (
            f"class Pipeline({pipeline}, TextualInversionLoaderMixin): pass; pipe = Pipeline.from_pretrained({base!r}); "
            "pipe.load_textual_inversion(THIS_FILE); prompt = pipe.maybe_convert_prompt(prompt, pipe.tokenizer)"
        )
        return {"vectors": config.embedding.vectors, "use": use}

    variant = config.lora.variant
    load_base = f"pipe = {pipeline}.from_pretrained({base!r}); "
    alpha = "baked into the weights"
    loads_format = format != "comfyui" or family.loads_comfyui_names
    if variant in ("LORA", "DORA"):
        alpha = "baked into lora_B"
    if variant in ("LORA", "DORA") and loads_format:
        is_second = expert != family.spec.experts[0].name
        option = ", load_into_transformer_2=True" if is_second else ""
        use = f"{load_base}{_load_loras(family, config, option)}"
    elif format == "comfyui":
        use = "a LoRA loader of ComfyUI, for the model of this file's expert alone"
        if len(family.spec.experts) == 1:
            use = "a LoRA loader of ComfyUI, for the model alone"
    else:
        net = f"pipe.{family.spec.part_of(expert)}"
        use = (
            f"import json, peft, safetensors.torch; {load_base}head = safetensors.safe_open(THIS_FILE, 'pt').metadata(); "
            f"{net}.add_adapter(peft.get_peft_config(json.loads(head['{PEFT_CONFIG_KEY}']))); "
            f"peft.set_peft_model_state_dict({net}, safetensors.torch.load_file(THIS_FILE))"
        )
    if variant == "OFT":
        alpha = "none"
    return {"variant": variant, "rank": config.lora.rank, "alpha": alpha, "use": use}
