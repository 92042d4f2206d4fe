"""LoRA files that are merged into the frozen weights while these are loaded.

Besides the two factors of each module, files of distilled models hold whole differences
of weights (``NAME.diff``) and of biases (``NAME.diff_b``); both are merged.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from videotune.adapters import effect
from videotune.adapters.adapter_types import NOT_BY_DEGREES
from videotune.bounds import require_file
from videotune.config.sections import BaseLora, LoraFile
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, adapter_path
from videotune.exporter.adapter_modules import (
    AdapterModule,
    group_by_module,
    kind_of_parts,
    modules_by_path,
)
from videotune.exporter.base_detection import detect_expert, other_model_of_adapter
from videotune.exporter.read_scale import name_prefix
from videotune.files import digest, hash_path
from videotune.models.base import DiffusersModel
from videotune.models.other_models import refuse_other_model
from videotune.models.weight_changes import Change, WeightChanges

_DIFFERENCE = re.compile(r"(.+)\.(diff|diff_b)")
_PARAMETER = {"diff": "weight", "diff_b": "bias"}


def merge_into_base(family: DiffusersModel, loras: Sequence[BaseLora]) -> None:
    """Let a family load its denoisers with LoRA files merged into them.

    Every file is opened and compared with the model now; its factors are read again
    whenever a denoiser is loaded, and take no memory meanwhile.

    Raises VideotuneError for a file that cannot be merged.
    """
    family.weight_changes = weight_changes(family, loras)


def weight_changes(
    family: DiffusersModel, loras: Sequence[BaseLora]
) -> dict[str, WeightChanges]:
    """Return the changes that LoRA files make, by the part of the model."""
    loras_of: dict[str, list[LoraFile]] = {}
    for lora in loras:
        path = check_lora_file(family, lora)
        expert = expert_of(family, lora)
        read_lora_file(family, expert, path, quiet=False)
        loras_of.setdefault(expert, []).append(lora)

    changes = {}
    for expert, expert_loras in loras_of.items():
        contents = [
            [hash_path(adapter_path(Path(lora.file).expanduser())), lora.strength]
            for lora in expert_loras
        ]
        hashed = digest(contents)[:16]
        read = partial(_changes, family, expert, tuple(expert_loras))
        part = family.spec.part_of(expert)
        if family.spec.connectors_in_step:
            assert family.spec.connectors is not None
            inner = family.spec.connectors.path
            changes[part] = WeightChanges(hashed, partial(_outside, inner, read))
            changes[inner] = WeightChanges(hashed, partial(_inside, inner, read))
        else:
            changes[part] = WeightChanges(hashed, read)
    return changes


ReadChanges = Callable[[], Mapping[str, Change]]


def _inside(path: str, read: ReadChanges) -> Mapping[str, Change]:
    """Return the changes of a module's weights, by their names in it."""
    start = f"{path}."
    return {
        name.removeprefix(start): change
        for name, change in read().items()
        if name.startswith(start)
    }


def _outside(path: str, read: ReadChanges) -> Mapping[str, Change]:
    """Return the changes of weights outside of a module."""
    start = f"{path}."
    return {
        name: change for name, change in read().items() if not name.startswith(start)
    }


def check_lora_file(
    family: DiffusersModel, lora: LoraFile, key: str = "base_loras"
) -> Path:
    """Return the path of a LoRA that exists already.

    Raises VideotuneError if there is none, or it is of a model that is not trained, or
    cannot have its strength.
    """
    path = Path(lora.file).expanduser()
    require_file(path, key)
    if not path.exists():
        raise VideotuneError(f"{key}: no such file or folder: {path}")
    if lora.strength == 0:
        raise VideotuneError(
            f"{key}: {path.name} has strength 0, so it does nothing. Leave it out"
        )

    file = AdapterFile(path)
    refuse_other_model(other_model_of_adapter(file), f"{key}: {path}")
    modules, _ = group_by_module(file)
    kinds = {kind_of_parts(parts) for parts in modules.values()}
    fixed_kinds = [kind for kind in NOT_BY_DEGREES if kind in kinds]
    if fixed_kinds and lora.strength != 1:
        raise VideotuneError(
            f"{key}: {path.name} is {fixed_kinds[0]}, which has no strength but 1"
        )
    return path


