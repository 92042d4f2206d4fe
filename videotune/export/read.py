"""Adapter files as others read them: diffusers' own loader, or PEFT's injection where a file brings PEFT's settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.kinds import by_module, split
from videotune.adapters.lora import lora_parameters
from videotune.export.formats import CONFIG
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

READ = "read"


def reader_of(path: Path) -> str:
    """Who reads the file."""
    return "PEFT inject_adapter_in_model" if settings_in(path) else "diffusers load_lora_weights"


def settings_in(path: Path) -> dict[str, Any] | None:
    """PEFT's settings in the head of a file; None where there are none, or it is no file of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get(CONFIG)
    except SafetensorError:  # diffusers' loader says what it is instead
        return None
    return json.loads(found) if found else None


def read_lora(family: Family, net: nn.Module, path: Path, name: str) -> None:
    """Read an adapter's file into a network: as ``load_lora_weights`` does, its metadata (an alpha, say) included.

    One with PEFT's settings in its head by PEFT; under ComfyUI's names these are put back into diffusers' first. Raises
    ValueError where the network has no place for a tensor of it, or lacks one.
    """
    settings = settings_in(path)
    if settings is None:
        loader = family.pipeline_class()
        state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
        loader.load_lora_into_transformer(state, net, adapter_name=name, metadata=metadata)
        return
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


def read_empty(family: Family, path: Path, expert: str | None = None) -> nn.Module:
    """A model of the same shape with the file in it.

    Its weights are one shared zero, so only the adapter takes memory.
    """
    import torch
    from torch.nn import Parameter

    net, zero = family.skeleton(expert), torch.zeros(())
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(zero.expand(parameter.shape), requires_grad=False))
    read_lora(family, net, path, READ)
    return net


def read_parts(
    family: Family, path: Path, expert: str | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """The tensors of each module by PEFT's names, as the file's reader takes them, and what their update is scaled by."""
    net = read_empty(family, path, expert)
    parts = by_module({name: value.detach() for name, value in lora_parameters(net, READ).items()})
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


def read_back(family: Family, path: Path, expert: str | None = None) -> dict[str, Tensor]:
    """All of ``read_effects`` at once: of LoRA ΔW of each module as diffusers' own loader applies it."""
    return {name: calculate() for name, calculate in read_effects(family, path, expert).items()}


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
