"""DoRA for ComfyUI, which divides by another norm than DoRA is trained with.

DoRA's weight is m · (W + ΔW) / ‖W + ΔW‖ row by row. ComfyUI computes
``dora_scale`` · (W + ΔW) / ‖W‖, so the file holds m · ‖W‖ / ‖W + ΔW‖: in ComfyUI, on this
base model and at strength 1, that is the trained weight. No other program reads it so.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from videotune.adapters.adapter_types import by_module
from videotune.adapters.effect import new_weight
from videotune.exporter.formats import TOLERANCE, verification_error
from videotune.exporter.lora_write import bake_adapter, form_name
from videotune.models import loading
from videotune.models.base import DiffusersModel

MAGNITUDE = "lora_magnitude_vector"
READER = "ComfyUI's formula"


def bake_dora(
    family: DiffusersModel, state: Mapping[str, Tensor], scale: float, expert: str
) -> dict[str, Tensor]:
    """Return a run's DoRA by ComfyUI's names, with magnitudes for ComfyUI's norm.

    Args:
        family: the base model, whose weights are read.
        state: the adapter's tensors.
        scale: alpha / rank.
        expert: the expert that the adapter belongs to.
    """
    factors = {name: value for name, value in state.items() if MAGNITUDE not in name}
    tensors = bake_adapter(family, "comfyui", factors, scale)

    modules = by_module(state)
    names = _names(family, expert, modules)
    for path, weight in base_weights(family, expert, modules):
        lora_parts = {
            name: value for name, value in modules[path].items() if name != MAGNITUDE
        }
        norm_of_sum = new_weight(weight, lora_parts, scale).norm(dim=1)
        magnitude = modules[path][MAGNITUDE].detach().double().cpu()
        dora_scale = magnitude * weight.norm(dim=1) / norm_of_sum
        tensors[f"{names[path]}.dora_scale"] = dora_scale.float().reshape(-1, 1)
    return tensors


def _names(family: DiffusersModel, expert: str, paths: Iterable[str]) -> dict[str, str]:
    """Return ComfyUI's names of modules by their paths."""
    net = family.skeleton(expert)
    return {path: form_name(family, net, path, "comfyui")[0] for path in paths}


def verify_dora(
    family: DiffusersModel,
    state: Mapping[str, Tensor],
    scale: float,
    expert: str,
    path: Path,
) -> tuple[float, str]:
    """Compare what ComfyUI computes of a file with the trained weights.

    Returns:
        The largest difference of a weight, relative to the largest of its matrix; and
        the name of the comparison.

    Raises:
        VideotuneError: if it is more than is allowed.
    """
    tensors = load_file(path)
    modules = by_module(state)
    names = _names(family, expert, modules)
    largest = 0.0
    for module_path, weight in base_weights(family, expert, modules):
        name = names[module_path]
        factor_b = tensors[f"{name}.lora_B.weight"].double()
        factor_a = tensors[f"{name}.lora_A.weight"].double()
        dora_scale = tensors[f"{name}.dora_scale"].double()
        theirs = (weight + factor_b @ factor_a) * (
            dora_scale / weight.norm(dim=1, keepdim=True)
        )
        ours = new_weight(weight, modules[module_path], scale)
        error = float((theirs - ours).abs().max() / ours.abs().max())
        largest = max(largest, error)
    if largest > TOLERANCE:
        raise verification_error(path, f"{READER} differs by {largest:.1e}")
    return largest, READER


def base_weights(
    family: DiffusersModel, expert: str, paths: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's weight of each module, in float64 on the CPU."""
    part = family.spec.part_of(expert)
    net = family.skeleton(expert)
    names = {f"{path}.weight": path for path in paths}
    states: Iterable[dict[str, Tensor]] = loading.read_states(
        type(net), family.folder / part, net
    )
    changes = family.weight_changes.get(part)
    if changes is not None:
        states = changes.apply(states, torch.device("cpu"))
    for tensors in states:
        for name in set(tensors) & set(names):
            yield names[name], tensors[name].double()
