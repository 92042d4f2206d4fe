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
        return torch.einsum("obk,bck->obc", blocks, rotation).flatten(1)

    weight = weight + change(parts, scale)
    if "lora_magnitude_vector" in parts:
        magnitude = _double(parts["lora_magnitude_vector"])
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
    return weight


def change(parts: AdapterTensors, scale: float) -> Tensor:
    """Return the update of a module's weight, before DoRA sets the magnitude.

    For OFT it is R - 1 (blocks, b, b). float64 on the CPU.
    """
    if "oft_R" in parts:
        blocks = rotations(parts["oft_R"])
        return blocks - torch.eye(blocks.shape[1], dtype=blocks.dtype)
    if "lora_A" in parts:
        return scale * _double(parts["lora_B"]) @ _double(parts["lora_A"])
    if "hada_w1_a" in parts:
        w1 = _double(parts["hada_w1_a"]) @ _double(parts["hada_w1_b"])
        w2 = _double(parts["hada_w2_a"]) @ _double(parts["hada_w2_b"])
        return w1.mul_(scale).mul_(w2)
    w1 = lokr_factor(parts, "lokr_w1")
    w2 = lokr_factor(parts, "lokr_w2")
    return scale * torch.kron(w1, w2).contiguous()


def lokr_factor(parts: AdapterTensors, name: str) -> Tensor:
    """Return a factor of LoKr in float64, stored as one tensor or as a product."""
    if name in parts:
        return _double(parts[name])
    return _double(parts[f"{name}_a"]) @ _double(parts[f"{name}_b"])


def rotations(numbers: Tensor) -> Tensor:
    """Return PEFT's rotations (blocks, b, b), float64.

    ``numbers`` (blocks, b(b-1)/2) are those above the diagonal of skew matrices Q. R =
    1 + 2Q + 2Q² + 2Q³ + Q⁴: the series of Cayley's (1 + Q)(1 - Q)⁻¹, truncated as in
    PEFT (Qiu et al. 2025, arXiv 2506.19847).
    """
    side = side_of(numbers.shape[1])
    rows, columns = torch.triu_indices(side, side, 1)
    skew = torch.zeros(len(numbers), side, side, dtype=torch.float64)
    skew[:, rows, columns] = _double(numbers)
    skew = skew - skew.transpose(1, 2)
    squared = skew @ skew
    return (
        torch.eye(side, dtype=torch.float64)
        + 2 * (skew + squared + squared @ skew)
        + squared @ squared
    )


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
            functions[f"{path} magnitude"] = partial(
                _double, parts["lora_magnitude_vector"]
            )
    return functions


def _double(x: Tensor) -> Tensor:
    return x.detach().to(x.device if x.is_meta else "cpu", torch.float64)