def expert_of(family: DiffusersModel, lora: LoraFile, key: str = "base_loras") -> str:
    """Return the name of the expert that a LoRA belongs to.

    Raises VideotuneError if the model has two and nothing says which, or does not have
    the one that is named.
    """
    names = [expert.name for expert in family.spec.experts]
    path = Path(lora.file).expanduser()
    if len(names) == 1:
        if lora.expert is not None:
            raise VideotuneError(
                f"{key}: {family.spec.title} has one denoiser, not two experts. Leave expert out"
            )
        return names[0]

    expert: str | None = lora.expert
    if expert is None:
        expert, _ = detect_expert(AdapterFile(path))
    if expert not in names:
        raise VideotuneError(
            f"{key}: {path.name} does not say whether it is of the expert {names[0]} or"
            f" {names[1]}. Set expert beside file"
        )
    return str(expert)


def read_lora_file(
    family: DiffusersModel, expert: str, path: Path, *, quiet: bool = True
) -> tuple[dict[str, AdapterModule], dict[str, Tensor]]:
    """Read a LoRA file; unless ``quiet``, with a note on what had to be assumed.

    Returns:
        Its modules by their paths in diffusers, and the differences of whole parameters
        by their names in diffusers.

    Raises:
        VideotuneError: if the file is not an adapter of this model.
    """
    file = AdapterFile(path)
    net = family.skeleton(expert)
    _, other_tensors = group_by_module(file)
    names = parameter_names(family, net)

    differences = {}
    for key, value in other_tensors.items():
        match = _DIFFERENCE.fullmatch(key)
        if match is None:
            continue
        module_name = match[1][len(name_prefix(match[1])) :]
        name = names.get(_flat(f"{module_name}.{_PARAMETER[match[2]]}"))
        if name is None:
            raise VideotuneError(
                f"{path} is not a LoRA of {family.spec.title}: it has {key}, and the model"
                f" has no {module_name}"
            )
        if net.get_parameter(name).shape != value.shape:
            raise VideotuneError(
                f"{path} was made for another base: {key} differs in size"
            )
        differences[name] = value

    for key in list(file.tensors):
        if key in other_tensors and _DIFFERENCE.fullmatch(key):
            del file.tensors[key]
    return modules_by_path(family, net, file, quiet=quiet), differences


def parameter_names(family: DiffusersModel, net: nn.Module) -> dict[str, str]:
    """Return diffusers' name of each parameter by its names in files, flattened.

    Where the authors and diffusers mean different parameters by one name, the authors'
    counts: files with differences have their names.
    """
    own_names = {_flat(name): name for name, _ in net.named_parameters()}
    authors_names = {}
    for name in own_names.values():
        module, _, last = name.rpartition(".")
        comfyui_name = f"{family.to_comfyui_name(module)}.{last}"
        for other in (comfyui_name, family.original(name) or name):
            # A part of the authors' rows has no name of its own.
            if "#" not in other:
                authors_names[_flat(other)] = name
    return own_names | authors_names


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _changes(
    family: DiffusersModel, expert: str, loras: Sequence[LoraFile]
) -> Mapping[str, Change]:
    """Return the changes of an expert's weights by all files, in their order."""
    steps: dict[str, list[Change]] = {}
    for lora in loras:
        path = Path(lora.file).expanduser()
        modules, differences = read_lora_file(family, expert, path)
        for module_path, module in modules.items():
            merge = partial(_merged, module=module, strength=lora.strength)
            steps.setdefault(f"{module_path}.weight", []).append(merge)
        for name, difference in differences.items():
            add = partial(_added, difference=difference, strength=lora.strength)
            steps.setdefault(name, []).append(add)
    return {name: partial(_in_turn, changes=changes) for name, changes in steps.items()}


def _in_turn(weight: Tensor, changes: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    for change in changes:
        weight = change(weight)
    return weight


def _added(weight: Tensor, difference: Tensor, strength: float) -> Tensor:
    return weight + strength * difference.to(weight)


def _merged(weight: Tensor, module: AdapterModule, strength: float) -> Tensor:
    scale = module.scale * strength
    if set(module.parts) == {"lora_A", "lora_B"}:
        factor_b = module.parts["lora_B"].to(weight)
        factor_a = module.parts["lora_A"].to(weight)
        return weight.addmm(factor_b, factor_a, alpha=scale)
    return effect.new_weight(weight, module.parts, scale).to(weight)
