"""Read the modules of any program's adapter file by diffusers' names, with their
scales.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from videotune.adapters.adapter_types import PARTS, ZERO, kind_of, side_of
from videotune.adapters.effect import change
from videotune.bounds import DELTA_NUMBERS, ROTATION_SIDE
from videotune.config.sections import CONNECTORS
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, not_a_lora
from videotune.exporter.converted_lora import convert_with_diffusers
from videotune.exporter.read_scale import (
    alpha_rank,
    flat_name,
    paths_by_name,
    read_scale,
)
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note, some

DORA_HEADER = "videotune_dora"
"""Key of a header that marks DoRA's magnitudes as made for ComfyUI's norm."""

_PEFT_NAMES = {
    "lora_down": "lora_A",
    "lora_up": "lora_B",
    "lora.down": "lora_A",
    "lora.up": "lora_B",
    "dora_scale": "lora_magnitude_vector",
    "lora_alpha": "alpha",
}
"""Tensor names of other programs -> PEFT's."""

_TENSOR_NAMES = (*_PEFT_NAMES, *dict.fromkeys(chain.from_iterable(PARTS.values())))
_NAME_PATTERN = "|".join(re.escape(name) for name in _TENSOR_NAMES)
_KEY = re.compile(
    rf"(.+)\.(?:({_NAME_PATTERN})(?:\.(?!bias$|weight$)\w+)??(?:\.weight)?|(alpha))"
)


_SPLIT_BY_ROWS = ("lora_B", "lora_magnitude_vector", "hada_w1_a", "hada_w2_a")
"""Tensors that have one row per output of their module."""


@dataclass(frozen=True)
class AdapterModule:
    """The update of one module."""

    name: str
    """The module's name in the file."""

    paths: tuple[str, ...]
    """The module in diffusers; several, in the order of their rows, if the form fuses
    them.
    """

    parts: dict[str, Tensor]
    """The tensors by PEFT's names."""

    scale: float = 1.0
    """The factor that the product of the tensors is multiplied by: alpha / rank."""

    alpha_source: str = ""
    """Where alpha was found ("tensor", "header" …); "" if the file has none."""

    @property
    def rank(self) -> int:
        """The rank of the factors; for OFT and for LoKr with full factors the block
        size.
        """
        rank = alpha_rank(self.parts)
        if rank:
            return rank

        if "oft_R" in self.parts:
            return side_of(self.parts["oft_R"].shape[1])
        return self.parts["lokr_w2"].shape[1]

    @property
    def delta(self) -> Tensor:
        """ΔW (out, in) in float64; for OFT R - 1."""
        return change(self.parts, self.scale)


def kind_of_parts(parts: Iterable[str]) -> str | None:
    """Return the kind of adapter that has tensors of these names, or None."""
    return kind_of([f"x.{part}" for part in parts])


