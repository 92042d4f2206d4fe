"""Adapter files as others read them: diffusers' own loader, or PEFT's injection where a file brings PEFT's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.kinds import by_module, kind_of, split
from videotune.adapters.lora import lora_parameters
from videotune.errors import VideotuneError
from videotune.export.adapter_file import facts_in, lora_of, read_tensors, refuse, warn_base_differs
from videotune.export.formats import CONFIG
from videotune.models.model_files import note, parse_object
from videotune.models.pretrained import explained
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

READ = "read"
_NAME = re.compile(r"[\w.]+")


def reader_of(family: Family, path: Path) -> str:
    """Who reads the file: PEFT, diffusers, or videotune itself where diffusers does not know the names."""
    if settings_in(path):
        return "PEFT inject_adapter_in_model"
    known = _known_to_diffusers(family.pipeline_class().lora_state_dict(str(path)))
    return "diffusers load_lora_weights" if known else "videotune sample --lora"


def _known_to_diffusers(state: Mapping[str, Tensor]) -> bool:
    """Whether diffusers has put its own names in the place of a file's."""
    return any(key.startswith("transformer.") for key in state)


def settings_in(path: Path) -> dict[str, Any] | None:
    """PEFT's settings in the head of a file; None where there are none, or it is no file of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get(CONFIG)
    except SafetensorError:  # diffusers' loader says what it is instead
        return None
    if not found:
        return None
    settings = parse_object(found, f"{path}: its header's {CONFIG!r}")
    for key, value in settings.items():
        exact = isinstance(value, list) and all(isinstance(each, str) and _NAME.fullmatch(each) for each in value)
        fine = exact if key == "target_modules" else key == "peft_type" or isinstance(value, bool | int | float | None)
        if not fine:  # patterns are PEFT's regular expressions, which need not come to an end
            raise VideotuneError(
                f"{path}: its header's {CONFIG!r} says {key} {str(value)[:60]!r}; read are exact names alone"
            )
    if settings.get("peft_type") not in ("LOHA", "LOKR", "OFT") or not settings.get("target_modules"):
        raise VideotuneError(f"{path}: its header's {CONFIG!r} is of no LOHA, LOKR or OFT on modules by their names")
    return settings


def read_lora(family: Family, net: nn.Module, path: Path, name: str) -> None:
    """Read an adapter's file into a network: as ``load_lora_weights`` does, its metadata (an alpha, say) included.

    One with PEFT's settings in its head by PEFT; under ComfyUI's names these are put back into diffusers' first. Raises
    ValueError where the network has no place for a tensor of it, or lacks one.
    """
    settings = settings_in(path)
    if settings is None:
        loader = family.pipeline_class()
        state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
        if not _known_to_diffusers(state):
            state = lora_of(family, net, path, *read_tensors(path), note)
        loader.load_lora_into_transformer(state, net, adapter_name=name, metadata=metadata)
        return
    _read_by_peft(family, net, path, name, settings)


def read_file(family: Family, net: nn.Module, path: Path, name: str, echo: Callable[[str], None] = note) -> None:
    """Read an adapter's file of any program into a network, alpha included; ``echo`` is told what had to be assumed.

    Raises VideotuneError for a file that cannot be read whole, or changes nothing.
    """
    settings = settings_in(path)
    with explained(f"{path} is no LoRA of {family.spec.title}: it was made for another base, or is damaged"):
        tensors, header = read_tensors(path)
        warn_base_differs(family, facts_in(header, path), path, echo)
        if settings is not None:
            _read_by_peft(family, net, path, name, settings)
        else:
            state = lora_of(family, net, path, tensors, header, echo)
            family.pipeline_class().load_lora_into_transformer(state, net, adapter_name=name, metadata=None)
    if kind_of(lora_parameters(net, name)) is None:
        raise refuse(family, path, [], "it changes none of its modules")


def _read_by_peft(family: Family, net: nn.Module, path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """An adapter whose file brings PEFT's settings; ValueError where the network has no place for a tensor, or lacks one."""
    import peft
    from safetensors.torch import load_file

    modules: list[str] = settings["target_modules"]
    there = dict(net.named_modules())
    absent = [module for module in modules if module not in there]
    if absent:
        raise ValueError(f"{len(absent)} of its modules are not in the model, such as {absent[0]}")
    own = {rename(module): module for rename in family.key_maps().values() for module in modules}
    state = {_renamed(key, own): value for key, value in load_file(path).items()}
    net.add_adapter(peft.get_peft_config(settings), adapter_name=name)  # type: ignore[operator]
    mine = {key: value.shape for key, value in lora_parameters(net, name).items()}
    odd = sorted(set(mine) ^ set(state)) or [key for key in mine if mine[key] != state[key].shape]
    if odd:
        raise ValueError(f"{len(odd)} of its tensors do not fit the model, such as {odd[0]}")
    peft.set_peft_model_state_dict(net, state, name)


