"""The effect of an adapter on a weight by its definition, in float64.

Exports and merges are compared with it.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from videotune.adapters.adapter_types import by_module, side_of

AdapterTensors = Mapping[str, Tensor]
"""The tensors of an adapter in one module, by PEFT's names."""


def new_weight(weight: Tensor, parts: AdapterTensors, scale: float) -> Tensor:
    """Return the weight (out, in) with which the module computes, float64 on the CPU."""
    weight = _double(weight)
    if "oft_R" in parts:
        rotation = rotations(parts["oft_R"])
        blocks = weight.unflatten(1, (len(rotation), -1))
        rotated = torch.einsum("obk,bck->obc", blocks, rotation)
        return rotated.flatten(1)

    weight = weight + change(parts, scale)
    if "lora_magnitude_vector" in parts:
        magnitude = _double(parts["lora_magnitude_vector"])
        row_norms = weight.norm(dim=1)
        factor_per_row = magnitude / row_norms
        weight = weight * factor_per_row[:, None]
    return weight


def change(parts: AdapterTensors, scale: float) -> Tensor:
    """Return the update of a module's weight, before DoRA sets the magnitude.

    For OFT it is R - 1 (blocks, b, b). float64 on the CPU.
    """
    if "oft_R" in parts:
        blocks = rotations(parts["oft_R"])
        identity = torch.eye(blocks.shape[1], dtype=blocks.dtype)
        return blocks - identity

    if "lora_A" in parts:
        factor_a = _double(parts["lora_A"])
        factor_b = _double(parts["lora_B"])
        return scale * factor_b @ factor_a

    if "hada_w1_a" in parts:
        w1 = _product(parts, "hada_w1")
        w2 = _product(parts, "hada_w2")
        return w1.mul_(scale).mul_(w2)

    w1 = lokr_factor(parts, "lokr_w1")
    w2 = lokr_factor(parts, "lokr_w2")
    return scale * torch.kron(w1, w2).contiguous()


def lokr_factor(parts: AdapterTensors, name: str) -> Tensor:
    """Return a factor of LoKr in float64, stored as one tensor or as a product."""
    if name in parts:
        return _double(parts[name])
    return _product(parts, name)


def _product(parts: AdapterTensors, name: str) -> Tensor:
    """Return the product of a matrix's two factors in float64."""
    left = _double(parts[f"{name}_a"])
    right = _double(parts[f"{name}_b"])
    return left @ right


def rotations(numbers: Tensor) -> Tensor:
    """Return PEFT's rotations (blocks, b, b), float64.

    ``numbers`` (blocks, b(b-1)/2) are those above the diagonal of skew matrices Q. R =
    1 + 2Q + 2Q² + 2Q³ + Q⁴: the series of Cayley's (1 + Q)(1 - Q)⁻¹, truncated as in
    PEFT (Qiu et al. 2025, arXiv 2506.19847).
    """
    side = side_of(numbers.shape[1])
    rows, columns = torch.triu_indices(side, side, 1)
    upper = torch.zeros(len(numbers), side, side, dtype=torch.float64)
    upper[:, rows, columns] = _double(numbers)
    lower = upper.transpose(1, 2)
    skew = upper - lower

    squared = skew @ skew
    cubed = squared @ skew
    identity = torch.eye(side, dtype=torch.float64)
    return identity + 2 * (skew + squared + cubed) + squared @ squared


def effects(
    state: Mapping[str, Tensor], scale: float
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute an adapter's ``change``, by module path.

    DoRA's magnitudes are under the path and " magnitude".
    """
    functions: dict[str, Callable[[], Tensor]] = {}
    for path, parts in by_module(state).items():
        functions[path] = partial(change, parts, scale)
        if "lora_magnitude_vector" in parts:
            magnitude = parts["lora_magnitude_vector"]
            functions[f"{path} magnitude"] = partial(_double, magnitude)
    return functions


def _double(x: Tensor) -> Tensor:
    device = x.device if x.is_meta else torch.device("cpu")
    return x.detach().to(device, torch.float64)