def without_alpha(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a module except alpha."""
    return {part: value for part, value in parts.items() if part != "alpha"}


def delta_shape(parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of ΔW without computing it; () if the tensors are not a complete
    set.
    """
    is_empty = any(0 in value.shape for value in parts.values())
    if kind_of_parts(parts) is None or is_empty:
        return ()

    try:
        meta_parts = {name: value.to("meta") for name, value in parts.items()}
        shape = tuple(change(meta_parts, 1.0).shape)
    except (IndexError, KeyError, RuntimeError):
        return ()

    if len(shape) != 2:
        return ()
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and magnitude.shape != shape[:1]:
        return ()
    return shape


def group_by_module(
    file: AdapterFile,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Group a file's tensors by module.

    Returns:
        Each module's tensors by PEFT's names, alpha included; and the tensors that are
        not an adapter's.

    Raises:
        VideotuneError: if there is no module, or one has a tensor twice or lacks one.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    other_tensors: dict[str, Tensor] = {}
    for key, value in file.tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            other_tensors[key] = value
            continue

        module_name = match[1]
        part = _PEFT_NAMES.get(match[2], match[2]) or match[3]
        parts = modules.setdefault(module_name, {})
        if part in parts:
            raise VideotuneError(
                f"{file.path}: {key} is there a second time: the file holds several adapters"
            )

        # LyCORIS stores the magnitude as a column.
        is_column = value.ndim == 2 and value.shape[1] == 1
        if part == "lora_magnitude_vector" and is_column:
            value = value[:, 0]
        parts[part] = value

    modules = {
        name: parts for name, parts in modules.items() if set(parts) != {"alpha"}
    }
    for name, parts in modules.items():
        if not _is_complete(without_alpha(parts)):
            raise VideotuneError(
                f"{file.path}: {name}: its tensors differ in rank,"
                " or dora_scale is not per output"
            )
        _refuse_large(file.path, name, without_alpha(parts))
    if not modules:
        keys = some(sorted(other_tensors))
        raise VideotuneError(
            f"{file.path} is not a LoRA or another adapter; its keys are {keys}"
        )
    return modules, other_tensors


def _is_complete(parts: Mapping[str, Tensor]) -> bool:
    """Return whether a module has all tensors of its kind, with shapes that go
    together.
    """
    if set(parts) == {"oft_R"}:
        rotations = parts["oft_R"]
        return rotations.ndim == 2 and rotations.numel() > 0
    return bool(delta_shape(parts))


def _refuse_large(path: Path, name: str, parts: Mapping[str, Tensor]) -> None:
    """Raise VideotuneError for an update that no model has, before it is computed.

    The factors of LoHa, LoKr and OFT may be small and ΔW terabytes.
    """
    if "oft_R" in parts:
        side = side_of(parts["oft_R"].shape[1])
        is_large = side > ROTATION_SIDE
        size = f"rotations of {side:,} inputs; at most {ROTATION_SIDE:,}"
    else:
        rows, columns = delta_shape(parts)
        is_large = rows * columns > DELTA_NUMBERS and "lora_A" not in parts
        size = f"an update of {rows:,} x {columns:,}; at most {DELTA_NUMBERS:,} numbers"
    if is_large:
        raise VideotuneError(f"{path}: {name} claims {size} are read")


def read_modules(
    family: DiffusersModel, net: nn.Module, file: AdapterFile, *, quiet: bool
) -> list[AdapterModule]:
    """Read the modules of any program's adapter file.

    Prints a note if the file has no alpha and the rank is assumed.

    Args:
        family: the family of the base model.
        net: its transformer; a skeleton is enough.
        file: the adapter.
        quiet: print no note, because it was printed when the file was read before.

    Raises:
        VideotuneError: with the reason, if the file cannot be read completely.
    """
    if DORA_HEADER in file.header:
        raise VideotuneError(
            f"{file.path} holds DoRA for ComfyUI's norm, which no other program uses:"
            " take the diffusers file of the same export"
        )
    parts_by_name, other_tensors = group_by_module(file)
    if other_tensors:
        fault = "it has biases or other tensors that do not belong to an adapter"
        raise not_a_lora(family, file.path, list(other_tensors), fault)

    paths_of = paths_by_name(family, net)
    unknown_names = [name for name in parts_by_name if flat_name(name) not in paths_of]
    if unknown_names:
        _refuse_connectors(family, file, unknown_names)
        fault = "it has modules that the model lacks"
        raise not_a_lora(family, file.path, unknown_names, fault)

    modules = [
        locate_module(family, net, file, name, parts)
        for name, parts in parts_by_name.items()
    ]
    module_fault = _find_fault(modules)
    if module_fault is not None:
        raise not_a_lora(family, file.path, list(parts_by_name), module_fault)

    lacks_alpha = any(
        not module.alpha_source and "lora_A" in module.parts for module in modules
    )
    if lacks_alpha and "videotune" not in file.header and not quiet:
        note(
            f"note: {file.path.name} does not say its alpha; alpha = rank is assumed (scale 1)"
        )
    return modules


def _refuse_connectors(
    family: DiffusersModel, file: AdapterFile, unknown_names: list[str]
) -> None:
    """Raise VideotuneError if all modules that a model lacks are of text connectors."""
    if family.spec.connectors is None:
        return
    if all("_connector" in name for name in unknown_names):
        raise VideotuneError(
            f"{file.path} also changes the text connectors of {family.spec.title}, which stay as they"
            f" are here. Add {CONNECTORS} to lora.targets"
        )


def _find_fault(modules: list[AdapterModule]) -> str | None:
    """Return why modules that fit the model are not one adapter, or None."""
    paths = list(chain.from_iterable(module.paths for module in modules))
    if len(set(paths)) < len(paths):
        return "it names a module twice"
    if not any(has_effect(module) for module in modules):
        return "it changes none of its modules"

    kinds = {kind_of_parts(module.parts) for module in modules}
    if len(kinds) > 1:
        return "its modules are of several kinds"
    return None


def has_effect(module: AdapterModule) -> bool:
    """Return whether a module differs from its state before the first step."""
    zero_parts = [value for part, value in module.parts.items() if part in ZERO]
    return any(bool(value.any()) for value in zero_parts)


def locate_module(
    family: DiffusersModel,
    net: nn.Module,
    file: AdapterFile,
    name: str,
    parts: Mapping[str, Tensor],
) -> AdapterModule:
    """Return a file's module with its paths and scale, its shape checked against the
    model.
    """
    paths = paths_by_name(family, net)[flat_name(name)]
    factors = without_alpha(parts)
    if not fits_shape(factors, fused_shape(net, paths)):
        raise VideotuneError(
            f"{file.path} was made for another base: {paths[0]} differs in size"
        )
    if "oft_R" in factors:
        return AdapterModule(name, paths, factors)
    scale, alpha_source = read_scale(file, factors, parts.get("alpha"), paths[0])
    return AdapterModule(
        name=name, paths=paths, parts=factors, scale=scale, alpha_source=alpha_source
    )


def fits_shape(factors: Mapping[str, Tensor], shape: tuple[int, int]) -> bool:
    """Return whether an update belongs to a weight (out, in)."""
    if "oft_R" in factors:
        blocks, numbers = factors["oft_R"].shape
        return blocks * side_of(numbers) == shape[1]
    return delta_shape(factors) == shape


def linear_shape(net: nn.Module, path: str) -> tuple[int, int]:
    """Return the outputs and inputs of a linear module."""
    module: Any = net.get_submodule(path)
    return module.out_features, module.in_features


def fused_shape(net: nn.Module, paths: tuple[str, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of linear modules whose rows are stacked."""
    shapes = [linear_shape(net, path) for path in paths]
    rows = sum(outputs for outputs, _ in shapes)
    return rows, shapes[0][1]


def modules_by_path(
    family: DiffusersModel, net: nn.Module, file: AdapterFile, *, quiet: bool = False
) -> dict[str, AdapterModule]:
    """Read a file's modules by their paths in diffusers; fused modules are split."""
    modules = {}
    for module in read_modules(family, net, file, quiet=quiet):
        for part in split_module(net, module):
            modules[part.paths[0]] = part
    return modules


def split_module(net: nn.Module, module: AdapterModule) -> list[AdapterModule]:
    """Split a fused module into those of diffusers; each gets its rows.

    Raises:
        VideotuneError: for LoKr, whose factors cannot be split by rows.
    """
    if len(module.paths) == 1:
        return [module]
    if not {"lora_B", "hada_w1_a"} & set(module.parts):
        raise VideotuneError(
            f"{module.name} joins {len(module.paths)} modules,"
            " and its kind of update cannot be split"
        )

    rows = [linear_shape(net, path)[0] for path in module.paths]
    chunks = {
        part: value.split(rows)
        for part, value in module.parts.items()
        if part in _SPLIT_BY_ROWS
    }
    modules = []
    for i, path in enumerate(module.paths):
        path_parts = {part: values[i] for part, values in chunks.items()}
        modules.append(replace(module, paths=(path,), parts=module.parts | path_parts))
    return modules


def lora_state_dict(
    family: DiffusersModel, net: nn.Module, file: AdapterFile
) -> dict[str, Tensor]:
    """Return the tensors of a LoRA or DoRA file as ``load_lora_weights`` takes them.

    They have diffusers' names, and B is multiplied by alpha / rank. Names and tensors
    that are not in our table are left to diffusers' converters; a warning names those
    that they drop.

    Raises:
        VideotuneError: if a factor cannot be read.
    """
    parts_by_name, other_tensors = group_by_module(file)
    paths_of = paths_by_name(family, net)
    has_unknown_names = any(flat_name(name) not in paths_of for name in parts_by_name)
    if other_tensors or has_unknown_names:
        return convert_with_diffusers(family, net, file, parts_by_name, other_tensors)

    state: dict[str, Tensor] = {}
    for path, module in modules_by_path(family, net, file).items():
        if "lora_A" not in module.parts:
            raise not_a_lora(family, file.path, [module.name], "it is not a LoRA")
        for part, value in module.parts.items():
            if part == "lora_B" and module.scale != 1.0:
                value = value.float() * module.scale
            name = tensor_name(pipeline_name(family, path), part)
            state[name] = value.clone()
    return state


def pipeline_name(family: DiffusersModel, path: str) -> str:
    """Return a module's name in files of diffusers, which begins with its part of the
    pipeline: text connectors are a part beside the transformer.
    """
    return path if family.spec.is_connector(path) else f"transformer.{path}"


def tensor_name(path: str, part: str) -> str:
    """Return the name under which PEFT saves a tensor of a module."""
    if part in ("lora_A", "lora_B", "oft_R"):
        return f"{path}.{part}.weight"
    return f"{path}.{part}"
