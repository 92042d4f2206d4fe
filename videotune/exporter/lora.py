"""A trained adapter as a file that others read, and adapter files of any program read into a network.

They are read by diffusers' own loader, or by PEFT's injection where a file brings PEFT's settings. Our own facts stand in
the header under the key ``videotune``; ``export/formats.py`` says how the rest is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from videotune.adapters.effect import effects
from videotune.adapters.kinds import by_module, kind_of, split
from videotune.adapters.lora import lora_parameters
from videotune.exporter.adapter_file import AdapterFile, lora_of, refuse, warn_of_other_base
from videotune.exporter.formats import Exported, baked, check_updates, head_of, write_verified
from videotune.models.pretrained import explained
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

READ = "read"
"""The adapter's name in a network that a file is read into for a look at it."""


def export_lora(
    family: Family,
    format: str,
    state: Mapping[str, Tensor],
    scale: float,
    path: Path,
    facts: Mapping[str, Any],
    expert: str | None = None,
) -> Exported:
    """Write one file, read it back as others do and compare ΔW module by module; ``expert``: whose adapter it is.

    Raises VideotuneError where the file would not do elsewhere what was trained here.
    """

    def verify(aside: Path) -> tuple[float, str]:
        found, reader = read_effects(family, aside, expert)
        return check_updates(effects(state, scale), found, path, reader), reader

    tensors = baked(family, format, state, scale)
    return write_verified(format, path, len(by_module(state)), tensors, facts, verify, head_of(state))


def read_lora(family: Family, net: nn.Module, path: Path, name: str) -> str:
    """Read an adapter's file into a network: as ``load_lora_weights`` does, its metadata (an alpha, say) included.

    One with PEFT's settings in its head by PEFT; under ComfyUI's names these are put back into diffusers' first. Returns who
    has read it: PEFT, diffusers, or videotune itself where diffusers does not know the names. Raises ValueError where the
    network has no place for a tensor of it, or lacks one.
    """
    file = AdapterFile(path)
    if file.peft_settings:
        _read_by_peft(family, net, file, name)
        return "PEFT inject_adapter_in_model"
    loader = family.pipeline_class()
    state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
    known = any(
        key.startswith("transformer.") for key in state
    )  # diffusers has put its own names in place of the file's
    state = state if known else lora_of(family, net, file)
    loader.load_lora_into_transformer(state, net, adapter_name=name, metadata=metadata)
    return "diffusers load_lora_weights" if known else "videotune sample --lora"


def read_file(family: Family, net: nn.Module, path: Path, name: str) -> None:
    """Read an adapter's file of any program into a network, alpha included; prints what had to be assumed.

    Raises VideotuneError for a file that cannot be read whole, or changes nothing.
    """
    with explained(f"{path} is no LoRA of {family.spec.title}: it was made for another base, or is damaged"):
        file = AdapterFile(path)
        warn_of_other_base(family, file)
        if file.peft_settings:
            _read_by_peft(family, net, file, name)
        else:
            state = lora_of(family, net, file)
            family.pipeline_class().load_lora_into_transformer(state, net, adapter_name=name, metadata=None)
    if kind_of(lora_parameters(net, name)) is None:
        raise refuse(family, path, [], "it changes none of its modules")


def _read_by_peft(family: Family, net: nn.Module, file: AdapterFile, name: str) -> None:
    """An adapter whose file brings PEFT's settings; ValueError where the network has no place for a tensor, or lacks one."""
    import peft

    modules: list[str] = file.peft_settings["target_modules"]
    there = dict(net.named_modules())
    if absent := [module for module in modules if module not in there]:
        raise ValueError(f"{len(absent)} of its modules are not in the model, such as {absent[0]}")
    own = {rename(module): module for rename in family.key_maps().values() for module in modules}
    state = {}
    for key, value in file.tensors.items():
        place = (split(key) or ("",))[0]
        state[f"{own.get(place, place)}{key[len(place) :]}"] = value
    net.add_adapter(peft.get_peft_config(file.peft_settings), adapter_name=name)  # type: ignore[operator]
    mine = {key: value.shape for key, value in lora_parameters(net, name).items()}
    odd = sorted(set(mine) ^ set(state)) or [key for key in mine if mine[key] != state[key].shape]
    if odd:
        raise ValueError(f"{len(odd)} of its tensors do not fit the model, such as {odd[0]}")
    peft.set_peft_model_state_dict(net, state, name)


def _empty(family: Family, expert: str | None = None) -> nn.Module:
    """A model of the same shape whose weights are one shared zero, so that only an adapter takes memory."""
    net, zero = family.skeleton(expert), torch.zeros(())
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(zero.expand(parameter.shape), requires_grad=False))
    return net


def read_parts(family: Family, path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """The tensors of each module by PEFT's names, of a file of any program, and what their update is scaled by."""
    net = _empty(family)
    read_file(family, net, path, READ)
    state = {name: value.detach() for name, value in lora_parameters(net, READ).items()}
    if odd := [name for name in state if split(name) is None]:
        raise refuse(family, path, odd, "a run cannot begin with such tensors")
    parts = by_module(state)
    scaling = {module: getattr(net.get_submodule(module), "scaling", {}) for module in parts}  # a rotation has none
    return parts, {module: float(own.get(READ, 1.0)) for module, own in scaling.items()}


def read_effects(family: Family, path: Path, expert: str | None = None) -> tuple[dict[str, Callable[[], Tensor]], str]:
    """What each module's adapter does as its reader applies it, calculated at the call in float64; and the reader.

    See ``adapters.effect.effects``.
    """
    net = _empty(family, expert)
    reader = read_lora(family, net, path, READ)
    found: dict[str, Callable[[], Tensor]] = {}
    for module, parts in by_module(lora_parameters(net, READ)).items():
        found[module] = partial(_update, net.get_submodule(module))
        if "lora_magnitude_vector" in parts:
            found[f"{module} magnitude"] = parts["lora_magnitude_vector"].detach().double
    return found, reader


def _update(layer: Any) -> Tensor:
    """PEFT's own answer in float64; of OFT what it makes of unit vectors, less these: R - 1 (blocks, b, b)."""
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
