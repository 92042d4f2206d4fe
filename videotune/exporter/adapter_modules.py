"""The modules of an adapter file of any program, under diffusers' names, with what each update is multiplied by."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from videotune.adapters.kinds import PARTS, ZERO, kind_of
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, refuse
from videotune.models.model_files import note
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

_PARTS = {
    **{f"lora{mark}{name}": part for mark in "_." for name, part in (("down", "lora_A"), ("up", "lora_B"))},
    "dora_scale": "lora_magnitude_vector", "lora_alpha": "alpha",
}  # fmt: skip
_NAMES = "|".join(re.escape(name) for name in (*_PARTS, *dict.fromkeys(part for own in PARTS.values() for part in own)))
_KEY = re.compile(rf"(.+)\.(?:({_NAMES})(?:\.(?!bias$|weight$)\w+)??(?:\.weight)?|(alpha))")
_PREFIX = re.compile(
    r"(base_model\.model\.|model\.|diffusion_model\.|transformer\.)+|lora_unet_|lora_transformer_|lycoris_"
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
    scale: float
    told: str

    @property
    def rank(self) -> int:
        """The rank of the factors; of LoKr with whole factors the size of the smaller side of the second."""
        return rank_of(self.parts) or min(self.parts["lokr_w2"].shape if "lokr_w2" in self.parts else (0,))


def rank_of(parts: Mapping[str, Tensor]) -> int | None:
    """The number that alpha is divided by: the rank; None where the factors are whole, and for rotations."""
    for name, axis in (("lora_A", 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if name in parts:
            return int(parts[name].shape[axis])
    return None


def size_of(parts: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Outputs and inputs of the module that tensors are of; None where they are no whole set of one kind."""
    kind = kind_of([f"x.{part}" for part in parts])
    if any(value.ndim != (1 if part == "lora_magnitude_vector" else 2) for part, value in parts.items()):
        return None
    match kind:
        case "LORA" | "DORA" if {"lora_A", "lora_B"} <= set(parts):
            return _product(parts["lora_B"], parts["lora_A"])
        case "LOHA" if len(parts) == len(PARTS["LOHA"]):
            one, two = (_product(parts[f"hada_w{i}_a"], parts[f"hada_w{i}_b"]) for i in (1, 2))
            return one if one == two else None
        case "LOKR":
            one, two = (_factor(parts, f"lokr_w{i}") for i in (1, 2))
            return (one[0] * two[0], one[1] * two[1]) if one and two else None
    return None


def _product(b: Tensor, a: Tensor) -> tuple[int, int] | None:
    return (b.shape[0], a.shape[1]) if b.shape[1] == a.shape[0] > 0 else None


def _factor(parts: Mapping[str, Tensor], name: str) -> tuple[int, int] | None:
    if name in parts:
        return None if f"{name}_a" in parts else (parts[name].shape[0], parts[name].shape[1])
    both = f"{name}_a" in parts and f"{name}_b" in parts
    return _product(parts[f"{name}_a"], parts[f"{name}_b"]) if both else None


def keys_of(file: AdapterFile) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of each module by PEFT's names, alpha among them, and those that are of no adapter.

    Raises VideotuneError where a module has a tensor twice.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in file.tensors.items():
        found = _KEY.fullmatch(key)
        if found is None:
            rest[key] = value
            continue
        part, own = _PARTS.get(found[2], found[2]) or found[3], modules.setdefault(found[1], {})
        if part in own:
            raise VideotuneError(f"{file.path}: {key} is there a second time: the file holds several adapters")
        own[part] = value
    return {name: parts for name, parts in modules.items() if set(parts) != {"alpha"}}, rest


def read_modules(family: Family, net: nn.Module, file: AdapterFile) -> list[Module]:
    """The modules of an adapter file of any program: the one reading that all that use such files share.

    ``net``: the family's transformer; a skeleton does. Prints a note where no alpha stands anywhere, and the rank is taken
    for it. Raises VideotuneError with the reason for what cannot be read whole.
    """
    found, rest = keys_of(file)
    if rest or not found:
        raise refuse(family, file.path, list(rest), "it has biases or other tensors that are no adapter's")
    if odd := [name for name in found if bare(name) not in places(family, net)]:
        raise refuse(family, file.path, odd, "it has modules that the model lacks")
    modules = [located(family, net, file, name, parts) for name, parts in found.items()]
    if len({path for module in modules for path in module.paths}) < sum(len(module.paths) for module in modules):
        raise refuse(family, file.path, list(found), "it names a module twice")
    if not any(bool(own.any()) for module in modules for part, own in module.parts.items() if part in ZERO):
        raise refuse(family, file.path, list(found), "it changes none of its modules")
    if len({kind_of([f"x.{part}" for part in module.parts]) for module in modules}) > 1:
        raise refuse(family, file.path, list(found), "its modules are of several kinds")
    _tell_of_alpha(file, modules)
    return modules


