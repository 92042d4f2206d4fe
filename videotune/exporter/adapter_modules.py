"""The modules of an adapter file of any program, under diffusers' names, with what each update is multiplied by."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import PARTS, ZERO, kind_of
from videotune.adapters.effect import change
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, refuse
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note, some

_PARTS = {
    **{f"lora{mark}{name}": part for mark in "_." for name, part in (("down", "lora_A"), ("up", "lora_B"))},
    "dora_scale": "lora_magnitude_vector", "lora_alpha": "alpha",
}  # fmt: skip
_NAMES = "|".join(
    re.escape(name)
    for name in (*_PARTS, *dict.fromkeys(part for own in PARTS.values() for part in own))
)
_KEY = re.compile(rf"(.+)\.(?:({_NAMES})(?:\.(?!bias$|weight$)\w+)??(?:\.weight)?|(alpha))")
_PREFIX = re.compile(
    r"((base_model\.)?model\.|diffusion_model\.|transformer\.)+|lora_unet_|lora_transformer_|lycoris_"
)
_MOST = 1000.0
"""alpha / rank beyond which a file is damaged; published ones lie between 1/rank and some 10."""

_BY_ROWS = ("lora_B", "lora_magnitude_vector", "hada_w1_a", "hada_w2_a")
"""Tensors that have a row for each output of their module."""


@dataclass(frozen=True)
class Module:
    """The update of a module: its tensors by PEFT's names, and what their product is multiplied by.

    ``name``: as the file has it. ``paths``: the modules in diffusers, several where the form joins them into one, in the
    order of their rows. ``told``: where alpha stands ("tensor", "header" …), "" where nowhere.
    """

    name: str
    paths: tuple[str, ...]
    parts: dict[str, Tensor]
    scale: float = 1.0
    told: str = ""

    @property
    def rank(self) -> int:
        """The rank of the factors; of rotations and of LoKr with whole factors the size of what takes its place."""
        whole = ("lokr_w2", "oft_R")
        return rank_of(self.parts) or min(
            x.shape[-1] for name, x in self.parts.items() if name in whole
        )

    @property
    def delta(self) -> Tensor:
        """ΔW (out, in) in float64; of OFT R - 1."""
        return change(self.parts, self.scale)


def rank_of(parts: Mapping[str, Tensor]) -> int | None:
    """The number that alpha is divided by: the rank; None where the factors are whole, and for rotations."""
    known = ("lora_A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
    return next((len(parts[name]) for name in known if name in parts), None)


def size_of(parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The size of ΔW, calculated without numbers; () where the tensors are no whole set of one kind."""
    if kind_of([f"x.{part}" for part in parts]) is None or any(
        0 in value.shape for value in parts.values()
    ):
        return ()
    try:
        size = tuple(
            change({name: value.to("meta") for name, value in parts.items()}, 1.0).shape
        )
    except (IndexError, KeyError, RuntimeError):
        return ()
    return (
        size
        if len(size) == 2
        and parts.get("lora_magnitude_vector", torch.empty(size[0])).shape == size[:1]
        else ()
    )


def keys_of(file: AdapterFile) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of each module by PEFT's names, alpha among them, and those that are of no adapter.

    Raises VideotuneError where there is no module, or one has a tensor twice or lacks one.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in file.tensors.items():
        found = _KEY.fullmatch(key)
        if found is None:
            rest[key] = value
            continue
        part = _PARTS.get(found[2], found[2]) or found[3]
        own = modules.setdefault(found[1], {})
        if part in own:
            raise VideotuneError(
                f"{file.path}: {key} is there a second time: the file holds several adapters"
            )
        column = (
            part == "lora_magnitude_vector" and value.ndim == 2 and value.shape[1] == 1
        )  # as LyCORIS has it
        own[part] = value[:, 0] if column else value
    modules = {name: parts for name, parts in modules.items() if set(parts) != {"alpha"}}
    for name, parts in modules.items():
        own = {part: value for part, value in parts.items() if part != "alpha"}
        if not (
            own["oft_R"].ndim == 2 and own["oft_R"].numel()
            if set(own) == {"oft_R"}
            else size_of(own)
        ):
            raise VideotuneError(
                f"{file.path}: {name}: its tensors differ in rank, or dora_scale is not by outputs"
            )
    if not modules:
        raise VideotuneError(
            f"{file.path} is no LoRA and holds no other adapter: it has the keys {some(sorted(rest))}"
        )
    return modules, rest


