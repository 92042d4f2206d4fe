"""How the exported files of a run are used in ComfyUI, in steps.

The report, the model card and the studio show these steps. Names of nodes, folders and
files are between backticks, as in Markdown.
"""

import re
from collections.abc import Sequence
from pathlib import PurePath

from videotune.config.base_models import comfyui_files
from videotune.reporter.read import Record

LORA_NODE = "`LoraLoaderModelOnly`"

MODEL_LOADER = "`Load Diffusion Model`"

CHECKPOINT_LOADER = "`Load Checkpoint`"

TWO_LOADERS = (
    f"The model has two experts, so its workflow has two loaders ({MODEL_LOADER}): one "
    "for the high-noise model, one for the low-noise model. Each file belongs to one of "
    "them."
)


def expert_in(path: str) -> str | None:
    """Return the expert that an exported file belongs to, by its name: "high" or "low";
    None for a model with one expert.
    """
    match = re.search(r"_([a-z]+)_noise$", PurePath(path).stem)
    return match[1] if match else None


def base_model_step(base_model: str) -> str:
    """Return which base model a workflow loads, with its usual file if that is known;
    empty for a base model that only videotune has.
    """
    name = base_model.partition("@")[0]
    if not name or name.startswith("asset:"):
        return ""
    if name.endswith(".safetensors"):
        return f"The base model is the file `{PurePath(name).name}`."

    text = f"The base model is {name}"
    files = comfyui_files(name)
    if not files:
        return f"{text}."
    folder = PurePath(files[0]).parent.name
    loader = CHECKPOINT_LOADER if folder == "checkpoints" else MODEL_LOADER
    names = " and ".join(f"`{PurePath(file).name}`" for file in files)
    usual = "usual file is" if len(files) == 1 else "usual files are"
    return (
        f"{text}. Its {usual} {names} in `ComfyUI/models/{folder}`; {loader} loads "
        f"{'it' if len(files) == 1 else 'each of them'}."
    )


def comfyui_steps(
    files: Sequence[Record],
    method: object,
    *,
    base_model: str,
    takes_image: bool,
    preview_values: str,
) -> list[str]:
    """Return what to do with files that have ComfyUI's names, in order.

    Args:
        files: the entries of ``exports.json`` of one step; of a model with two experts
            there is one for each expert that was trained.
        method: the run's ``training_method``.
        base_model: the run's ``base_model_name``.
        takes_image: whether the model begins with an image.
        preview_values: what the previews are drawn with, in words; "" if unknown.
    """
    paths = [str(entry.get("path", "")) for entry in files]
    if method == "EMBEDDING":
        return [
            "Copy the file into `ComfyUI/models/embeddings`.",
            "Write `embedding:NAME` into the prompt, by the file's name.",
        ]

    if method == "FINE_TUNE":
        steps = _model_steps(paths)
    else:
        base_step = base_model_step(base_model)
        steps = [base_step] if base_step else []
        steps += _lora_steps(paths)
    if takes_image:
        steps.append(
            "The model begins with an image: connect a node `LoadImage` to the "
            "workflow's start image."
        )
    values = f": {preview_values}" if preview_values else ""
    steps.append(f"Prompt, size, frames and guidance as in the previews{values}.")
    return steps


def _lora_steps(paths: Sequence[str]) -> list[str]:
    experts = _experts_of(paths)
    files = "all files" if len(experts) > 1 else "the file"
    copying = f"Copy {files} into `ComfyUI/models/loras`, and press R in ComfyUI."
    if not experts:
        return [
            copying,
            f"Put a node {LORA_NODE} between the model's loader and the sampler, and "
            "choose the file. Strength 1 is as trained.",
        ]

    steps = [copying, TWO_LOADERS]
    for expert in experts:
        steps.append(
            f"Put a node {LORA_NODE} between the loader of the {expert}-noise model and "
            f"its sampler, and choose the file that ends in `_{expert}_noise`. Strength "
            "1 is as trained."
        )
    if len(experts) == 1:
        steps.append(
            "Give the other model no file: at this step only one expert has learnt."
        )
    else:
        steps.append("Never put both files behind one model.")
    return steps


def _model_steps(paths: Sequence[str]) -> list[str]:
    experts = _experts_of(paths)
    files = "all files" if len(experts) > 1 else "the file"
    copying = f"Copy {files} into `ComfyUI/models/diffusion_models`."
    if not experts:
        loading = f"Load it with {MODEL_LOADER} in place of the base model."
        return [copying, loading]

    steps = [copying]
    for expert in experts:
        steps.append(
            f"Load the file that ends in `_{expert}_noise` with {MODEL_LOADER} in place "
            f"of the base's {expert}-noise model."
        )
    return steps


def _experts_of(paths: Sequence[str]) -> list[str]:
    """Return the experts that have a file; empty for a model with one expert."""
    experts = [expert_in(path) for path in paths]
    return sorted({expert for expert in experts if expert is not None})


def place_of(path: str) -> str:
    """Return which model of ComfyUI a file goes behind, as ", behind the high-noise
    model"; empty for a model with one expert.
    """
    expert = expert_in(path)
    return "" if expert is None else f", behind the {expert}-noise model"


def note_on_experts(paths: Sequence[str]) -> str:
    """Return the one sentence on files of experts that a command prints below them;
    empty for a model with one expert.
    """
    if not _experts_of(paths):
        return ""
    return (
        "a file belongs to one expert: in ComfyUI its LoRA loader goes behind that "
        "expert's own model, never two files behind one model"
    )