def _renamed(key: str, own: Mapping[str, str]) -> str:
    """A tensor's key under diffusers' name of its module."""
    place = split(key)
    if place is None or place[0] not in own:
        return key
    return f"{own[place[0]]}{key[len(place[0]) :]}"


def read_empty(
    family: Family, path: Path, expert: str | None = None, read: Callable[..., None] = read_lora
) -> nn.Module:
    """A model of the same shape with the file in it, put there by ``read``.

    Its weights are one shared zero, so only the adapter takes memory.
    """
    import torch
    from torch.nn import Parameter

    net, zero = family.skeleton(expert), torch.zeros(())
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(zero.expand(parameter.shape), requires_grad=False))
    read(family, net, path, READ)
    return net


def read_parts(family: Family, path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """The tensors of each module by PEFT's names, of a file of any program, and what their update is scaled by."""
    net = read_empty(family, path, read=read_file)
    state = {name: value.detach() for name, value in lora_parameters(net, READ).items()}
    odd = [name for name in state if split(name) is None]
    if odd:
        raise refuse(family, path, odd, "a run cannot begin with such tensors")
    parts = by_module(state)
    scales = {module: _scale(net.get_submodule(module)) for module in parts}
    return parts, scales


def _scale(layer: nn.Module) -> float:
    """PEFT's scale of a layer; of a rotation, which has none, 1."""
    scaling: Mapping[str, float] = getattr(layer, "scaling", {})
    return float(scaling.get(READ, 1.0))


def read_effects(family: Family, path: Path, expert: str | None = None) -> dict[str, Callable[[], Tensor]]:
    """What each module's adapter does as its reader applies it, calculated at the call in float64: see ``effects``."""
    net = read_empty(family, path, expert)
    found: dict[str, Callable[[], Tensor]] = {}
    for module, parts in by_module(lora_parameters(net, READ)).items():
        layer = net.get_submodule(module)
        found[module] = partial(_change, layer)
        if "lora_magnitude_vector" in parts:
            found[f"{module} magnitude"] = parts["lora_magnitude_vector"].detach().double
    return found


def read_back(family: Family, path: Path) -> dict[str, Tensor]:
    """All of ``read_effects`` at once: of LoRA ΔW of each module as diffusers' own loader applies it."""
    return {name: calculate() for name, calculate in read_effects(family, path).items()}


def _change(layer: Any) -> Tensor:
    """PEFT's own answer in float64; of OFT what it makes of unit vectors, less these: R - 1 (blocks, b, b)."""
    import torch

    for part in layer.adapter_layer_names:
        getattr(layer, part).double()
    with torch.no_grad():
        if hasattr(layer, "oft_R"):
            one = torch.eye(layer.oft_block_size[READ], dtype=torch.float64)
            turned = layer.oft_R[READ](one.repeat(1, layer.r[READ]))  # each block's rows beside those of the others
            delta = turned.unflatten(1, (-1, len(one))).transpose(0, 1) - one
        else:
            delta = layer.get_delta_weight(READ)
    for part in layer.adapter_layer_names:
        getattr(layer, part).float()
    return delta