def read_modules(family: DiffusersModel, net: nn.Module, file: AdapterFile) -> list[Module]:
    """The modules of an adapter file of any program: the one reading that all that use such files share.

    ``net``: the family's transformer; a skeleton does. Prints a note where no alpha stands anywhere, and the rank is taken
    for it. Raises VideotuneError with the reason for what cannot be read whole.
    """
    found, rest = keys_of(file)
    odd = list(rest) or [name for name in found if bare(name) not in places(family, net)]
    modules = (
        []
        if odd
        else [located(family, net, file, name, parts) for name, parts in found.items()]
    )
    paths = [path for module in modules for path in module.paths]
    faults = {
        "it has biases or other tensors that are no adapter's": bool(rest),
        "it has modules that the model lacks": bool(odd),
        "it names a module twice": len(set(paths)) < len(paths),
        "it changes none of its modules": not any(changes(module) for module in modules),
        "its modules are of several kinds": len(
            {kind_of([f"x.{part}" for part in own.parts]) for own in modules}
        )
        > 1,
    }
    if fault := next((fault for fault, is_so in faults.items() if is_so), ""):
        raise refuse(family, file.path, odd or list(found), fault)
    if "videotune" not in file.header and any(
        not own.told and "lora_A" in own.parts for own in modules
    ):
        note(
            f"note: {file.path.name} does not say its alpha: the rank is taken for it, which is a scale of 1"
        )
    return modules


def changes(module: Module) -> bool:
    """Whether an update is another than that of a first step."""
    return any(bool(value.any()) for part, value in module.parts.items() if part in ZERO)


def located(
    family: DiffusersModel,
    net: nn.Module,
    file: AdapterFile,
    name: str,
    parts: Mapping[str, Tensor],
) -> Module:
    """A module of a file with its paths and its scale, its sizes checked against the model's."""
    paths = places(family, net)[bare(name)]
    own = {part: value for part, value in parts.items() if part != "alpha"}
    if "oft_R" in own:
        return Module(name, paths, own)
    held = [linear_size(net, path) for path in paths]
    if size_of(own) != (sum(rows for rows, _ in held), held[0][1]):
        raise VideotuneError(
            f"{file.path} was made for another base: {paths[0]} differs in size"
        )
    return Module(name, paths, own, *scale_of(file, own, parts.get("alpha"), paths[0]))


def linear_size(net: nn.Module, path: str) -> tuple[int, int]:
    """Outputs and inputs of a module's weight."""
    module: Any = net.get_submodule(path)
    return module.out_features, module.in_features


def modules_in(family: DiffusersModel, net: nn.Module, file: AdapterFile) -> dict[str, Module]:
    """``read_modules`` by their paths in diffusers: a module that joins several is taken apart."""
    return {
        own.paths[0]: own
        for module in read_modules(family, net, file)
        for own in apart(net, module)
    }


def apart(net: nn.Module, module: Module) -> list[Module]:
    """A module as it is in diffusers; where it is several there, each has its rows.

    Raises VideotuneError for LoKr, whose factors cannot be split by rows.
    """
    if len(module.paths) == 1:
        return [module]
    if not {"lora_B", "hada_w1_a"} & set(module.parts):
        raise VideotuneError(
            f"{module.name} joins {len(module.paths)} modules, and its kind of update cannot be split"
        )
    rows = [linear_size(net, path)[0] for path in module.paths]
    split = {
        part: value.split(rows) for part, value in module.parts.items() if part in _BY_ROWS
    }
    parts = [
        module.parts | {part: own[i] for part, own in split.items()} for i in range(len(rows))
    ]
    return [
        replace(module, paths=(path,), parts=own)
        for path, own in zip(module.paths, parts, strict=True)
    ]