def _tell_of_alpha(file: AdapterFile, modules: Sequence[Module]) -> None:
    if "videotune" not in file.header and any(not own.told and "lora_A" in own.parts for own in modules):
        note(f"note: {file.path.name} does not say its alpha: the rank is taken for it, which is a scale of 1")


def located(family: Family, net: nn.Module, file: AdapterFile, name: str, parts: Mapping[str, Tensor]) -> Module:
    """A module of a file with its paths and its scale, its sizes checked against the model's."""
    paths, where = places(family, net)[bare(name)], f"{file.path}: {name}"
    own = {part: value for part, value in parts.items() if part != "alpha"}
    if (magnitude := own.get("lora_magnitude_vector")) is not None and magnitude.ndim == 2 and magnitude.shape[1] == 1:
        own["lora_magnitude_vector"] = magnitude[:, 0]
    if "oft_R" in own:
        return Module(name, paths, own, 1.0, "")
    size, held = size_of(own), [linear_size(net, path) for path in paths]
    if size is None:
        raise VideotuneError(f"{where}: its factors are no pair of one rank: the file is damaged or incomplete")
    if size != (sum(rows for rows, _ in held), held[0][1]) or len(own.get("lora_magnitude_vector", ())) not in (
        0,
        size[0],
    ):
        raise VideotuneError(f"{file.path} was made for another base: {paths[0]} differs in size")
    return Module(name, paths, own, *scale_of(file, own, parts.get("alpha"), paths[0], where))


def linear_size(net: nn.Module, path: str) -> tuple[int, int]:
    """Outputs and inputs of a module's weight."""
    module: Any = net.get_submodule(path)
    return module.out_features, module.in_features


def apart(net: nn.Module, module: Module) -> dict[str, dict[str, Tensor]]:
    """A module's tensors under its path in diffusers; where it is several there, each has its rows.

    Raises VideotuneError for a Kronecker product, which has no rows of its own.
    """
    if len(module.paths) == 1:
        return {module.paths[0]: module.parts}
    if "lora_B" not in module.parts and "hada_w1_a" not in module.parts:
        raise VideotuneError(f"{module.name} joins {len(module.paths)} modules, and its kind of update cannot be split")
    rows = [linear_size(net, path)[0] for path in module.paths]
    split = {part: value.split(rows) for part, value in module.parts.items() if part in _BY_ROWS}
    return {path: module.parts | {part: own[i] for part, own in split.items()} for i, path in enumerate(module.paths)}


def modules_in(family: Family, net: nn.Module, file: AdapterFile) -> dict[str, Module]:
    """``read_modules`` by their paths in diffusers: a module that joins several is taken apart."""
    found = {}
    for module in read_modules(family, net, file):
        for path, parts in apart(net, module).items():
            found[path] = replace(module, paths=(path,), parts=parts)
    return found