def lora_of(family: DiffusersModel, net: nn.Module, file: AdapterFile) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA file as ``load_lora_weights`` takes it: diffusers' names, and B times alpha / rank.

    Names and tensors that are not in our table are left to diffusers' own converters. Raises VideotuneError for what cannot
    be read whole.
    """
    found, rest = keys_of(file)
    if rest or any(bare(name) not in places(family, net) for name in found):
        return _by_diffusers(family, net, file, found, rest)
    state: dict[str, Tensor] = {}
    for path, module in modules_in(family, net, file).items():
        if "lora_A" not in module.parts:
            raise refuse(family, file.path, [module.name], "it is no LoRA")
        b = module.parts["lora_B"]
        for part, value in (
            module.parts | {"lora_B": b if module.scale == 1.0 else b.float() * module.scale}
        ).items():
            state[f"transformer.{tensor_name(path, part)}"] = value.clone()
    return state


def tensor_name(path: str, part: str) -> str:
    """The name under which PEFT saves a tensor of a module."""
    return (
        f"{path}.{part}.weight" if part in ("lora_A", "lora_B", "oft_R") else f"{path}.{part}"
    )


_TABLES: WeakKeyDictionary[Any, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def places(family: DiffusersModel, net: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules of each name that any form of file has, dots or none; several where a form joins them into one."""
    if net in _TABLES:
        return _TABLES[net]
    order = [
        f".{path}"
        for _, paths in family.spec.fused_modules.get("comfyui", ())
        for path in paths
    ]
    found: dict[str, list[str]] = {}
    for path, module in net.named_modules():
        if hasattr(module, "in_features"):
            for name in {
                path,
                family.to_comfyui_name(path),
                (family.original(f"{path}.weight") or path).removesuffix(".weight"),
            }:
                found.setdefault(name.replace(".", "_"), []).append(path)
    for paths in found.values():
        paths.sort(
            key=lambda path: next((i for i, own in enumerate(order) if path.endswith(own)), 0)
        )
    return _TABLES.setdefault(net, {name: tuple(paths) for name, paths in found.items()})


def bare(name: str) -> str:
    """A module's name in a file without the form's prefix, dots as underscores: so kohya and musubi write them."""
    return name[len(prefix_of(name)) :].replace(".", "_")


def prefix_of(name: str) -> str:
    """What stands in a file before a module's own name."""
    found = _PREFIX.match(name)
    return found[0] if found else ""


def scale_of(
    file: AdapterFile, parts: Mapping[str, Tensor], own: Tensor | None, place: str
) -> tuple[float, str]:
    """alpha / rank of a module, and where alpha stands: ``own`` is the tensor for it.

    LyCORIS, musubi and ComfyUI leave a LoKr of whole factors as it is, whatever alpha says; PEFT scales it too. Raises
    VideotuneError where alpha is none.
    """
    is_lora = "lora_A" in parts
    rank = rank_of(parts)
    where = f"{file.path}: {place}"
    stated = file.number("lora_alpha" if is_lora else "alpha", "alpha_pattern", place)
    divisor = (None if is_lora else file.number("r", "rank_pattern", place)) or rank or 1
    scale = 1.0
    told = ""
    if stated is not None:
        settings, told = file.settings
        scale = stated / (math.sqrt(divisor) if settings.get("use_rslora") is True else divisor)
    if own is not None:
        if own.numel() != 1:
            raise VideotuneError(f"{where}: its alpha is no number")
        said = float(own) / rank if rank else 1.0
        if stated is not None and not math.isclose(said, scale, rel_tol=1e-3):
            raise VideotuneError(
                f"{where}: its tensor says alpha {float(own):g} and its header {stated:g}: which?"
            )
        scale = said
        told = "tensor"
    if not 0 < scale <= _MOST:
        raise VideotuneError(
            f"{where}: alpha {scale * divisor:g} at rank {rank} is no scale: the file is damaged"
        )
    return scale, told


def _by_diffusers(
    family: DiffusersModel,
    net: nn.Module,
    file: AdapterFile,
    modules: Mapping[str, dict[str, Tensor]],
    rest: dict[str, Tensor],
) -> dict[str, Tensor]:
    """What diffusers' own converters make of names that are not in our table, such as those of whole biases."""
    there = {path for path, _ in net.named_modules()} - {""}
    state = dict(rest)
    odd = refuse(
        family, file.path, list(file.tensors), "it has modules or tensors that are not read"
    )
    for name, parts in modules.items():
        alpha = parts.pop("alpha", None)
        if set(parts) != {"lora_A", "lora_B"}:
            raise odd
        scale, _ = scale_of(file, parts, alpha, places(family, net).get(bare(name), (name,))[0])
        state |= {
            f"{name}.lora_A.weight": parts["lora_A"],
            f"{name}.lora_B.weight": parts["lora_B"].float() * scale,
        }
    if any(
        "alpha" in key or "dora_scale" in key or key.startswith("text_encoder") for key in state
    ):
        raise odd
    try:
        found: dict[str, Tensor] = family.pipeline_class().lora_state_dict(state)
    except (
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # each converter has its way to say no
        raise odd from error
    if not {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in found} <= there:
        raise odd
    return found