def lora_of(family: Family, net: nn.Module, file: AdapterFile) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA file as ``load_lora_weights`` takes it: diffusers' names, and B times alpha / rank.

    Names and tensors that are not in our table are left to diffusers' own converters. Raises VideotuneError for what cannot
    be read whole.
    """
    found, rest = keys_of(file)
    if rest or any(bare(name) not in places(family, net) for name in found):
        return _by_diffusers(family, net, file, found, rest)
    state: dict[str, Tensor] = {}
    for module in read_modules(family, net, file):
        if "lora_A" not in module.parts:
            raise refuse(family, file.path, [module.name], "it is no LoRA")
        for path, parts in apart(net, module).items():
            scaled = parts["lora_B"].float() * module.scale if module.scale != 1.0 else parts["lora_B"]
            for part, value in (parts | {"lora_B": scaled}).items():
                end = "" if part == "lora_magnitude_vector" else ".weight"
                state[f"transformer.{path}.{part}{end}"] = value.clone()
    return state


_TABLES: WeakKeyDictionary[Any, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def places(family: Family, net: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules of each name that any form of file has, dots or none; several where a form joins them into one."""
    if net in _TABLES:
        return _TABLES[net]
    original = family.full_key_maps().get("original", lambda name: name)
    order = [f".{path}" for _, paths in family.spec.fused.get("comfyui", ()) for path in paths]
    found: dict[str, list[str]] = {}
    for path, module in net.named_modules():
        if hasattr(module, "in_features"):
            for name in {path, family.native(path), original(f"{path}.weight").removesuffix(".weight")}:
                found.setdefault(name.replace(".", "_"), []).append(path)
    for paths in found.values():
        paths.sort(key=lambda path: next((i for i, own in enumerate(order) if path.endswith(own)), 0))
    return _TABLES.setdefault(net, {name: tuple(paths) for name, paths in found.items()})


def bare(name: str) -> str:
    """A module's name in a file without the form's prefix, dots as underscores: so kohya and musubi write them."""
    return name[len(prefix_of(name)) :].replace(".", "_")


def prefix_of(name: str) -> str:
    """What stands in a file before a module's own name."""
    found = _PREFIX.match(name)
    return found[0] if found else ""


def scale_of(
    file: AdapterFile, parts: Mapping[str, Tensor], own: Tensor | None, place: str, where: str
) -> tuple[float, str]:
    """alpha / rank of a module, and where alpha stands.

    LyCORIS, musubi and ComfyUI leave a LoKr of whole factors as it is, whatever alpha says; PEFT scales it too. Raises
    VideotuneError where alpha is none.
    """
    rank, told = rank_of(parts), file.told
    stated = file.number("lora_alpha" if "lora_A" in parts else "alpha", "alpha_pattern", place)
    divisor = float(rank or 1) if "lora_A" in parts else file.number("r", "rank_pattern", place) or float(rank or 1)
    if own is not None and own.numel() != 1:
        raise VideotuneError(f"{where}: its alpha is no number")
    root = file.lora_settings.get("use_rslora") is True
    scale = 1.0 if stated is None else stated / (math.sqrt(divisor) if root else divisor)
    if own is not None:
        said = float(own) / rank if rank else 1.0
        if stated is not None and not math.isclose(said, scale, rel_tol=1e-3):
            raise VideotuneError(f"{where}: its tensor says alpha {float(own):g} and its header {stated:g}: which?")
        scale, told = said, "tensor"
    if not 0 < scale <= _MOST:
        raise VideotuneError(f"{where}: alpha {scale * divisor:g} at rank {rank} is no scale: the file is damaged")
    return scale, told if own is not None or stated is not None else ""


def _by_diffusers(
    family: Family,
    net: nn.Module,
    file: AdapterFile,
    modules: Mapping[str, Mapping[str, Tensor]],
    rest: dict[str, Tensor],
) -> dict[str, Tensor]:
    """What diffusers' own converters make of names that are not in our table, such as those of whole biases."""
    there, keys = dict(net.named_modules()), list(file.tensors)
    odd = refuse(family, file.path, keys, "it has modules or tensors that are not read")
    state = dict(rest)
    for name, parts in modules.items():
        if not {"lora_A", "lora_B"} <= set(parts) <= {"lora_A", "lora_B", "alpha"} or not size_of(_pair(parts)):
            raise odd
        paths = places(family, net).get(bare(name), (name,))
        scale, _ = scale_of(file, parts, parts.get("alpha"), paths[0], f"{file.path}: {name}")
        state |= {f"{name}.lora_A.weight": parts["lora_A"], f"{name}.lora_B.weight": parts["lora_B"].float() * scale}
    if any("alpha" in key or "dora_scale" in key or key.startswith("text_encoder") for key in state):
        raise odd
    try:
        found: dict[str, Tensor] = family.pipeline_class().lora_state_dict(state)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # each converter has its way to say no
        raise odd from error
    for key in found:
        place = key.removeprefix("transformer.").rpartition(".lora_")[0]
        if not place or place not in there:
            raise odd
    return found


def _pair(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parts[name] for name in ("lora_A", "lora_B")}
